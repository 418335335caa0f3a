# SPDX-License-Identifier: Apache-2.0
"""GPipe: one stage per rank, all forwards, then all backwards, then one update."""

from pipeline.schedule import Action, Schedule
from pipeline.schedules.order import require_positive


def gpipe(num_ranks, num_microbatches):
    """All forwards, then all backwards, then one update (Huang et al. 2019, section 2.2).

    The backwards run in the order of the forwards; the paper's figure runs them in reverse, which
    takes the same time.
    """
    require_positive(num_ranks, num_microbatches)
    orders = []
    for rank in range(num_ranks):
        forwards = [Action(rank, "F", microbatch) for microbatch in range(num_microbatches)]
        backwards = [Action(rank, "B", microbatch) for microbatch in range(num_microbatches)]
        orders.append(tuple(forwards + backwards))
    return Schedule("gpipe", tuple(orders))
