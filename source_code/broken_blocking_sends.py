"""Broken on purpose: 1F1B's first messages with sends that wait until they are taken (lesson 03).

torchrun --standalone --nproc-per-node 2 source_code/broken_blocking_sends.py --timeout 1
"""

import sys

import torch

from lab import attach
from pipeline.job import join_job
from pipeline.training import parse_arguments, training_parser


def main():
    parser = training_parser(__doc__)
    attach.add_flags(parser)
    arguments = parse_arguments(parser)
    job = join_job(arguments.device, arguments.timeout, None, (2, 2), torch.float32)
    attach.observe(arguments, job, [], "1f1b")
    other, tensor = 1 - job.rank, torch.zeros(2, 2)
    if job.rank == 0:  # warm-up: forward 0; steady: forward 1, backward 0
        job.send(tensor, other, "activation 0").wait()
        job.send(tensor, other, "activation 1").wait()
        job.receive(other, "gradient 0").wait()
    else:  # steady: forward 0, backward 0, forward 1
        job.receive(other, "activation 0").wait()
        job.send(tensor, other, "gradient 0").wait()
        job.receive(other, "activation 1").wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
