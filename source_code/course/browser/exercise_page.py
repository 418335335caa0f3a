"""The exercises of the website: a reader's code is run, and the lesson's own check answers."""

import contextlib
import importlib
import io
import re
import traceback

from course.checks import answer as answers
from course.checks.puzzle_answers import complaint_of, draw_answer, puzzle, schedule_of
from course.checks.puzzles import PUZZLES
from course.views.explorer_view import reasons
from lab.known_schedules import tell_name
from lab.simulator import Costs, simulate
from pipeline.schedule import Schedule, ScheduleError, from_csv, message_of, needs_of

NOT_ATTEMPTED = "Not attempted yet: replace the ... above, then check."
NOT_BEGUN = "Not attempted yet."
CODE = "<your code>"
# The exercises outside lesson 12 that ask for a schedule: (ranks, micro-batches) of the drawing of
# a right answer, None where the answer has a size of its own, and the costs.
DRAWN = {
    ("lesson_02", "own_gpipe"): ((4, 8), Costs(10, 20)),
    ("lesson_09", "fill_the_bubble"): (None, Costs(1, 2, 1)),
}


def check(lesson, call, code, setup=""):
    """Check the reader's code and return a dictionary for JSON.

    `lesson` is a module of course.checks, such as "lesson_02"; `call` is the line of the notebook
    that runs the check, such as "check.own_gpipe(own_gpipe)"; `setup` holds the notebook's imports.
    In the result, `said` is the printed text and `right` says whether the answer is right. For a
    right schedule it also has the keys of `explained`.
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
        rows = namespace[argument](*sizes) if sizes else namespace[argument]
        drawn = explained(from_csv("\n".join(rows), "your schedule"), costs)
    return {"said": said, "right": right, **drawn}


def _say(error):
    """The error that the reader's code raised, in one line with the line number."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {error.msg}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == CODE]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {error}"


def explained(schedule, costs, unit="ms"):
    """A dictionary with the drawing of a finished schedule, its name and the cause of each bubble.

    The drawing shows the longest path. `costs` are in `unit`.
    """
    timeline = simulate(schedule, costs)
    picture = draw_answer(timeline, longest_path=True)
    return {
        "svg": picture.svg,
        "alt": picture.alt,
        "name": tell_name(schedule),
        "reasons": reasons(timeline, unit),
    }


def solve(number, rows=(), code="", setup=""):
    """Check an answer to puzzle `number` of lesson 12 and return a dictionary for JSON.

    `rows` has one row per rank. Alternatively, `code` is Python that defines `rows`, a list or a
    function, and `setup` holds the notebook's imports. If the answer is not legal yet, the drawing
    shows the actions that can run. The keys are those of `check`.
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
        empty = [f"rank {rank}" for rank, row in enumerate(rows) if not row.strip()]
        if empty:
            said = "" if answer is ... else f"So far {', '.join(empty)} has no actions."
            return {"said": said or NOT_BEGUN, "right": False, **begun(PUZZLES[number], rows)}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        picture = puzzle(number, answer)
    said = printed.getvalue().replace(answers.NOT_ATTEMPTED, NOT_BEGUN)
    if picture is None:
        return {"said": said, "right": False, **begun(PUZZLES[number], rows)}
    if complaint_of(number, answer) is not None:
        return {"said": said, "right": False, "svg": picture.svg, "alt": picture.alt}
    schedule = schedule_of(number, answer)
    return {"said": said, "right": True, **explained(schedule, PUZZLES[number].costs)}


def begun(given, rows):
    """The drawing of the actions that can run in rows that are not a legal schedule yet.

    Returns {} if no action can run or the rows cannot be read.
    """
    try:
        written = [from_csv(row).orders[0] if row.strip() else () for row in rows]
    except ScheduleError:
        return {}
    num_stages = len(given.rank_of_stage)
    orders = runnable(written, num_stages)
    if not any(orders):
        return {}
    schedule = Schedule("so far", orders)
    vars(schedule)["num_stages"] = num_stages  # the rows may lack some stages so far
    picture = draw_answer(simulate(schedule, given.costs))
    return {"svg": picture.svg, "alt": picture.alt}


def runnable(orders, num_stages):
    """The actions that each rank can run before no rank can run its next action."""
    done, steps = set(), [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            for action in order[steps[rank] :]:
                if action.stage >= num_stages or not done.issuperset(needs_of(action, num_stages)):
                    break
                done.add(message_of(action))
                steps[rank] += 1
                moved = True
    return tuple(tuple(order[:step]) for order, step in zip(orders, steps))
