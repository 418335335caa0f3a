# SPDX-License-Identifier: Apache-2.0
"""Checks of lesson 02: the reader's own GPipe schedule, and the number of micro-batches."""

import math
from itertools import product

from course.checks.answer import (
    call_for_number,
    call_for_schedule,
    checked,
    drawn,
    many,
)
from lab.simulator import Costs, simulate
from pipeline.schedules import gpipe, naive

# Ranks and micro-batches.
SIZES = [(2, 2), (4, 8), (3, 1), (1, 4), (5, 3), *product(range(1, 6), repeat=2)]
SIZES += drawn(lambda choose: (choose.randint(1, 9), choose.randint(1, 20)), 20)


@checked("your schedule is legal, and it takes exactly as long as GPipe's.")
def own_gpipe(rows):
    """Check `rows(num_ranks, num_microbatches)`: one text per rank, such as "0F0,0F1,0B0,0B1"."""
    for num_ranks, num_microbatches in SIZES:
        schedule = call_for_schedule(rows, num_ranks, num_microbatches)
        case = f"{many(num_ranks, 'rank')}, {many(num_microbatches, 'micro-batch')}"
        timeline = simulate(schedule, Costs(10, 20))
        wanted = simulate(gpipe(num_ranks, num_microbatches), Costs(10, 20))
        slowest = simulate(naive(num_ranks, num_microbatches), Costs(10, 20))
        if timeline.makespan == slowest.makespan > wanted.makespan:
            return (
                f"{case}: legal, but {timeline.makespan:g} ms, as slow as lesson 01: let a rank "
                "start the next micro-batch before the last one has come back"
            )
        if timeline.makespan != wanted.makespan:
            return f"{case}: legal, but {timeline.makespan:g} ms; GPipe takes {wanted.makespan:g}"
        held = zip(wanted.peak_held_per_rank, timeline.peak_held_per_rank)
        for rank, (most, yours) in enumerate(held):
            if most != yours:
                return (
                    f"{case}: legal and as fast, but not GPipe, where all forwards come first: "
                    f"on rank {rank} a backward comes before the last forward"
                )


def _ranks_and_bubble(choose):
    """Many ranks only with a large bubble, for which few micro-batches are enough."""
    largest = (10 * choose.randint(2, 99) + choose.choice([1, 3, 7, 9])) / 1000
    return choose.randint(1, 64 if largest > 0.5 else 9), largest


# Bubbles that can be met exactly are powers of one half, which no form of the formula rounds; with
# thousandths that end in 1, 3, 7 or 9, only more ranks than these could meet one.
CASES = [(5, 0.25), (4, 0.125), (8, 0.3), (2, 0.5), (1, 0.1), (32, 0.0625)]
CASES += product(range(1, 9), (0.5, 0.25, 0.125, 0.0625))
CASES += drawn(_ranks_and_bubble)


@checked("m >= (p - 1)(1 - x) / x: halving the bubble takes about twice the micro-batches.")
def enough_microbatches(microbatches_needed):
    """Check `microbatches_needed(num_ranks, largest_bubble)`: the fewest micro-batches for which
    the bubble over the total is at most `largest_bubble`."""
    for num_ranks, largest in CASES:
        answer = call_for_number(microbatches_needed, num_ranks, largest)
        right = _fewest(num_ranks, largest)
        if answer == right:
            continue
        case = (
            f"{many(num_ranks, 'rank')}, bubble at most {largest}: "
            f"you say {answer:g} micro-batch{'' if answer == 1 else 'es'}"
        )
        if answer != int(answer):
            return f"{case}, but micro-batches are whole: round up"
        if answer < 1:
            return f"{case}, but a batch has at least one"
        bubble = (num_ranks - 1) / (answer + num_ranks - 1)
        others = [call_for_number(microbatches_needed, p, x) for p, x in CASES[:3]]
        if others == [math.ceil((p - 1) / x - 1e-9) for p, x in CASES[:3]]:
            return (
                f"{case}: that bounds idle / busy, (p - 1) / m; the question is idle / total, "
                "(p - 1) / (m + p - 1)"
            )
        if answer < right:
            return f"{case}, whose bubble is {bubble:.4f}, too much"
        return f"{case}, whose bubble is {bubble:.4f}; {right} would do"


def _fewest(num_ranks, largest):
    # The tolerance is for bubbles that meet the limit exactly, such as 1/2 for two ranks.
    return max(1, math.ceil((num_ranks - 1) * (1 - largest) / largest - 1e-9))
