# SPDX-License-Identifier: Apache-2.0
"""The check of lesson 05's best number of chunks. build_steps.py has that of the step."""

from course.checks.answer import call_for_number, checked, many
from lab.simulator import Costs, simulate
from pipeline.schedules import interleaved_1f1b, one_f_one_b


@checked("chunks shorten the bubble and multiply the messages; the network decides how far to go.")
def best_chunks(best):
    """Check `best(num_ranks, num_microbatches, forward, backward, transfer)`: 1, 2 or 4 chunks.

    `forward` and `backward` are the milliseconds of all layers of a rank, which the chunks divide;
    `transfer` is the milliseconds of a message.
    """
    for num_ranks, num_microbatches, forward, backward, transfer in [
        (4, 8, 20, 40, 0.5),
        (4, 8, 20, 40, 4),
        (4, 16, 4, 8, 9),
        (8, 8, 20, 40, 2),
        (8, 8, 12, 4, 9),
        (2, 8, 9, 27, 9),
        (2, 8, 40, 10, 9),
        (2, 4, 10, 20, 9),  # on four ranks, or with eight micro-batches, two chunks are best
        (3, 6, 3, 17, 7),  # in whole ms, or with equal halves, two chunks are best
        (3, 3, 20, 10, 1),  # three chunks would be best
    ]:
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
        if answer == right:
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
