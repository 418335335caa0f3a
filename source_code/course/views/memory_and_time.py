# SPDX-License-Identifier: Apache-2.0
"""Memory and time in the explorer: whether each rank's memory suffices, and curves over a slider.

The memory of a rank is its activation memory, counted on the predicted timeline, plus its weights,
gradients and optimizer state. The curves are the simulator's predictions over the values of one
slider, for the chosen schedules and for those of FIELD.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from html import escape
from typing import NamedTuple

from course.views.explorer_view import predict, table_of
from lab.curves import (
    CHOSEN,
    COMPARED,
    HALF,
    PLOT,
    Curve,
    bars_height,
    draw_bars,
    draw_bars_legend,
    draw_plot,
)
from lab.drawing import LEFT, wrap
from lab.figures import Picture
from lab.story import short
from pipeline.schedule import Schedule, ScheduleError

# (label, least, most, step) of each slider, by the name in Sizes
SIZE_SLIDERS = {
    "kept": ("kept per micro-batch, GiB", 0.05, 10, 0.05),
    "states": ("weights, optimizer, GiB", 0, 100, 0.1),
    "limit": ("limit of a rank, GiB", 1, 192, 1),
}
FIELD = {  # the schedules to compare with, and the dashes of their curves
    "gpipe": "5 3",
    "1f1b": "2 2",
    "interleaved-1f1b": "9 3",
    "zb-h1": "9 2 2 2",
    "zb-v": "3 1",
}
# The label of each slider below a plot; it says what else changes where that is not obvious.
AXES = {
    "ranks": "ranks, each with as many layers",
    "microbatches": "micro-batches",
    "chunks": "stages per rank",
    "forward": "forward of a rank, ms",
    "backward": "backward of a rank, ms",
    "weight": "backward for weights, ms",
    "transfer": "transfer, ms",
    "occupancy": "occupancy of a link, ms",
}
POINTS = 7  # on a curve over a time
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Sizes:
    """GiB that the layers of one rank keep per micro-batch, GiB of their weights, gradients and
    optimizer state, and GiB that a rank has."""

    kept: float = 0.65
    states: float = 4.0
    limit: float = 8.0


class Point(NamedTuple):
    """One schedule at some settings: the milliseconds of a step per micro-batch, and each rank's
    peak activation memory, in units of what all its layers keep per micro-batch."""

    milliseconds: float
    held: tuple


@lru_cache(maxsize=2000)
def point_of(settings):
    """The Point of `settings.schedule`, or None if the schedule does not allow these settings."""
    try:
        (one,) = predict(replace(settings, compare=None))
    except ScheduleError:
        return None
    share = one.schedule.num_ranks / one.schedule.num_stages
    held = one.timeline.peak_held_until_weight_per_rank
    milliseconds = one.timeline.makespan / one.schedule.num_microbatches
    return Point(milliseconds, tuple(count * share for count in held))


def gib_per_rank(point, sizes):
    return [sizes.states + held * sizes.kept for held in point.held]


def values_of(name, settings, least, most):
    """The values of a slider at which the curves have points, including the present value.

    Most numbers of micro-batches are the number of ranks times a power of two, since many schedules
    need a multiple of the ranks.
    """
    now, ranks = getattr(settings, name), settings.ranks
    if name == "microbatches":
        values = {1, ranks // 2, *(ranks * 2**power for power in range(7))}
    elif isinstance(least, int) and most - least < 2 * POINTS:
        values = set(range(least, most + 1))
    else:
        values = {round(2 * (least + (most - least) * i / (POINTS - 1))) / 2 for i in range(POINTS)}
    return sorted({value for value in values if least <= value <= most} | {now})


class MemoryAndTime:
    """Memory and time for a View with predictions, as SVG and HTML text.

    `moved` is the name of the setting on the x axis of the curves, and `limits` are its least and
    its largest value. Only the first `lines` curves are computed; None means all of them.
    """

    def __init__(self, view, sizes, moved="microbatches", limits=(1, 64), lines=None):
        self.view, self.settings, self.sizes = view, view.settings, sizes
        self.moved, self.now = moved, getattr(view.settings, moved)
        chosen = [one for one in (self.settings.schedule, self.settings.compare) if one is not None]
        own = {own_size(choice, moved) for choice in chosen} - {None}
        self.values = sorted({*values_of(moved, view.settings, *limits), *own})
        self.all = [*dict.fromkeys(chosen)]
        self.all += [name for name in FIELD if name not in chosen]
        self.choices = self.all[:lines]
        self.complete = len(self.choices) == len(self.all)

    refusal = ""

    @property
    def stored_picture(self):
        return self.picture

    @cached_property
    def present(self):
        """(Prediction, its Point) of each predicted schedule."""
        return [
            (one, point_of(replace(self.settings, schedule=self._choice(one), compare=None)))
            for one in self.view.predictions
        ]

    def _choice(self, prediction):
        first = prediction is self.view.predictions[0]
        return self.settings.schedule if first else self.settings.compare

    @property
    def verdict(self):
        """HTML: for each schedule, a sentence on whether its fullest rank has enough memory."""
        lines = (escape(self.sentence(*each)) for each in self.present)
        return "".join(f'<p class="verdict">{line}</p>' for line in lines)

    def sentence(self, prediction, point):
        """A sentence such as "gpipe: rank 0 needs 9.2 GiB of 8"."""
        needs, limit = gib_per_rank(point, self.sizes), self.sizes.limit
        most = max(needs)
        full = [str(rank) for rank, need in enumerate(needs) if need > most - TOLERANCE]
        if len(full) == 1:
            who = f"rank {full[0]} needs"
        else:
            who = "each rank needs" if len(full) == len(needs) else f"ranks {', '.join(full)} need"
        fits = "which fits" if most <= limit + TOLERANCE else "which does not fit"
        held = short(max(point.held))
        until = "; a micro-batch counts until its backward for the weights has ended"
        said = (
            f"{prediction.timeline.name}: {who} {short(most)} GiB of {short(limit)}, {fits}: "
            f"{held} micro-batches at {short(self.sizes.kept)} GiB, and {short(self.sizes.states)} "
            f"GiB of weights, gradients and optimizer{until * ('W' in prediction.schedule.kinds)}"
        )
        return said + "; without stored weight versions" * ("U" in prediction.schedule.kinds)

    @cached_property
    def curves(self):
        """[(choice, {value: its Point}), ...] without values that the schedule does not allow."""
        found = []
        for choice in self.choices:
            points = {}
            own = own_size(choice, self.moved)
            for value in self.values if own is None else [own]:
                moved = {self.moved: value, "schedule": choice, "compare": None}
                point = point_of(replace(self.settings, **moved))
                if point is not None:
                    points[value] = point
            found.append((choice, points))
        return found

    def _lines(self, measure):
        """The Curves of one measure, a function of a Point."""
        lines = []
        for choice, points in reversed(self.curves):
            marks = {"dashes": FIELD.get(choice) if isinstance(choice, str) else ""}
            if choice == self.settings.schedule:
                marks = {"color": CHOSEN, "mark": "circle", "width": 2.4}
            elif choice == self.settings.compare:  # wider, since the chosen curve may cover it
                marks = {"color": COMPARED, "mark": "square", "width": 5}
            places = tuple((value, measure(point)) for value, point in points.items())
            if places:
                lines.append(Curve(name_of(choice), places, **marks))
        return lines  # the chosen curve last, so that it is drawn on top

    @cached_property
    def picture(self):
        """A Picture: a bar for each rank, and the two plots."""
        sizes = self.sizes
        shown = [(one, gib_per_rank(point, sizes)) for one, point in self.present]
        longest = max(max(needs) for _, needs in shown)
        parts, top = [], 4
        for index, (one, needs) in enumerate(shown):
            bars = [
                (f"rank {rank}", sizes.states, need - sizes.states, tell_need(need, sizes.limit))
                for rank, need in enumerate(needs)
            ]
            title = f"{one.timeline.name}: each rank's memory, limit {short(sizes.limit)} GiB"
            parts += draw_bars(index * HALF, top, title, bars, sizes.limit, longest)
        top += bars_height(max(len(needs) for _, needs in shown))
        words = "weights, gradients, optimizer", "kept for backwards"
        parts += draw_bars_legend(LEFT, top, *words)
        top += 34
        plain = {
            "x_label": AXES[self.moved],
            "now": self.now,
            "doubling": self.moved == "microbatches",
        }
        times = [self._without_bubble(), *self._lines(lambda point: point.milliseconds)]
        parts += draw_plot(0, top, "time of the step, ms per micro-batch", curves=times, **plain)
        memory = self._lines(lambda point: max(gib_per_rank(point, sizes)))
        title = "memory of the fullest rank, GiB"
        parts += draw_plot(HALF, top, title, curves=memory, limit=sizes.limit, **plain)
        return Picture(wrap(parts, top + PLOT, self.alt), self.alt)

    def _without_bubble(self):
        """The shortest possible time of the same work in any order: the work of one rank."""
        work = []
        for value in self.values:
            there = replace(self.settings, **{self.moved: value})
            work.append((value, there.forward + there.backward))
        return Curve("no bubble", tuple(work), dashes="1 3")

    @property
    def alt(self):
        """The picture in words."""
        said = [self.sentence(*each) for each in self.present]
        for choice, points in self.curves[: len(self.present)]:
            ends = [value for value in (min(points), self.now, max(points)) if value in points]
            told = (
                f"{short(points[value].milliseconds)} ms per micro-batch and "
                f"{short(max(gib_per_rank(points[value], self.sizes)))} GiB at {short(value)}"
                for value in dict.fromkeys(ends)
            )
            said.append(f"{name_of(choice)} over {AXES[self.moved]}: {', '.join(told)}")
        return ". ".join(said)

    @property
    def table(self):
        """HTML: the text equivalent of the curves, folded, with one row per value of the slider."""
        rows = []
        for value in self.values:
            cells = []
            for _, points in self.curves:
                point = points.get(value)
                gib = point and short(max(gib_per_rank(point, self.sizes)))
                cells.append(
                    f"{short(point.milliseconds)} ms, {gib} GiB" if point else "not possible"
                )
            rows.append([short(value) + " (now)" * (value == self.now), *cells])
        heads = [AXES[self.moved], *(name_of(choice) for choice, _ in self.curves)]
        caption = "Milliseconds of the step per micro-batch, and the fullest rank's memory"
        shown = table_of(caption, heads, rows)
        return (
            "<details><summary>the curves as a table</summary>"
            f'<div class="pipeline-scroll" tabindex="0" role="region" aria-label="{caption}">'
            f"{shown}</div></details>"
        )


def own_size(choice, name):
    """The size that a given Schedule fixes in place of slider `name`; None if the slider applies."""
    if isinstance(choice, str) or name not in ("ranks", "microbatches", "chunks"):
        return None
    stages_per_rank = choice.num_stages // choice.num_ranks
    sizes = choice.num_ranks, choice.num_microbatches, stages_per_rank
    return dict(zip(("ranks", "microbatches", "chunks"), sizes))[name]


def tell_need(need, limit):
    """The need in words, such as "9.2 GiB, 1.2 over"."""
    over = f", {short(need - limit)} over" if need > limit + TOLERANCE else ""
    return f"{short(need)} GiB{over}"


def name_of(choice):
    return choice.name if isinstance(choice, Schedule) else choice
