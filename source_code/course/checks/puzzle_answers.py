# SPDX-License-Identifier: Apache-2.0
"""Checks and draws an answer to a puzzle of lesson 12.

This file needs only the standard library, so the puzzles also run in a browser.
"""

from course.checks.answer import (
    NOTHING,
    NotAttempted,
    WrongAnswer,
    call,
    checked,
    many,
    read_rows,
)
from course.checks.puzzles import PUZZLES
from lab.drawing import WIDTH
from lab.figures import draw_timelines
from lab.simulator import simulate
from lab.story import name_of_message, short, smallest_time, waits_of
from pipeline.schedule import ScheduleError
from pipeline.schedules.legal import check_legal


def puzzle(number, answer):
    """Print whether `answer` solves the puzzle of that number; return its timeline as a Picture.

    `answer` has one row per rank, as `read_rows` takes them, or is a function
    `answer(num_ranks, num_microbatches)` that returns them. Returns None for an illegal schedule.
    """
    _judge(number, answer)
    try:
        timeline = simulate(schedule_of(number, answer), PUZZLES[number].costs)
    except (NotAttempted, WrongAnswer):
        return None
    return draw_answer(timeline, longest_path=complaint_of(number, answer) is None)


def draw_answer(timeline, longest_path=False, width=WIDTH):
    """The timeline of an answer as a Picture; the caption gives each rank's idle time."""
    idle = ", ".join(
        f"rank {rank} {short(time)} ms" for rank, time in enumerate(timeline.idle_per_rank)
    )
    return draw_timelines(
        {"yours": timeline},
        caption=f"Your schedule, {short(timeline.makespan)} ms; idle: {idle}",
        longest_path=longest_path,
        width=width,
    )


def _praise(number, answer):
    given = PUZZLES[number]
    timeline = simulate(schedule_of(number, answer), given.costs)
    return f"legal; {how_far(given, timeline)}. {given.praise[0].upper()}{given.praise[1:]}"


def complaint_of(number, answer):
    """Why the answer does not solve the puzzle, or None. Raises the errors of `schedule_of`."""
    schedule, given = schedule_of(number, answer), PUZZLES[number]
    timeline = simulate(schedule, given.costs)
    complaints = [complaint for complaint in [too_much_held(given, timeline)] if complaint]
    if given.measured(timeline) > given.target + smallest_time(timeline):
        complaints.append(longest_wait(timeline))
    if complaints:
        return "; ".join(["legal", how_far(given, timeline), *complaints])


_judge = checked(_praise, "puzzle")(complaint_of)


def schedule_of(number, answer):
    """The answer as a legal Schedule for the puzzle. Raises NotAttempted or WrongAnswer."""
    if answer is ...:
        raise NotAttempted
    if answer is None:
        raise WrongAnswer(NOTHING)
    if number not in list(PUZZLES):
        raise WrongAnswer(f"there is no puzzle {number!r}; they are 1 to {len(PUZZLES)}")
    given = PUZZLES[number]
    rows = answer
    if callable(answer):
        rows = call(answer, given.num_ranks, given.num_microbatches)
    schedule = read_rows(rows, f"puzzle {number}")
    if schedule.num_ranks != given.num_ranks:
        raise WrongAnswer(
            f"{many(schedule.num_ranks, 'row')}, and the puzzle has {given.num_ranks} ranks, "
            "a row for each"
        )
    try:
        check_legal(schedule)
    except ScheduleError as error:
        raise WrongAnswer(str(error)) from None
    _fits(given, schedule)
    return schedule


def _fits(given, schedule):
    """Raise WrongAnswer unless stages, ranks, micro-batches and kinds are those of the puzzle."""
    if schedule.num_microbatches != given.num_microbatches:
        raise WrongAnswer(
            f"your rows hold {many(schedule.num_microbatches, 'micro-batch')}, the puzzle has "
            f"{given.num_microbatches}"
        )
    if schedule.num_stages != len(given.rank_of_stage):
        raise WrongAnswer(
            f"your rows hold {many(schedule.num_stages, 'stage')}, the puzzle has "
            f"{len(given.rank_of_stage)}"
        )
    kinds = "FBIW" if given.split else "FB"
    for rank, order in enumerate(schedule.orders):
        for step, action in enumerate(order):
            where = f"rank {rank}, step {step} ({action})"
            if rank != given.rank_of_stage[action.stage]:
                raise WrongAnswer(
                    f"{where}: in this puzzle stage {action.stage} is rank "
                    f"{given.rank_of_stage[action.stage]}'s"
                )
            if action.kind not in kinds:
                raise WrongAnswer(f"{where}: this puzzle has only {', '.join(kinds)}")


def how_far(given, timeline):
    """The sentence about the schedule's length, the target, and the best known length."""
    value, small = given.measured(timeline), smallest_time(timeline)
    if given.measure == "idle":
        idle = [span - busy for span, busy in zip(timeline.span_per_rank, timeline.busy_per_rank)]
        if value <= small:
            return "no rank is idle between its first action and its last"
        return (
            f"rank {idle.index(value)} is idle for {short(value)} ms between its first action and "
            f"its last, the target is {short(given.target)}"
        )
    taken, target = f"{short(value)} ms", f"the target is {short(given.target)}"
    known = f"{short(given.best)} is provably best"
    if given.bound is not None:
        below = f"nothing below {short(given.bound)} is possible"
        known = f"{short(given.best)} is the best known, and {below}"
    if too_much_held(given, timeline):
        return f"{taken}, {target}; in the room that the puzzle gives {known}"
    if value < given.best - small:
        return f"{taken}, which is better than the best known, {short(given.best)}; {below}"
    if given.bound is None and value <= given.best + small:
        return f"{taken}, which is provably best"
    if given.target == given.best:
        return f"{taken}, {target}, which is provably best"
    return f"{taken}, {target}; {known}"


def too_much_held(given, timeline):
    """The sentence about a rank that holds more activations than its room, or None."""
    if given.room is None:
        return None
    what = "micro-batches"
    if len(given.rank_of_stage) > given.num_ranks:
        what = "activations (one for each stage and micro-batch)"
    until = " until their W" if given.until_weight else ""
    for rank, (held, room) in enumerate(zip(given.held(timeline), given.room)):
        if held > room:
            return f"rank {rank} holds {held} {what}{until}, the puzzle allows {room}"


def longest_wait(timeline):
    """The sentence about the longest wait of a rank after its first action, and its reason."""
    first = {events[0] for events in timeline.by_rank}
    waits = [wait for wait in waits_of(timeline) if wait.event not in first and wait.source]
    wait = max(waits, key=lambda wait: wait.gap)
    return (
        f"the longest wait is rank {wait.event.rank}'s, {short(wait.gap)} ms before "
        f"{wait.event.action}, for {name_of_message(wait.source)}"
    )
