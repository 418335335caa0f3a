"""Checks of lesson 03: 1F1B as a schedule, and the micro-batches that fit into the memory."""

from course.checks.answer import call_for_number, call_for_schedule, checked, many
from lab.simulator import Costs, simulate
from pipeline.schedules import one_f_one_b


@checked("legal, as fast as GPipe, and rank r never holds more than p - r micro-batches.")
def own_1f1b(rows):
    """Check `rows(num_ranks, num_microbatches)`: one text per rank, such as "0F0,0F1,0B0,0B1"."""
    for num_ranks, num_microbatches in [(2, 3), (4, 8), (4, 2), (1, 3)]:
        schedule = call_for_schedule(rows, num_ranks, num_microbatches)
        case = f"{many(num_ranks, 'rank')}, {many(num_microbatches, 'micro-batch')}"
        timeline = simulate(schedule, Costs(10, 20))
        wanted = simulate(one_f_one_b(num_ranks, num_microbatches), Costs(10, 20))
        held = zip(wanted.peak_held_per_rank, timeline.peak_held_per_rank)
        for rank, (most, yours) in enumerate(held):
            if yours > most:
                return (
                    f"{case}: legal, but rank {rank} holds {yours} micro-batches at its peak and "
                    f"{most} {'is' if most == 1 else 'are'} enough; count the forwards of its "
                    "warm-up"
                )
        if timeline.makespan > wanted.makespan:
            return (
                f"{case}: legal, but {timeline.makespan:g} ms instead of {wanted.makespan:g}: "
                "some rank starts its first backward too early and leaves the next one waiting"
            )


@checked("GPipe's room limits m and so the bubble; 1F1B's room limits only p.")
def most_microbatches(most):
    """Check `most(schedule, num_ranks, room, available)`: the largest number of micro-batches.

    `schedule` is "gpipe" or "1f1b". Rank 0 has memory for `room` micro-batches; the batch has at
    most `available` micro-batches.
    """
    for num_ranks, room, available in [(4, 4, 64), (4, 16, 64), (8, 4, 64), (4, 100, 64)]:
        for schedule in ("gpipe", "1f1b"):
            answer = call_for_number(most, schedule, num_ranks, room, available)
            if schedule == "1f1b" and room >= num_ranks:
                right = available
            else:
                right = min(room, available)
            if answer == right:
                continue
            case = (
                f"{schedule}, {num_ranks} ranks, room for {room}, {available} available: "
                f"you say {answer:g}"
            )
            if answer > available:
                return f"{case}, more than there are"
            if schedule == "gpipe":
                return f"{case}; rank 0 holds every micro-batch before its first backward"
            if answer > right:
                return f"{case}, but rank 0 holds min(m, p) and has no room for {num_ranks}"
            return f"{case}; rank 0 never holds more than {num_ranks}, however many there are"
