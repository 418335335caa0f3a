# SPDX-License-Identifier: Apache-2.0
"""1F1B: one forward, one backward, so that few activations are held.

torchrun --standalone --nproc-per-node 4 one_f_one_b.py --verify
"""

import sys
from collections import deque
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
    attach.observe(arguments, job, [stage], "1f1b")
    return train(arguments, job, [stage], partial(run_step, job, stage))


def run_step(job, stage, inputs, targets):
    """One 1F1B step of this rank. Returns the loss on the last rank, None elsewhere."""
    previous, following = job.rank - 1, job.rank + 1
    warm_up = min(len(inputs), job.num_ranks - 1 - job.rank)
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

    def backward(k):
        gradient = None
        if not stage.is_last:
            gradient = job.receive(following, Message("gradient", following, k)).wait()
            job.release_sent(Message("activation", job.rank, k))  # the gradient was made from it
        gradient = stage.backward(k, gradient)
        # The rank before sends its next activation before it takes this gradient. A send may wait
        # for its receive, so this rank posts that receive first: otherwise both could wait.
        expect_activation(warm_up + 1 + k)
        if not stage.is_first:
            job.release_sent(Message("gradient", job.rank, k - 2))  # taken before the last one
            job.send(gradient, previous, Message("gradient", job.rank, k))

    # Warm-up: one forward for each stage behind this one.
    for k in range(warm_up):
        expect_activation(k)
        forward(k)

    # Steady: one forward, one backward.
    expect_activation(warm_up)
    for k in range(len(inputs) - warm_up):
        forward(warm_up + k)
        backward(k)

    # Cool-down: the backwards that are left.
    for k in range(len(inputs) - warm_up, len(inputs)):
        backward(k)

    job.complete_sends()
    return sum(losses) if losses else None


if __name__ == "__main__":
    sys.exit(main())
