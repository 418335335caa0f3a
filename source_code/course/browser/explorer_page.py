# SPDX-License-Identifier: Apache-2.0
"""The explorer of the website: its controls, and its answers when the reader moves one of them."""

from dataclasses import fields
from functools import lru_cache

from course.views.explorer_view import SLIDERS, WORK, Settings, View, reasons, without_effect
from course.views.memory_and_time import AXES, SIZE_SLIDERS, MemoryAndTime, Sizes
from lab.drawing import LEFT, ROW, WIDTH, arrange, draw_cursor
from lab.figures import draw_timelines
from lab.held_curve import draw_held
from lab.story import short, tell
from pipeline.schedule import ScheduleError
from pipeline.schedules import SCHEDULES
from pipeline.schedules.legal import check_legal
from pipeline.schedules.text_form import from_csv

OWN = "your own rows"  # the choice of a schedule that is written in the page
NOTHING = "nothing"
CHOICES = {"schedule": [*SCHEDULES, OWN], "compare": [NOTHING, *SCHEDULES], "work": [*WORK]}
START = {
    "schedule": "gpipe",
    "compare": "1f1b",
    "ranks": 4,
    "microbatches": 8,
    "chunks": 2,
    "forward": 10,
    "backward": 20,
    "weight": 10,
    "transfer": 0,
    "occupancy": 0,
    "work": "equal",
    "rows": "",
}
# The memory view adds the sizes in GiB, and the name of the slider that was moved last.
SIZES_START = {name: getattr(Sizes(), name) for name in SIZE_SLIDERS} | {"moved": "microbatches"}


def explore(settings, longest_path=False, table=False, width=WIDTH):
    """Everything that a page shows for the given settings, as a dictionary for JSON.

    `settings` has the keys of START; the values are names from CHOICES and numbers. For the choice
    OWN, `rows` is a schedule in its text form. If the schedule cannot be drawn, `refusal` is one
    sentence that says why; otherwise it is "". `width` is that of the drawing in its own units; the
    same `width` belongs to `moment` and `point`.
    """
    try:
        view = view_of(settings)
    except ScheduleError as error:
        return {"refusal": str(error), "disabled": []}
    if view.refusal:
        return {"refusal": view.refusal, "disabled": without_effect(view)}
    picture = draw_timelines(view.timelines, stories=False, longest_path=longest_path, width=width)
    return {
        "refusal": "",
        "disabled": without_effect(view),
        "svg": picture.svg,
        "alt": picture.alt,
        "held": draw_held(view.timelines, width),
        "figures": view.figures,
        "times": view.times,
        "table": view.table if table else "",
        "reasons": "".join(map(reasons, view.timelines.values())) if longest_path else "",
    }


def memory_and_time(settings, lines):
    """Whether each rank has enough memory, and the first `lines` curves, as a dictionary for JSON.

    `settings` has the keys of START and SIZES_START. A page requests the curves one by one, so that
    a slider that is moved meanwhile does not wait for all of them.
    """
    try:
        view = view_of(settings)
    except ScheduleError:
        return {"verdict": "", "svg": "", "table": "", "complete": True}
    if view.refusal:
        return {"verdict": "", "svg": "", "table": "", "complete": True}
    moved = settings["moved"] if settings["moved"] in AXES else SIZES_START["moved"]
    sizes = Sizes(**{name: settings[name] for name in SIZE_SLIDERS})
    both = MemoryAndTime(view, sizes, moved, SLIDERS[moved][1:3], lines)
    return {
        "verdict": both.verdict,
        "svg": both.picture.svg,
        "table": both.table,
        "complete": both.complete,
    }


def moment(settings, time, width=WIDTH):
    """The state of all ranks at `time`, in ms: a cursor to draw over the picture, and a table."""
    view = view_of(settings)
    return {
        "svg": draw_cursor(view.timelines, time, width=width),
        "html": view.moment(time),
        "now": f"at {short(time)} ms",
    }


def point(settings, x, y, width=WIDTH):
    """The time at the point (`x`, `y`) of the picture, in ms, and the story of the block there.

    `x` and `y` are in the drawing's own units. The story is empty where there is no block; the time
    is None outside the timelines.
    """
    view = view_of(settings)
    for place, waits in zip(arrange(view.timelines, width=width)[0], view.waits):
        timeline = place.timeline
        for event in timeline.events:
            top = place.y(event.rank)
            if top <= y < top + ROW and place.x(event.start) <= x < place.x(event.end):
                return {"story": tell(waits[event], timeline), "time": event.start}
        time = timeline.start + (x - LEFT) / place.scale
        if place.top <= y <= place.bottom and 0 <= time - timeline.start <= timeline.makespan:
            return {"story": [], "time": time}
    return {"story": [], "time": None}


def view_of(settings):
    """The View of a page's settings. Raises ScheduleError for rows that are not a legal schedule."""
    return _view(tuple((name, settings[name]) for name in START))


@lru_cache(maxsize=2)
def _view(items):
    settings = dict(items)
    chosen = {field.name: settings[field.name] for field in fields(Settings)}
    if chosen["compare"] == NOTHING:
        chosen["compare"] = None
    if chosen["schedule"] == OWN:
        chosen["schedule"] = check_legal(from_csv(settings["rows"], "yours"))
    return View(Settings(**chosen))
