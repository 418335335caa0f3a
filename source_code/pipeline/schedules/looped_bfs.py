# SPDX-License-Identifier: Apache-2.0
"""Looped breadth first: GPipe with several stages (chunks) per rank, in loops.

Chunk c of rank i is stage c * num_ranks + i, as in interleaved_1f1b.py.
"""

from pipeline.schedule import Action, Schedule
from pipeline.schedules.order import require_positive, require_several_chunks


def looped_bfs(num_ranks, num_microbatches, num_chunks=2):
    """Breadth first: chunk after chunk for the whole batch (Lamy-Poirier 2022, arXiv 2211.05953).

    GPipe with several chunks per rank, with the bubble of interleaved 1F1B and the memory of GPipe.
    The backwards run in the order of the forwards, as in `gpipe`.
    """
    require_positive(num_ranks, num_microbatches)
    require_several_chunks("looped-bfs", num_chunks, "gpipe")
    orders = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * num_chunks, num_ranks)
        order = []
        for stage in stages:
            for microbatch in range(num_microbatches):
                order.append(Action(stage, "F", microbatch))
        for stage in reversed(stages):
            for microbatch in range(num_microbatches):
                order.append(Action(stage, "B", microbatch))
        orders.append(tuple(order))
    return Schedule("looped-bfs", tuple(orders))
