# SPDX-License-Identifier: Apache-2.0
"""Zero bubble: the backward in two halves, of which the second fills the bubble.

    torchrun --standalone --nproc-per-node 4 zero_bubble.py --schedule zb-h1 --verify

ZB-H1 has the warm-up of 1F1B and its memory; ZB-H2 a warm-up twice as long and no bubble.
"""

import sys
from collections import deque
from functools import partial

from guard.around_main import guarded
from lab import attach
from pipeline.message import Message
from pipeline.split_stage import SplitStage
from pipeline.training import (
    build_stage,
    cut_layers,
    parse_arguments,
    start_job,
    train,
    training_parser,
)

FORWARDS_PER_RANK_BEHIND = {"zb-h1": 1, "zb-h2": 2}


@guarded
def main():
    parser = training_parser(__doc__)
    names = list(FORWARDS_PER_RANK_BEHIND)
    parser.add_argument("--schedule", choices=names, default="zb-h1", help="length of the warm-up")
    attach.add_flags(parser)
    arguments = parse_arguments(parser)
    cut = cut_layers(arguments, arguments.num_ranks)
    job = start_job(arguments)
    stage = build_stage(arguments, job.rank, cut, job.device, SplitStage)
    attach.observe(arguments, job, [stage], arguments.schedule)
    per_rank = FORWARDS_PER_RANK_BEHIND[arguments.schedule]
    return train(arguments, job, [stage], partial(run_step, job, stage, per_rank))


def run_step(job, stage, per_rank, inputs, targets):
    """One step of this rank. Returns the loss on the last rank, None elsewhere."""
    previous, following = job.rank - 1, job.rank + 1
    warm_up = min(len(inputs), per_rank * (job.num_ranks - 1 - job.rank))
    kept_back = per_rank * job.rank  # weight gradients that wait for the cool-down
    deferred = deque()  # micro-batches whose weight gradients are still to be computed
    expected = deque()  # receives of activations, posted before they are needed
    losses = []

    def expect_activation(k):
        if not stage.is_first and k < len(inputs):
            expected.append(job.receive(previous, Message("activation", previous, k)))

    def forward(k):
        activation = inputs[k] if stage.is_first else expected.popleft().wait()
        output = stage.forward(k, activation, targets[k])
        if stage.is_last:
            losses.append(output)
        else:
            job.send(output, following, Message("activation", job.rank, k))

    def backward_input(k):
        gradient = None
        if not stage.is_last:
            gradient = job.receive(following, Message("gradient", following, k)).wait()
            job.release_sent(Message("activation", job.rank, k))  # the gradient was made from it
        gradient = stage.backward_input(k, gradient)
        # The rank before sends so many activations before it takes this gradient. A send may wait
        # for its receive, so this rank posts those receives first: otherwise both could wait.
        expect_activation(warm_up + per_rank + k)
        if not stage.is_first:
            # The rank before takes a gradient after each forward that it sends.
            job.release_sent(Message("gradient", job.rank, k - per_rank - 1))
            job.send(gradient, previous, Message("gradient", job.rank, k))
        deferred.append(k)

    # Warm-up: fill the stages behind this one.
    for k in range(warm_up):
        expect_activation(k)
        forward(k)

    # Steady: forward, backward for the input, and one for the weights once enough are kept back.
    for k in range(warm_up, warm_up + per_rank):
        expect_activation(k)
    for k in range(len(inputs) - warm_up):
        forward(warm_up + k)
        backward_input(k)
        if len(deferred) > kept_back:
            stage.backward_weight(deferred.popleft())

    # Cool-down: between two gradients there is time for the weights of another micro-batch.
    for k in range(len(inputs) - warm_up, len(inputs)):
        backward_input(k)
        stage.backward_weight(deferred.popleft())
    while deferred:
        stage.backward_weight(deferred.popleft())

    job.complete_sends()
    return sum(losses) if losses else None


if __name__ == "__main__":
    sys.exit(main())
