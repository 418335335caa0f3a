# SPDX-License-Identifier: Apache-2.0
"""Two ranks and one tensor, in torch's own words (lesson 01).

torchrun --standalone --nproc-per-node 2 two_ranks.py
"""

import os
import sys

import torch
import torch.distributed as dist


def main():
    """Rank 0 sends a number to rank 1, and both print what they have."""
    dist.init_process_group("gloo")
    rank, number = dist.get_rank(), torch.empty(1)
    if rank == 0:
        number[0] = 7.0
        dist.isend(number, 1).wait()
    else:
        dist.irecv(number, 0).wait()
    print(f"rank {rank} of {dist.get_world_size()} has {number.item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if os.environ.get("WORLD_SIZE") != "2" or sys.argv[1:]:
        sys.exit("start this with torchrun --standalone --nproc-per-node 2 and no arguments")
    main()
