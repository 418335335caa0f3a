"""Broken on purpose: one rank waits for something that is no message, and all others for it (lesson 11).

torchrun --standalone --nproc-per-node 4 source_code/broken_stuck_rank.py --timeout 5
"""

import os
import sys
import tempfile

import torch

from pipeline.job import Receiving, Sending, join_job, leave_job
from pipeline.training import parse_training_arguments, training_parser

STUCK_RANK, STUCK_MICROBATCH = 2, 1


def main():
    arguments = parse_training_arguments(training_parser(__doc__.splitlines()[0]))
    job = join_job(arguments.device, arguments.timeout)
    torch.distributed.barrier()  # a first collective, for the flight recorder
    if job.rank == 0:
        print("all ranks are there", flush=True)
    activation = torch.zeros(2, 2, dtype=arguments.torch_dtype)
    for k in range(arguments.microbatches):
        if job.rank > 0:
            activation = Receiving(
                job, (2, 2), arguments.torch_dtype, job.rank - 1, f"activation {k}"
            ).wait()
        if (job.rank, k) == (STUCK_RANK, STUCK_MICROBATCH):
            read_from_slow_disk()
        if job.rank < job.num_ranks - 1:
            Sending(job, activation, job.rank + 1, f"activation {k}").wait()
    leave_job(job)
    return 0


def read_from_slow_disk():
    """A read that never ends, as from a network disk that is gone: a pipe that nobody writes to."""
    with tempfile.TemporaryDirectory() as folder:
        pipe = os.path.join(folder, "data")
        os.mkfifo(pipe)
        with open(pipe) as file:
            return file.read()


if __name__ == "__main__":
    sys.exit(main())
