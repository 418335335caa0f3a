# SPDX-License-Identifier: Apache-2.0
"""Checks of lesson 12: the reader's own schedule is checked, drawn, and performed by real ranks."""

from course.checks.answer import NOT_ATTEMPTED, NotAttempted, WrongAnswer
from course.checks.puzzle_answers import puzzle, schedule_of
from course.checks.puzzles import PUZZLES
from course.launch import ROOT, run
from files.outputs import write_whole
from lab.figures import draw_timelines
from lab.simulator import simulate
from lab.variables import DELAY_VARIABLE, PRETENDED_VARIABLE, pretended_nodes
from pipeline.schedules.text_form import to_csv

__all__ = ["perform", "puzzle"]


def perform(number, answer):
    """Train two steps with the schedule `answer` on real ranks and compare the losses with those of
    one process. Returns a Picture with the prediction above and the run below.

    If the schedule is not legal, it starts no rank and returns None.
    """
    try:
        schedule = schedule_of(number, answer)
    except NotAttempted:
        print(NOT_ATTEMPTED)
        return None
    except WrongAnswer as error:
        print(f"Not yet: {error}")
        return None
    given = PUZZLES[number]
    file = f"build/12_puzzle_{number}"
    (ROOT / "build").mkdir(exist_ok=True)
    write_whole(ROOT / f"{file}.csv", to_csv(schedule))
    if given.node_delay:
        print(f"$ export {PRETENDED_VARIABLE}=2 {DELAY_VARIABLE}={given.node_delay:g}")
    with pretended_nodes(2, given.node_delay):
        performed = run(
            f"train.py {file}.csv {given.flags} --steps 2 --verify --timeline {file}.json",
            ranks=given.num_ranks,
            warm=True,
        )
    return draw_timelines(
        {"predicted": simulate(schedule, given.costs), "performed": performed.timeline}
    )
