# SPDX-License-Identifier: Apache-2.0
"""Interleaved 1F1B: several stages per rank, and less bubble.

    torchrun --standalone --nproc-per-node 4 interleaved_1f1b.py --chunks 2 --verify

Each rank has --chunks stages of the model that do not follow each other: with four ranks and two
chunks, rank 1 has stages 1 and 5. `train.py --schedule looped-bfs` runs them breadth first.
"""

import sys
from functools import partial

from guard.around_main import guarded
from lab import attach
from pipeline.command_line import positive_integer
from pipeline.message import Message
from pipeline.receives import OrderedReceives
from pipeline.schedule import Action
from pipeline.schedules import interleaved_1f1b
from pipeline.training import (
    build_stage,
    cut_layers,
    parse_arguments,
    start_job,
    train,
    training_parser,
)


@guarded
def main():
    parser = training_parser(__doc__)
    more = {"type": positive_integer, "metavar": "V"}
    parser.add_argument("--chunks", default=2, help="stages per rank", **more)
    attach.add_flags(parser)
    arguments = parse_arguments(parser)
    p, v = arguments.num_ranks, arguments.chunks
    group = group_size(arguments.microbatches, p, v)
    cut = cut_layers(arguments, p * v)
    # A ring: the last rank sends its activations to the first one, for the next chunk.
    pairs = [(rank, (rank + 1) % p, "activation") for rank in range(p) if p > 1]
    pairs += [((rank + 1) % p, rank, "gradient") for rank in range(p) if p > 1]
    job = start_job(arguments, pairs)
    stages = [build_stage(arguments, job.rank + c * p, cut, job.device) for c in range(v)]
    schedule = interleaved_1f1b(p, arguments.microbatches, v)
    attach.observe(arguments, job, stages, schedule)
    return train(arguments, job, stages, partial(run_step, job, stages, group, schedule))


def group_size(num_microbatches, num_ranks, num_chunks):
    """Micro-batches pass the chunks in groups, all of a group through one chunk, then the next."""
    if num_chunks < 2:
        raise SystemExit(
            f"--chunks {num_chunks}: interleaving needs at least 2; with one it is 1F1B"
        )
    groups = max(1, num_microbatches // num_ranks)
    if num_microbatches % groups:
        raise SystemExit(
            f"--microbatches {num_microbatches} do not divide into {groups} equal groups of at "
            f"least {num_ranks}; use {groups * num_ranks} or {(groups + 1) * num_ranks}"
        )
    return num_microbatches // groups


def run_step(job, stages, group, schedule, inputs, targets):
    """One step of this rank. Returns the loss on the last rank, None elsewhere.

    The loop itself is the schedule. It uses `schedule` only to know which receive must be posted
    before which send: in a ring all ranks could otherwise send first, and all wait.
    """
    p, v, m = job.num_ranks, len(stages), len(inputs)
    previous, following = (job.rank - 1) % p, (job.rank + 1) % p
    passages = v * m  # of a micro-batch through a chunk
    warm_up = min(passages, (v - 1) * group + 2 * (p - 1 - job.rank))
    receives = OrderedReceives(job, schedule)
    results, losses = {}, []  # with one rank, `results` has what a stage hands to the next

    def take(*message):
        message = Message(*message)
        return results.pop(message) if p == 1 else receives.take(message)

    def give(tensor, destination, *message):
        message = Message(*message)
        if p == 1:
            results[message] = tensor
        else:
            job.send(tensor, destination, message)

    def forward(passage):
        chunk, k = chunk_and_microbatch(passage, group, v)
        stage, activation = stages[chunk], inputs[k]
        receives.post_before(Action(stage.index, "F", k))
        if not stage.is_first:
            activation = take("activation", stage.index - 1, k)
        output = stage.forward(k, activation, targets[k])
        if stage.is_last:
            losses.append(output)
        else:
            give(output, following, "activation", stage.index, k)

    def backward(passage):
        chunk, k = chunk_and_microbatch(passage, group, v)
        stage, gradient = stages[v - 1 - chunk], None
        receives.post_before(Action(stage.index, "B", k))
        if not stage.is_last:
            gradient = take("gradient", stage.index + 1, k)
            job.release_sent(Message("activation", stage.index, k))  # the gradient was made from it
        gradient = stage.backward(k, gradient)
        if passage >= 2:  # the gradient before the last one has been taken
            chunk, sent = chunk_and_microbatch(passage - 2, group, v)
            job.release_sent(Message("gradient", stages[v - 1 - chunk].index, sent))
        if not stage.is_first:
            give(gradient, previous, "gradient", stage.index, k)

    # Warm-up: all chunks but the last for one group, and two forwards more for each rank behind.
    for passage in range(warm_up):
        forward(passage)

    # Steady: one forward, one backward.
    for passage in range(passages - warm_up):
        forward(warm_up + passage)
        backward(passage)

    # Cool-down: the backwards that are left.
    for passage in range(passages - warm_up, passages):
        backward(passage)

    job.complete_sends()
    return sum(losses) if losses else None


def chunk_and_microbatch(passage, group, num_chunks):
    """Which chunk the passage of that number goes through, and with which micro-batch."""
    number, within = divmod(passage, group * num_chunks)
    chunk, member = divmod(within, group)
    return chunk, number * group + member


if __name__ == "__main__":
    sys.exit(main())
