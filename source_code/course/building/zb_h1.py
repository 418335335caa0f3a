# SPDX-License-Identifier: Apache-2.0
"""ZB-H1 with the functions of lesson 02 and the split backward (lesson 09).

Zero Bubble: Qi et al. 2023, arXiv 2401.10241, section 2.
"""

from collections import deque

import torch.distributed as dist

from course.building.single_messages import backward, forward
from small.split_backward import take_deferred


def backward_input(stage, k, held, sends):
    """Run the half I of micro-batch `k`, as `backward`; return a function that runs its half W."""
    backward(stage, k, held, sends)
    return take_deferred(stage)


def zb_h1_step(stage, inputs, targets):
    """One step of this rank. Returns the loss on the last rank, None elsewhere."""
    held, sends, shares, later = {}, [], [], deque()
    rank = dist.get_rank()
    warm_up = min(len(inputs), dist.get_world_size() - 1 - rank)
    for k in range(warm_up):
        shares.append(forward(stage, k, inputs, targets, held, sends))
    for k in range(len(inputs) - warm_up):
        shares.append(forward(stage, warm_up + k, inputs, targets, held, sends))
        later.append(backward_input(stage, k, held, sends))
        if len(later) > rank:
            later.popleft()()
    for k in range(len(inputs) - warm_up, len(inputs)):
        later.append(backward_input(stage, k, held, sends))
        later.popleft()()
    while later:
        later.popleft()()
    for send in sends:
        send.wait()
    return sum(shares) if stage.following is None else None
