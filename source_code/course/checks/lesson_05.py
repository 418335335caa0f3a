"""Checks of lesson 05: where the chunks lie, what they save, and when messages eat it up."""

from course.checks.answer import WrongAnswer, call, call_for_number, checked, close
from lab.simulator import Costs, simulate
from pipeline.schedules import interleaved_1f1b, one_f_one_b


@checked("each loop of the pipeline passes every rank once, so a rank's stages are p apart.")
def stages_of(stages):
    """`stages(rank, num_ranks, num_chunks)`: the list of the rank's stages, from 0."""
    for num_ranks, num_chunks in [(4, 2), (2, 3), (3, 1)]:
        schedule = interleaved_1f1b(num_ranks, num_ranks, num_chunks) if num_chunks > 1 else None
        for rank in range(num_ranks):
            answer = call(stages, rank, num_ranks, num_chunks)
            if not isinstance(answer, (list, tuple, range)):
                raise WrongAnswer(f"return a list of stages, not {answer!r}")
            answer = list(answer)
            right = schedule.stages_of(rank) if schedule else [rank]
            if answer == right:
                continue
            case = f"rank {rank} of {num_ranks}, {num_chunks} chunks: you say {answer}"
            if len(answer) != num_chunks:
                return f"{case}, and {num_chunks} stages are needed, one for each chunk"
            if answer == list(range(answer[0], answer[0] + num_chunks)):
                return (
                    f"{case}; stages that follow each other on one rank are one large stage, and "
                    "the bubble stays what it was"
                )
            if sorted(answer) == right:
                return f"{case}: the right ones, in the wrong order; the earlier stage comes first"
            return f"{case}, and the schedule places {right} there"


@checked("the bubble is divided by the number of chunks, and by nothing else.")
def interleaved_bubble(bubble):
    """`bubble(num_ranks, num_microbatches, num_chunks)`: idle over busy time of a rank."""
    for num_ranks, num_microbatches, num_chunks in [(4, 8, 2), (4, 8, 4), (2, 6, 3), (8, 8, 2)]:
        schedule = interleaved_1f1b(num_ranks, num_microbatches, num_chunks)
        right = simulate(schedule, Costs(1, 2)).bubble_over_ideal
        answer = call_for_number(bubble, num_ranks, num_microbatches, num_chunks)
        if close(answer, right):
            continue
        case = f"{num_ranks} ranks, {num_microbatches} micro-batches, {num_chunks} chunks"
        case = f"{case}: you say {answer:.4g}"
        if close(answer, (num_ranks - 1) / num_microbatches):
            return (
                f"{case}, which is 1F1B's; the first micro-batch now arrives after shorter stages"
            )
        if close(answer, right / (1 + right)):
            return f"{case}, idle over total; this exercise asks for idle over busy"
        if close(answer, (num_ranks * num_chunks - 1) / (num_microbatches * num_chunks)):
            return (
                f"{case}; that counts one rank for every stage, but a rank is busy with its other "
                "stages meanwhile"
            )
        return f"{case}, and the simulator says {right:.4g}"


@checked("chunks shorten the bubble and multiply the messages; the network decides how far to go.")
def best_chunks(best):
    """`best(num_ranks, num_microbatches, forward, backward, transfer)`: 1, 2 or 4 chunks.

    `forward` and `backward` are milliseconds of a rank's whole share, which the chunks divide.
    """
    for num_ranks, num_microbatches, forward, backward, transfer in [
        (4, 8, 20, 40, 0.5),
        (4, 8, 20, 40, 4),
        (4, 16, 4, 8, 4),
        (8, 8, 20, 40, 2),
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
            f"{transfer} ms a message: you say {answer:g} chunks"
        )
        if answer not in times:
            return f"{case}; choose from 1, 2 and 4"
        return f"{case}, {times[answer]:g} ms a step; with {right} it is {times[right]:g}, " + (
            "since fewer messages wait" if answer > right else "since the bubble is shorter"
        )
