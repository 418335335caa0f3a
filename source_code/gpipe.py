# SPDX-License-Identifier: Apache-2.0
"""GPipe: a batch in micro-batches, all forwards, all backwards, one update.

torchrun --standalone --nproc-per-node 4 gpipe.py --verify
"""

import sys
from functools import partial

from guard.around_main import guarded
from lab import attach
from pipeline.message import Message
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
    attach.add_flags(parser)
    arguments = parse_arguments(parser)
    cut = cut_layers(arguments, arguments.num_ranks)
    job = start_job(arguments)
    stage = build_stage(arguments, job.rank, cut, job.device)
    attach.observe(arguments, job, [stage], "gpipe")
    return train(arguments, job, [stage], partial(run_step, job, stage))


def run_step(job, stage, inputs, targets):
    """One GPipe step of this rank. Returns the loss on the last rank, None elsewhere."""
    previous, following = job.rank - 1, job.rank + 1
    losses = []

    # All forwards: an activation from the rank before, an activation for the rank after.
    for k in range(len(inputs)):
        activation = inputs[k]
        if not stage.is_first:
            activation = job.receive(previous, Message("activation", previous, k)).wait()
        output = stage.forward(k, activation, targets[k])
        if stage.is_last:
            losses.append(output)
        else:
            job.send(output, following, Message("activation", job.rank, k))

    # All backwards: a gradient from the rank after, a gradient for the rank before.
    for k in range(len(inputs)):
        gradient = None
        if not stage.is_last:
            gradient = job.receive(following, Message("gradient", following, k)).wait()
            job.release_sent(Message("activation", job.rank, k))  # the gradient was made from it
        gradient = stage.backward(k, gradient)
        if not stage.is_first:
            job.send(gradient, previous, Message("gradient", job.rank, k))

    job.complete_sends()
    return sum(losses) if losses else None


if __name__ == "__main__":
    sys.exit(main())
