"""Broken on purpose: 1F1B's first messages with sends that wait until they are taken (lesson 03).

torchrun --standalone --nproc-per-node 2 source_code/broken_blocking_sends.py --timeout 1
"""

import sys

import torch

from pipeline.job import Receiving, Sending, join_job
from pipeline.training import parse_training_arguments, training_parser


def main():
    arguments = parse_training_arguments(training_parser(__doc__.splitlines()[0]))
    job = join_job(arguments.device, arguments.timeout)
    other, tensor = 1 - job.rank, torch.zeros(2, 2)
    if job.rank == 0:  # warm-up: forward 0; steady: forward 1, backward 0
        Sending(job, tensor, other, "activation 0").wait()
        Sending(job, tensor, other, "activation 1").wait()
        Receiving(job, (2, 2), torch.float32, other, "gradient 0").wait()
    else:  # steady: forward 0, backward 0, forward 1
        Receiving(job, (2, 2), torch.float32, other, "activation 0").wait()
        Sending(job, tensor, other, "gradient 0").wait()
        Receiving(job, (2, 2), torch.float32, other, "activation 1").wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
