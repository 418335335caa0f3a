# SPDX-License-Identifier: Apache-2.0
"""Broken on purpose: one rank waits for a disk, and all others wait for that rank (lesson 11).

torchrun --standalone --nproc-per-node 4 source_code/broken_stuck_rank.py --timeout 5
"""

import os
import sys
import tempfile

import torch

from guard.around_main import guarded
from lab import attach
from pipeline.training import parse_arguments, start_job, training_parser

STUCK_RANK, STUCK_MICROBATCH = 2, 1


@guarded
def main():
    parser = training_parser(__doc__)
    attach.add_flags(parser)
    parser.checks.append(check_sizes)
    arguments = parse_arguments(parser)
    job = start_job(arguments, shape=(2, 2))
    attach.observe(arguments, job, [], "gpipe")
    torch.distributed.barrier()  # a first collective, for the flight recorder
    if job.rank == 0:
        print("all ranks are there", flush=True)
    activation = torch.zeros(2, 2, dtype=job.dtype)
    for k in range(arguments.microbatches):
        if job.rank > 0:
            activation = job.receive(job.rank - 1, f"activation {k}").wait()
        if (job.rank, k) == (STUCK_RANK, STUCK_MICROBATCH):
            read_from_slow_disk()
        if job.rank < job.num_ranks - 1:
            job.send(activation, job.rank + 1, f"activation {k}").wait()
    job.leave()
    return 0


def read_from_slow_disk():
    """Read from a pipe without a writer, which never ends, as from an unreachable network disk."""
    with tempfile.TemporaryDirectory() as folder:
        pipe = os.path.join(folder, "data")
        os.mkfifo(pipe)
        with open(pipe) as file:
            return file.read()


def check_sizes(arguments):
    if arguments.num_ranks <= STUCK_RANK or arguments.microbatches <= STUCK_MICROBATCH:
        raise SystemExit(
            f"rank {STUCK_RANK} waits in its second micro-batch; start this program with torchrun "
            "--standalone --nproc-per-node 4, and with --microbatches 2 or more"
        )


if __name__ == "__main__":
    sys.exit(main())
