# SPDX-License-Identifier: Apache-2.0
"""ZB-V: zero bubble with the memory of 1F1B.

Two stages per rank, placed in a V: rank i has stage i and, counted from the end, stage i again.
The first rank has both ends of the model, so it has the loss, and a micro-batch turns round on the
last rank without a message. `down` is a rank's stage on the way to the turn, `up` the one after it.
"""

from pipeline.schedule import Schedule
from pipeline.schedules.order import Order, require_positive


def zb_v(num_ranks, num_microbatches):
    """Zero bubble with the memory of 1F1B (Zero Bubble: Qi et al. 2023, arXiv 2401.10241, section 6).

    This is the handcrafted order, without a bubble on any rank if F, I and W take equally long; the
    paper's automatic scheduler searches for others. It is made for at least 2 * num_ranks - 1
    micro-batches; with fewer, the actions of missing micro-batches are left out.
    """
    require_positive(num_ranks, num_microbatches)
    written = max(num_microbatches, 2 * num_ranks - 1)
    orders = []
    for rank in range(num_ranks):
        down, up = rank, 2 * num_ranks - 1 - rank
        order = Order()
        # Warm-up: forwards until the first comes back from the turn, then on both ways alternately,
        for _ in range(2 * (num_ranks - rank) - 1):
            order.forward(down)
        for _ in range(rank):
            order.forward(up)
            order.forward(down)
        # then both passes on the way up, until the first gradient for the way down arrives.
        for _ in range(num_ranks - rank):
            order.forward(up)
            order.backward_for_input(up)
            order.backward_for_weights()
        # Steady: forward and whole backward on the way down, then on the way up.
        for _ in range(written - num_ranks):
            if order.taken[down, "F"] < written:
                order.forward(down)
            order.backward_for_input(down)
            order.backward_for_weights()
            order.forward(up)
            order.backward_for_input(up)
            order.backward_for_weights()
        # Cool-down: gradients first, so that no other rank waits; the weights fill the end.
        for _ in range(rank):
            order.backward_for_input(down)
            order.backward_for_input(up)
        for _ in range(num_ranks - rank):
            order.backward_for_input(down)
            order.backward_for_weights(down)
        for _ in range(rank):
            order.backward_for_weights(up)
        order.remaining_backwards_for_weights()
        orders.append(tuple(a for a in order.actions if a.microbatch < num_microbatches))
    return Schedule("zb-v", tuple(orders))
