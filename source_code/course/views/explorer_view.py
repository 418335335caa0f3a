# SPDX-License-Identifier: Apache-2.0
"""The content of the explorer as text: the drawing as SVG, the tables as HTML, without widgets."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from html import escape
from itertools import groupby

from lab.drawing import draw_cursor
from lab.figures import draw_timelines
from lab.held_curve import draw_held
from lab.longest_path import bubbles_of, longest_path, tell_bubble, tell_path
from lab.simulator import Costs, simulate
from lab.story import (
    moments_at,
    name_of_message,
    short,
    stories_of,
    tell,
    times_of,
    waits_of,
)
from lab.timeline import Timeline
from pipeline.schedule import KINDS, Schedule, ScheduleError
from pipeline.schedules import SCHEDULES, build_schedule

# How the work of a batch can be spread over its micro-batches: the work of micro-batch i of m. This
# is then scaled, so that the work of the whole batch is the same with every choice.
WORK = {
    "equal": lambda i, m: 1,
    "one long, first": lambda i, m: 3 if i == 0 else 1,
    "one long, in the middle": lambda i, m: 3 if i == (m - 1) // 2 else 1,
    "one long, last": lambda i, m: 3 if i == m - 1 else 1,
    "from long to short": lambda i, m: 3 - 2 * i / max(1, m - 1),
    "from short to long": lambda i, m: 1 + 2 * i / max(1, m - 1),
}
# (label, least, most, step) of each slider, by the name of the setting
SLIDERS = {
    "ranks": ("ranks", 1, 8, 1),
    "microbatches": ("micro-batches", 1, 64, 1),
    "chunks": ("stages per rank", 2, 4, 1),
    "forward": ("forward of a rank, ms", 0.5, 50, 0.5),
    "backward": ("backward of a rank, ms", 1, 100, 0.5),
    "weight": ("backward for weights, ms", 0.5, 99, 0.5),
    "transfer": ("transfer, ms", 0, 60, 0.5),
    "occupancy": ("occupancy of a link, ms", 0, 60, 0.5),
}


@dataclass(frozen=True)
class Settings:
    """The choices of a reader. Costs are in milliseconds per micro-batch: see `costs_of`.

    `schedule` and `compare` are names of generators or Schedules; a Schedule has its own numbers of
    ranks and micro-batches. `compare` is None if there is no second timeline. `transfer` and
    `occupancy` are the costs of a message: see simulator.py. `work` is a name of WORK.
    """

    schedule: str | Schedule
    ranks: int
    microbatches: int
    chunks: int
    forward: float
    backward: float
    weight: float
    transfer: float
    compare: str | Schedule | None
    occupancy: float = 0.0
    work: str = "equal"


@dataclass(frozen=True)
class Prediction:
    """One schedule and its simulated timeline."""

    label: str
    schedule: Schedule
    costs: Costs
    timeline: Timeline


class View:
    """Everything that is shown for some Settings, as SVG and HTML text, without widgets.

    `refusal` is the sentence shown in place of the picture if there is nothing to draw, or "".
    With `longest_path` the pictures show a longest path, and `reasons` is not empty.
    """

    def __init__(self, settings, longest_path=False):
        self.settings, self.longest_path = settings, longest_path
        self.predictions, self.refusal = [], ""
        try:
            self.predictions = predict(settings)
        except ScheduleError as error:
            self.refusal = str(error)
        self.timelines = {each.label: each.timeline for each in self.predictions}
        self.times = times_of(self.timelines.values()) if self.predictions else [0.0]

    @property
    def alt(self):
        """The picture in words."""
        return self.stored_picture.alt if self.predictions else f"No picture: {self.refusal}"

    @cached_property
    def stored_picture(self):
        return draw_timelines(self.timelines, longest_path=self.longest_path)

    @property
    def picture(self):
        if self.refusal:
            return problem(self.refusal)
        return draw_timelines(self.timelines, reading=True, longest_path=self.longest_path).svg

    @property
    def held(self):
        """The drawing of what the fullest rank holds over time, on the scale of the picture."""
        return draw_held(self.timelines) if self.predictions else ""

    @property
    def table(self):
        if self.refusal:
            return problem(self.refusal)
        return "".join(action_table(timeline) for timeline in self.timelines.values())

    @property
    def reasons(self):
        """HTML: the longest path of each timeline and the cause of each bubble."""
        shown = self.timelines.values() if self.longest_path else []
        return "".join(map(reasons, shown))

    @property
    def figures(self):
        return figures_table(self.predictions)

    def cursor(self, time):
        return draw_cursor(self.timelines, time, reading=True) if self.predictions else ""

    @cached_property
    def waits(self):
        """{event: its Wait} of each timeline."""
        return [{w.event: w for w in waits_of(each)} for each in self.timelines.values()]

    def moment(self, time):
        """HTML: what every rank does and holds at `time`, in milliseconds."""
        both = zip(self.timelines.values(), self.waits)
        return "".join(moment_table(timeline, waits, time) for timeline, waits in both)


def predict(settings):
    """The one or two Predictions for some Settings. Raises ScheduleError with a sentence."""
    chosen = {"predicted": settings.schedule, "to compare": settings.compare}
    schedules = {
        label: schedule_of(replace(settings, schedule=choice))
        for label, choice in chosen.items()
        if choice is not None
    }
    split = any("W" in schedule.kinds for schedule in schedules.values())
    if split and settings.weight >= settings.backward:
        raise ScheduleError(
            f"the weights' part, {short(settings.weight)} ms, must be less than the backward, "
            f"{short(settings.backward)} ms, of which it is a part"
        )
    return [
        Prediction(label, schedule, costs, simulate(schedule, costs))
        for label, schedule in schedules.items()
        for costs in [costs_of(settings, schedule)]
    ]


def costs_of(settings, schedule):
    """The Costs of one stage in `schedule`, in milliseconds.

    The settings give the costs of all layers of one rank. The model is the same in every schedule,
    so with two stages per rank each stage costs half of that.
    """
    share = schedule.num_ranks / schedule.num_stages
    return Costs(
        settings.forward * share,
        settings.backward * share,
        settings.weight * share,
        settings.transfer,
        occupancy=settings.occupancy,
        work=work_of(settings.work, schedule.num_microbatches),
    )


def work_of(name, num_microbatches):
    """The work of each micro-batch, 1 on average, for a name of WORK; () if all are equal."""
    if name == "equal":
        return ()
    shape = [WORK[name](i, num_microbatches) for i in range(num_microbatches)]
    return tuple(each * num_microbatches / sum(shape) for each in shape)


def schedule_of(settings):
    """The Schedule of `settings.schedule`, which may be its name. Raises ScheduleError."""
    name = settings.schedule
    if isinstance(name, Schedule):
        return name
    chunks = settings.chunks if can_choose_chunks(name) else None
    return _built(name, settings.ranks, settings.microbatches, chunks)


_built = lru_cache(maxsize=64)(build_schedule)  # sliders of costs do not change the schedule


def can_choose_chunks(choice):
    """Whether `choice` names a schedule whose number of stages per rank can be chosen."""
    if not isinstance(choice, str):
        return False
    return bool(SCHEDULES[choice].chunks) and not SCHEDULES[choice].fixed_chunks


def without_effect(view):
    """The names of the sliders that have no effect at the view's settings."""
    chosen = (view.settings.schedule, view.settings.compare)
    names = []
    if not any(isinstance(choice, str) for choice in chosen):
        names += ["ranks", "microbatches"]
    if not any(map(can_choose_chunks, chosen)):
        names += ["chunks"]
    # A refusal may be about the weights' part, so this slider stays movable then.
    if not view.refusal and not any("W" in each.schedule.kinds for each in view.predictions):
        names += ["weight"]
    return names


def problem(sentence):
    """HTML that is shown in place of the picture if there is nothing to draw."""
    return f'<p role="alert" style="font-size:14px;padding:24px 0"><b>{escape(sentence)}</b></p>'


def figures_table(predictions):
    """An HTML table with the figures of one or several Predictions, side by side."""
    timelines = [each.timeline for each in predictions]
    split = any("W" in each.schedule.kinds for each in predictions)
    rows = {
        "makespan": [f"{short(each.makespan)} ms" for each in timelines],
        "ideal (the busiest rank's work)": [f"{short(each.ideal)} ms" for each in timelines],
        "bubble over total (GPipe's)": [f"{each.bubble_over_total:.1%}" for each in timelines],
        "bubble over ideal (Megatron's)": [f"{each.bubble_over_ideal:.1%}" for each in timelines],
    }
    if split:
        rows["bubble by span (zero bubble's)"] = [
            f"{each.bubble_by_span:.1%}" for each in timelines
        ]
    rows["peak held (stage x micro-batch)"] = [
        _numbers(each.peak_held_per_rank) for each in timelines
    ]
    if split:
        rows["the same until W has ended"] = [
            _numbers(each.peak_held_until_weight_per_rank) for each in timelines
        ]
    rows["messages"] = [len(each.schedule.messages) for each in predictions]
    average = ", on average" if any(each.costs.work for each in predictions) else ""
    rows[f"forward and backward of a stage{average}"] = [
        f"{short(each.costs.forward)} and {short(each.costs.backward)} ms" for each in predictions
    ]
    return table_of("", ["", *(each.name for each in timelines)], _with_heads(rows))


def _numbers(values):
    return " ".join(map(str, values))


def _with_heads(rows):
    return [[head, *cells] for head, cells in rows.items()]


def reasons(timeline):
    """HTML: the longest path in a sentence, and a table with a row for every bubble."""
    return f"<p>{escape(tell_path(longest_path(timeline)))}</p>{bubble_table(timeline)}"


def bubble_table(timeline):
    """An HTML table with one row for each idle time of a rank, and its cause."""
    rows = [
        [
            f"rank {bubble.rank}",
            short(bubble.start - timeline.start),
            short(bubble.end - timeline.start),
            short(bubble.length),
            tell_bubble(bubble, timeline),
        ]
        for bubble in bubbles_of(timeline)
    ]
    if not rows:
        return "<p>No rank is ever idle.</p>"
    name = f"Why each bubble of {timeline.name} is there"
    heads = ["", "from, ms", "to, ms", "long", "why"]
    return (
        f'<div class="pipeline-scroll" tabindex="0" role="region" aria-label="{escape(name)}">'
        f"{table_of(name, heads, rows)}</div>"
    )


def action_table(timeline):
    """The text equivalent of a drawing: one row per block, rank by rank in the order of time."""
    stories = dict(zip(timeline.events, stories_of(timeline)))
    rows = []
    for rank, events in enumerate(timeline.by_rank):
        for event in events:
            stage, kind, microbatch = event.action
            start, end = short(event.start - timeline.start), short(event.end - timeline.start)
            why = stories[event][1]
            rows.append([f"rank {rank}", KINDS[kind], stage, microbatch, start, end, why])
    heads = ["", "does", "stage", "micro-batch", "from, ms", "to, ms", "why then"]
    name = escape(f"What {timeline.name} does, block by block")
    return (
        f'<div class="pipeline-scroll" tabindex="0" role="region" aria-label="{name}" '
        'data-lm-suppress-shortcuts="true">'
        f"{table_of(name, heads, rows)}</div>"
    )


def moment_table(timeline, waits, time):
    """HTML: what every rank of a timeline does and holds at `time`, and why.

    `waits` is {event: its Wait}.
    """
    split = any(event.action.kind == "W" for event in timeline.events)
    until_weight = moments_at(timeline, time, until="BW")
    rows = []
    for moment, later in zip(moments_at(timeline, time), until_weight):
        cells = [tell_held(moment.held), *([tell_held(later.held)] if split else [])]
        if moment.doing:
            told = (tell(waits[event], timeline) for event in moment.doing)
            does = ". Then: ".join("; ".join(story) for story in told)
        elif moment.next is None:
            does = "has done everything"
        else:
            does = tell_wait(waits[moment.next], timeline)
        rows.append([f"rank {moment.rank}", *cells, does])
    holds = ["holds micro-batches", *(["and until W has ended"] if split else [])]
    caption = f"{timeline.name} at {short(time - timeline.start)} ms"
    return table_of(caption, ["", *holds, "does"], rows)


def tell_wait(wait, timeline):
    until = f"until {short(wait.event.start - timeline.start)} ms"
    what = f" for {name_of_message(wait.source)}" if wait.for_message else ""
    return f"waits{what}, {until}"


def tell_held(held):
    """The number of (stage, micro-batch) pairs, and their list, by stage if it has several."""
    stages = {stage: [m for _, m in pairs] for stage, pairs in groupby(held, lambda pair: pair[0])}
    if not stages:
        return "none"
    if len(stages) == 1:
        return f"{len(held)} ({_runs(*stages.values())})"
    parts = (f"stage {stage}: {_runs(numbers)}" for stage, numbers in stages.items())
    return f"{len(held)} ({'; '.join(parts)})"


def _runs(numbers):
    """Numbers in short form: 0, 1, 2, 5 become "0-2, 5"."""
    runs = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def table_of(caption, heads, rows):
    """An HTML table; the first cell of each row is its header."""
    top = "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    body = "".join(
        f'<tr><th scope="row">{escape(str(head))}</th>'
        + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells)
        + "</tr>"
        for head, *cells in rows
    )
    caption = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{caption}<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
