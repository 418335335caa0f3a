# SPDX-License-Identifier: Apache-2.0
"""ZB-H1 and ZB-H2: one stage per rank and a backward in two parts.

Zero Bubble: Qi et al. 2023, arXiv 2401.10241.

The previous stage waits only for the gradient of its output. So the backward for the input (I) runs
as early as possible, and the backward for the weights (W), for which no rank waits, fills idle
time. These are the paper's handcrafted orders (section 2), which suit equal times of F, I and W;
its automatic scheduler searches for others.
"""

from pipeline.schedule import Schedule
from pipeline.schedules.order import Order, require_positive


def zb_h1(num_ranks, num_microbatches):
    """The memory of 1F1B's first rank and, for equal times, a third of its bubble (section 2.1, ZB-H1).

    The warm-up is that of 1F1B. Rank i defers i weight gradients to its cool-down.
    """
    return _with_delayed_weights("zb-h1", num_ranks, num_microbatches, forwards_per_rank_behind=1)


def zb_h2(num_ranks, num_microbatches):
    """No bubble on any rank between its first action and its last, for more memory (section 2.2, ZB-H2).

    The warm-up is twice as long, so that the first gradient arrives when it ends, and rank i defers
    2i weight gradients. For equal times the bubble is zero with at least 2 * num_ranks - 1
    micro-batches; with fewer, the warm-up has as many forwards as there are micro-batches.
    """
    return _with_delayed_weights("zb-h2", num_ranks, num_microbatches, forwards_per_rank_behind=2)


def _with_delayed_weights(name, num_ranks, num_microbatches, forwards_per_rank_behind):
    require_positive(num_ranks, num_microbatches)
    orders = []
    for rank in range(num_ranks):
        warm_up = min(num_microbatches, forwards_per_rank_behind * (num_ranks - 1 - rank))
        kept_back = forwards_per_rank_behind * rank
        order = Order()
        # Warm-up: fill the stages behind this one.
        for _ in range(warm_up):
            order.forward(rank)
        # Steady: forward, backward for the input, and one for the weights once enough are kept.
        for _ in range(num_microbatches - warm_up):
            order.forward(rank)
            order.backward_for_input(rank)
            if len(order.delayed) > kept_back:
                order.backward_for_weights()
        # Cool-down: between two gradients there is time for the weights' part of another.
        for _ in range(warm_up):
            order.backward_for_input(rank)
            order.backward_for_weights()
        order.remaining_backwards_for_weights()
        orders.append(tuple(order.actions))
    return Schedule(name, tuple(orders))
