# SPDX-License-Identifier: Apache-2.0
"""Broken on purpose: two ranks that each wait for the other first (lesson 01).

torchrun --standalone --nproc-per-node 2 source_code/broken_mutual_wait.py --timeout 5
"""

import sys

from guard.around_main import guarded
from lab import attach
from pipeline.training import checks, parse_arguments, start_job, training_parser


@guarded
def main():
    parser = training_parser(__doc__)
    attach.add_flags(parser)
    arguments = parse_arguments(parser)
    job = start_job(arguments, shape=(2, 2))
    attach.observe(arguments, job, [], "naive")
    other = 1 - job.rank
    # The other rank would send this gradient after its own wait, which never ends.
    job.receive(other, f"a gradient for rank {job.rank}").wait()
    return 0


def check_two_ranks(arguments):
    if arguments.num_ranks != 2:
        raise SystemExit(
            f"this program is about two ranks, and this job has {arguments.num_ranks}; start it "
            "with torchrun --standalone --nproc-per-node 2"
        )


if __name__ == "__main__":
    checks.append(check_two_ranks)
    sys.exit(main())
