"""Pipelines with one stage a rank: stage s is on rank s, and a batch is one flush of micro-batches."""

from pipeline.schedule import Action, Schedule, validate
from pipeline.schedules.order import require_positive


def naive(num_ranks, num_microbatches=1):
    """One micro-batch at a time through all stages and back: one rank works, the others wait."""
    require_positive(num_ranks, num_microbatches)
    orders = []
    for rank in range(num_ranks):
        order = []
        for microbatch in range(num_microbatches):
            order.append(Action(rank, "F", microbatch))
            order.append(Action(rank, "B", microbatch))
        orders.append(tuple(order))
    return validate(Schedule("naive", tuple(orders)))


def gpipe(num_ranks, num_microbatches):
    """All forwards, then all backwards, then one update (Huang et al. 2019, section 2.3).

    The backwards run in the order of the forwards; the paper's figure runs them in reverse, which
    takes the same time.
    """
    require_positive(num_ranks, num_microbatches)
    orders = []
    for rank in range(num_ranks):
        forwards = [Action(rank, "F", microbatch) for microbatch in range(num_microbatches)]
        backwards = [Action(rank, "B", microbatch) for microbatch in range(num_microbatches)]
        orders.append(tuple(forwards + backwards))
    return validate(Schedule("gpipe", tuple(orders)))


def one_f_one_b(num_ranks, num_microbatches):
    """One forward, one backward (PipeDream-Flush: Narayanan et al. 2021, 2006.09503, section 2.2).

    The same bubble as GPipe, but a rank holds at most as many micro-batches as there are stages
    from it to the end, itself included.
    """
    require_positive(num_ranks, num_microbatches)
    orders = []
    for rank in range(num_ranks):
        warm_up = min(num_microbatches, num_ranks - 1 - rank)
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
    return validate(Schedule("1f1b", tuple(orders)))
