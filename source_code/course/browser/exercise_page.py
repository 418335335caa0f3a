# SPDX-License-Identifier: Apache-2.0
"""The exercises of the website: a reader's code is run, and the lesson's own check answers."""

import contextlib
import importlib
import io
import re
import traceback

from course.browser.puzzle_board import draw_board, read_rows, tell_rows
from course.checks import answer as answers
from course.checks.puzzle_answers import complaint_of, draw_answer, puzzle, schedule_of
from course.checks.puzzles import PUZZLES
from course.views.explorer_view import reasons
from lab.drawing import WIDTH
from lab.known_schedules import tell_name
from lab.simulator import Costs, simulate

NOT_ATTEMPTED = "Not attempted yet: replace the ... above, then check."
NOT_BEGUN = "Not attempted yet."
CODE = "<your code>"
# The exercises outside lesson 12 that ask for a schedule: the (ranks, micro-batches) for which a
# right answer is drawn, None for an answer that has one size, and the costs.
DRAWN = {
    ("lesson_02", "own_gpipe"): ((4, 8), Costs(10, 20)),
    ("lesson_09", "fill_the_bubble"): (None, Costs(1, 2, 1)),
}


def check(lesson, call, code, setup="", width=WIDTH):
    """Check the reader's code and return a dictionary for JSON.

    `lesson` is a module of course.checks, such as "lesson_02"; `call` is the line of the notebook
    that runs the check, such as "check.own_gpipe(own_gpipe)"; `setup` holds the notebook's imports.
    In the result, `said` is the printed text and `right` says whether the answer is right. For a
    right answer to an exercise of DRAWN, the result also has the keys of `explained`.
    """
    namespace = {"__name__": "__main__"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(setup, namespace)
        namespace["check"] = importlib.import_module(f"course.checks.{lesson}")
        try:
            exec(compile(code, CODE, "exec"), namespace)
            exec(call, namespace)
        except Exception as error:
            print(f"Not yet: {_say(error)}")
    said = printed.getvalue().replace(answers.NOT_ATTEMPTED, NOT_ATTEMPTED)
    right = said.splitlines()[-1].startswith("Right: ") if said else False
    name, argument = re.fullmatch(r"check\.(\w+)\((\w+).*\)", call).groups()
    drawn = {}
    if right and (lesson, name) in DRAWN:
        sizes, costs = DRAWN[lesson, name]
        rows = answers.call(namespace[argument], *sizes) if sizes else namespace[argument]
        drawn = explained(answers.read_rows(rows, "your schedule"), costs, width=width)
    return {"said": said, "right": right, **drawn}


def _say(error):
    """The error that the reader's code raised, in one line with the line number."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {error.msg}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == CODE]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {error}"


def explained(schedule, costs, width=WIDTH):
    """A dictionary with the drawing of a finished schedule, its name and the cause of each bubble.

    The drawing shows the longest path. `costs` are in milliseconds.
    """
    timeline = simulate(schedule, costs)
    picture = draw_answer(timeline, longest_path=True, width=width)
    return {
        "svg": picture.svg,
        "alt": picture.alt,
        "name": tell_name(schedule),
        "reasons": reasons(timeline),
    }


def solve(number, rows=(), code="", setup="", width=WIDTH):
    """Check an answer to puzzle `number` of lesson 12 and return a dictionary for JSON.

    `rows` has one row per rank. Alternatively, `code` is Python that defines `rows`, a list or a
    function, and `setup` holds the notebook's imports. If the answer is not right yet, the drawing
    is the board of puzzle_board.py. The keys are those of `check`; `width` is that of the drawing.
    """
    if code:
        namespace = {"rows": ...}
        exec(setup, namespace)
        try:
            exec(compile(code, CODE, "exec"), namespace)
        except Exception as error:
            return {"said": f"Not yet: {_say(error)}", "right": False}
        answer = namespace["rows"]
    else:
        answer = list(rows) if any(map(str.strip, rows)) else ...
        if answer is ...:
            return {"said": NOT_BEGUN, "right": False, **board(number, rows, width)}
        written = read_rows(rows)
        said = written and tell_rows(PUZZLES[number], written)
        if said:
            return {"said": said, "right": False, **board(number, rows, width)}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        picture = puzzle(number, answer)
    said = printed.getvalue().replace(answers.NOT_ATTEMPTED, NOT_BEGUN)
    if picture is None:
        return {"said": said, "right": False, **board(number, rows, width)}
    schedule = schedule_of(number, answer)
    if complaint_of(number, answer) is not None:
        drawn = draw_board(PUZZLES[number], schedule.orders, width)
        return {"said": said, "right": False, "svg": drawn.svg, "alt": drawn.alt}
    right = explained(schedule, PUZZLES[number].costs, width=width)
    return {"said": said, "right": True, **right}


def board(number, rows, width):
    """The drawing of rows that are not a schedule yet; {} if there are none or they cannot be read."""
    written = read_rows(rows)
    if not written:
        return {}
    picture = draw_board(PUZZLES[number], written, width)
    return {"svg": picture.svg, "alt": picture.alt}
