"""Broken on purpose: two ranks that each wait for the other first (lesson 01).

torchrun --standalone --nproc-per-node 2 source_code/broken_mutual_wait.py --timeout 1
"""

import sys

import torch

from pipeline.job import Receiving, join_job
from pipeline.training import parse_training_arguments, training_parser


def main():
    arguments = parse_training_arguments(training_parser(__doc__.splitlines()[0]))
    job = join_job(arguments.device, arguments.timeout)
    other = 1 - job.rank
    message = Receiving(job, (2, 2), torch.float64, other, f"a gradient for rank {job.rank}")
    message.wait()  # what this waits for would be sent by the line after the other rank's wait
    return 0


if __name__ == "__main__":
    sys.exit(main())
