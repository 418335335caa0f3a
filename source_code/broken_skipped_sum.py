# SPDX-License-Identifier: Apache-2.0
"""Broken on purpose: one rank leaves out a sum, and the flight recorder of torch names it (lesson 12b).

    torchrun --standalone --nproc-per-node 4 source_code/broken_skipped_sum.py --recorder build/flight

There are two replicas of two stages: ranks 0 and 2 sum the gradients of the first stage, ranks 1
and 3 those of the second. In the second step one rank has no gradient and skips the sum. The
program uses no code of the course: after --timeout seconds each rank writes the content of torch's
flight recorder, and ends.
"""

import argparse
import os
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

SKIPS = 3  # the rank that leaves its sum out


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--recorder", metavar="FOLDER", required=True, help="for rankN.json")
    parser.add_argument("--timeout", type=float, default=3.0, metavar="S", help="longest wait")
    arguments = parser.parse_args()
    if os.environ.get("WORLD_SIZE") != "4":
        parser.error("this program is two replicas of two stages; start it with --nproc-per-node 4")
    if not 0 < arguments.timeout <= 600:
        parser.error(f"--timeout {arguments.timeout:g} is not above 0 and at most 600; use 3")
    try:
        os.makedirs(arguments.recorder, exist_ok=True)
    except OSError as error:
        parser.error(
            f"--recorder {arguments.recorder} cannot be made ({error.strerror}); name another"
        )
    dist.init_process_group("gloo", timeout=timedelta(seconds=arguments.timeout + 30))
    rank = dist.get_rank()
    groups = [
        dist.new_group([stage, stage + 2], group_desc=f"replicas of stage {stage}")
        for stage in (0, 1)
    ]
    dist.barrier()
    watch = threading.Timer(arguments.timeout, write_flight_recorder, (arguments.recorder, rank))
    watch.start()
    for step in range(3):
        gradient = None if (rank, step) == (SKIPS, 1) else torch.ones(4)
        if gradient is not None:
            dist.all_reduce(gradient, group=groups[rank % 2])
        dist.barrier()
    watch.cancel()
    dist.destroy_process_group()
    return 0


def write_flight_recorder(folder, rank):
    """Write the last sends and sums of a rank as JSON, and end the process."""
    from torch._C._distributed_c10d import _dump_fr_trace_json

    no_link = getattr(os, "O_NOFOLLOW", 0)  # another user's link could lead to a file of ours
    try:
        path = os.path.join(folder, f"rank{rank}.json")
        with open(
            path, "wb", opener=lambda path, flags: os.open(path, flags | no_link, 0o666)
        ) as file:
            file.write(_dump_fr_trace_json())
    except OSError as error:
        print(
            f"--recorder {path} cannot be written ({error.strerror}); name another folder",
            file=sys.stderr,
        )
    time.sleep(1)  # if this rank ended earlier, others might record a lost rank in place of a wait
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
