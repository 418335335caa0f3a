# SPDX-License-Identifier: Apache-2.0
"""The check of lesson 05's best number of chunks. build_steps.py has that of the step."""

from itertools import product

from course.checks.answer import call_for_number, checked, close, drawn, many
from lab.simulator import Costs, simulate
from pipeline.schedules import interleaved_1f1b, one_f_one_b


def _drawn_sizes(choose):
    num_ranks = choose.randint(2, 10)
    num_microbatches = num_ranks * choose.randint(1, 24 // num_ranks)
    return num_ranks, num_microbatches, *(choose.randint(1, most) / 8 for most in (40, 40, 12))


# Ranks, micro-batches, and the milliseconds of a forward, a backward and a message.
CASES = [
    (4, 8, 20, 40, 0.5),
    (4, 8, 20, 40, 4),
    (4, 16, 4, 8, 9),
    (8, 8, 20, 40, 2),
    (8, 8, 12, 4, 9),
    *((p, p * n, *times) for p, n, *times in product((2, 3), (1, 2), (3, 10), (7.5, 20), (1, 7))),
    *drawn(_drawn_sizes, 24),
]


@checked("chunks shorten the bubble and multiply the messages; the network decides how far to go.")
def best_chunks(best):
    """Check `best(num_ranks, num_microbatches, forward, backward, transfer)`: 1, 2 or 4 chunks.

    `forward` and `backward` are the milliseconds of all layers of a rank, which the chunks divide;
    `transfer` is the milliseconds of a message.
    """
    for num_ranks, num_microbatches, forward, backward, transfer in CASES:
        times = {}
        for chunks in (1, 2, 4):
            if chunks == 1:
                schedule = one_f_one_b(num_ranks, num_microbatches)
            else:
                schedule = interleaved_1f1b(num_ranks, num_microbatches, chunks)
            costs = Costs(forward / chunks, backward / chunks, transfer=transfer)
            times[chunks] = simulate(schedule, costs).makespan
        answer = call_for_number(best, num_ranks, num_microbatches, forward, backward, transfer)
        right = min(times, key=times.get)
        if answer in times and close(times[answer], times[right]):  # two may be as short
            continue
        case = (
            f"{num_ranks} ranks, {num_microbatches} micro-batches, {forward} and {backward} ms, "
            f"{transfer} ms a message: you say {many(answer, 'chunk')}"
        )
        if answer not in times:
            return f"{case}; choose from 1, 2 and 4"
        return f"{case}, {times[answer]:g} ms a step; with {right} it is {times[right]:g}, " + (
            "since a rank waits for fewer messages"
            if answer > right
            else "since the bubble is shorter"
        )
