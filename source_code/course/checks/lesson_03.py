# SPDX-License-Identifier: Apache-2.0
"""The check of lesson 03 without ranks: how many micro-batches fit into the memory."""

from itertools import product

from course.checks.answer import call_for_number, checked, drawn, many

# Ranks, room and available micro-batches.
CASES = [(4, 4, 64), (4, 16, 64), (8, 4, 64), (4, 100, 64), (8, 6, 5), (4, 6, 63)]
CASES += product(range(1, 7), range(1, 8), range(1, 8))
CASES += drawn(lambda c: (c.randint(1, 12), c.randint(1, 40), c.randint(1, 99)), 24)


@checked("with GPipe, memory limits m; with 1F1B, room for p micro-batches is enough for any m.")
def most_microbatches(most):
    """Check `most(schedule, num_ranks, room, available)`: the largest number of micro-batches.

    `schedule` is "gpipe" or "1f1b". Rank 0 has memory for `room` micro-batches; the batch has at
    most `available` micro-batches.
    """
    for num_ranks, room, available in CASES:
        for schedule in ("gpipe", "1f1b"):
            answer = call_for_number(most, schedule, num_ranks, room, available)
            if schedule == "1f1b" and room >= num_ranks:
                right = available
            else:
                right = min(room, available)
            if answer == right:
                continue
            case = (
                f"{schedule}, {many(num_ranks, 'rank')}, room for {room}, {available} available: "
                f"you say {answer:g}"
            )
            if answer > available:
                return f"{case}, more than there are"
            if schedule == "gpipe":
                return f"{case}; rank 0 holds every micro-batch before its first backward, and {right} fit"
            if answer > right:
                return f"{case}, but rank 0 holds min(m, p) and has no room for {min(answer, num_ranks):g}"
            if answer < room < num_ranks:
                return f"{case}; rank 0 holds min(m, p), and {right} fit into its memory"
            return f"{case}; rank 0 never holds more than {num_ranks}, however many there are"
