# SPDX-License-Identifier: Apache-2.0
"""1F1B: one stage per rank, each forward followed by the backward that makes room for the next."""

from pipeline.schedule import Action, Schedule, ScheduleError
from pipeline.schedules.order import require_positive


def one_f_one_b(num_ranks, num_microbatches, depth=None):
    """One forward, one backward (PipeDream-Flush: Narayanan et al. 2021, 2006.09503, section 3.2).

    The same bubble as GPipe, but a rank holds at most as many micro-batches as there are stages
    from it to the end, itself included. With `depth` a rank's warm-up is at most as many forwards:
    it holds fewer micro-batches, and waits longer.
    """
    require_positive(num_ranks, num_microbatches)
    depth = num_ranks if depth is None else depth
    if depth < 0:
        raise ScheduleError(f"1f1b has a warm-up of at least 0 forwards, not {depth}")
    orders = []
    for rank in range(num_ranks):
        warm_up = min(num_microbatches, num_ranks - 1 - rank, depth)
        order = []
        # Warm-up: fill the stages behind this one.
        for microbatch in range(warm_up):
            order.append(Action(rank, "F", microbatch))
        # Steady: each forward is followed by the backward that makes room for the next one.
        for microbatch in range(num_microbatches - warm_up):
            order.append(Action(rank, "F", warm_up + microbatch))
            order.append(Action(rank, "B", microbatch))
        # Cool-down: the backwards that are left.
        for microbatch in range(num_microbatches - warm_up, num_microbatches):
            order.append(Action(rank, "B", microbatch))
        orders.append(tuple(order))
    return Schedule("1f1b", tuple(orders))
