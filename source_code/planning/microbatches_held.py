# SPDX-License-Identifier: Apache-2.0
"""The largest number of micro-batches that each rank of a schedule holds for its backwards.

The papers' formulas give it for GPipe, looped BFS, 1F1B and interleaved 1F1B. For other schedules
it is counted from the order of each rank; after two rounds of p micro-batches it stays the same.
"""

from functools import lru_cache

from pipeline.schedules import build_schedule

WHOLE = {"F": 1, "B": -1, "I": -1, "W": 0}  # change in the pairs that a rank holds whole
HALF = {"F": 0, "B": 0, "I": 1, "W": -1}  # and in those between I and W


def held_by(schedule, ranks, chunks, m, deferred=1.0):
    """The most (stage, micro-batch) pairs that each rank of a schedule holds.

    If backwards are split, a pair counts 1 until its I has run, and `deferred` from then until its
    W has run.
    """
    p, v = ranks, chunks
    formulas = {
        "gpipe": lambda rank: m,
        "looped-bfs": lambda rank: m * v,
        "1f1b": lambda rank: min(m, p - rank),
        "interleaved-1f1b": lambda rank: min(m * v, (v - 1) * p + 2 * (p - 1 - rank) + 1),
    }
    if schedule in formulas:
        return [formulas[schedule](rank) for rank in range(p)]
    counts = counted(schedule, ranks, chunks, min(m, 2 * p))
    return [max(whole + half * deferred for half, whole in of_rank.items()) for of_rank in counts]


@lru_cache(maxsize=2000)
def counted(schedule, ranks, chunks, m):
    """For each rank {pairs between I and W: the most whole pairs that it holds beside them}."""
    most = []
    for order in build_schedule(schedule, ranks, m, chunks).orders:
        whole = half = 0
        found = {0: 0}
        for action in order:
            whole += WHOLE[action.kind]
            half += HALF[action.kind]
            found[half] = max(found.get(half, 0), whole)
        most.append(found)
    return most
