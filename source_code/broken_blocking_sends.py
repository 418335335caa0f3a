# SPDX-License-Identifier: Apache-2.0
"""Broken on purpose: 1F1B's first messages with sends that wait until they are taken (lesson 03).

    torchrun --standalone --nproc-per-node 2 source_code/broken_blocking_sends.py --timeout 5

With --at-once the sends return at once: then the program ends over gloo, and may still deadlock
over NCCL. Add --rehearse strict to see where it stops.
"""

import sys

import torch
from broken_mutual_wait import check_two_ranks

from guard.around_main import guarded
from lab import attach
from pipeline.training import checks, parse_arguments, start_job, training_parser


@guarded
def main():
    parser = training_parser(__doc__)
    parser.add_argument("--at-once", action="store_true", help="let the sends return at once")
    attach.add_flags(parser)
    arguments = parse_arguments(parser)
    job = start_job(arguments, shape=(2, 2))
    attach.observe(arguments, job, [], "1f1b")
    other = 1 - job.rank

    def send(message):
        sending = job.send(torch.zeros(2, 2, dtype=job.dtype), other, message)
        if not arguments.at_once:
            sending.wait()

    if job.rank == 0:  # warm-up: forward 0; steady: forward 1, backward 0
        send("activation 0")
        send("activation 1")
        job.receive(other, "gradient 0").wait()
    else:  # steady: forward 0, backward 0, forward 1
        job.receive(other, "activation 0").wait()
        send("gradient 0")
        job.receive(other, "activation 1").wait()
    job.complete_sends()
    print(f"rank {job.rank} has sent and received everything", flush=True)
    return 0


if __name__ == "__main__":
    checks.append(check_two_ranks)
    sys.exit(main())
