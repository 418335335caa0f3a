"""A schedule is data: for each rank, the actions that it takes, in order."""

from collections import namedtuple

Action = namedtuple("Action", "stage kind microbatch")  # F forward, I and W halves of a backward
Schedule = namedtuple("Schedule", "name orders")  # one order for each rank


def zb_h1(num_ranks, num_microbatches):
    """The memory of 1F1B and a third of its bubble (Qi et al. 2023, 2401.10241, section 2.3)."""
    orders = []
    for rank in range(num_ranks):
        forwards, gradients, weights = (
            [Action(rank, kind, k) for k in range(num_microbatches)] for kind in "FIW"
        )
        warm_up = min(num_microbatches, num_ranks - 1 - rank)
        steady, left = num_microbatches - warm_up, iter(weights)
        # Warm-up: fill the stages behind this one.
        order = forwards[:warm_up]
        # Steady: forward, backward for the input, and one for the weights once `rank` are kept back.
        for k in range(steady):
            order += [forwards[warm_up + k], gradients[k]]
            order += [next(left)] if k >= rank else []
        # Cool-down: between two gradients there is time for the weights' part of another.
        for k in range(steady, num_microbatches):
            order += [gradients[k], next(left)]
        orders.append(tuple(order) + tuple(left))
    return Schedule("zb-h1", tuple(orders))
