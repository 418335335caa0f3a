# SPDX-License-Identifier: Apache-2.0
"""Naive model parallelism: one stage per rank, and one rank works at a time."""

from pipeline.schedule import Action, Schedule
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
    return Schedule("naive", tuple(orders))
