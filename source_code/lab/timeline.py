# SPDX-License-Identifier: Apache-2.0
"""A timeline: when every action of a run started and ended.

A predicted run (simulator.py) and a performed one (clock.py) have the same form, so the same code
measures and draws them. Times are in one unit per timeline: the unit of the costs for a predicted
run, milliseconds for a performed one.

There are two conventions for the bubble, and a figure must name the convention that it uses:
`bubble_over_total` = idle / (busy + idle), as in GPipe section 2.3;
`bubble_over_ideal` = idle / busy, as in Megatron-LM (Narayanan et al. 2021) section 2.2.1.
"""

from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

from files.inputs import MEBIBYTE, InputError, is_count, is_number, parse_json, read_text
from files.outputs import to_json
from pipeline.schedule import KINDS, Action, needs_of

RECOMPUTED = "recomputed forward"  # name of a part of a backward, in traces and pictures
LARGEST_FILE = 256 * MEBIBYTE
LARGEST_COUNT = 2**31
LONGEST_TIME = 1e15  # microseconds: thirty years


class TimelineError(ValueError):
    """A file is not a timeline of this course; the text says why."""


class Event(NamedTuple):
    """One action of a rank. `recompute` is the time in it for a forward that was run again."""

    rank: int
    action: Action
    start: float
    end: float
    recompute: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """All events of one step on all ranks; `name` is the name of the schedule.

    `arrivals` is {(rank, Message): time of its arrival}. It is known only in a predicted run, for
    messages that occupy a link. `needs` is {action: the Messages that it needs}, for stages that do
    not form a line.
    """

    name: str
    events: tuple[Event, ...]
    arrivals: dict = field(default_factory=dict, compare=False, repr=False)
    needs: dict = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def num_ranks(self):
        return 1 + max(event.rank for event in self.events)

    @cached_property
    def num_stages(self):
        return 1 + max(event.action.stage for event in self.events)

    def needs_of(self, action, replicas=1):
        """The messages that must exist before `action` can start."""
        if action in self.needs:
            return self.needs[action]
        return needs_of(action, self.num_stages, replicas)

    @cached_property
    def start(self):
        """The first start on any rank; a performed timeline need not start at 0."""
        return min(event.start for event in self.events)

    @cached_property
    def makespan(self):
        """The time from the first start to the last end, over all ranks."""
        return max(event.end for event in self.events) - self.start

    @cached_property
    def by_rank(self):
        """The events of each rank, in the order in which it took them."""
        ranks = [[] for _ in range(self.num_ranks)]
        for event in self.events:
            ranks[event.rank].append(event)
        for events in ranks:  # one by one: each is nearly in order, and all together are not
            events.sort(key=attrgetter("start", "end"))
        return ranks

    @cached_property
    def busy_per_rank(self):
        """The total time of each rank's actions."""
        return [sum(event.end - event.start for event in events) for events in self.by_rank]

    @property
    def idle_per_rank(self):
        """The idle time of each rank between the first start and the last end of all ranks."""
        return [self.makespan - busy for busy in self.busy_per_rank]

    @property
    def ideal(self):
        """The largest busy time of a rank: a lower bound of the makespan of the same work."""
        return max(self.busy_per_rank)

    @property
    def bubble_over_total(self):
        """The bubble as a share of the makespan, 0 to 1: (p - 1)/(m + p - 1) for GPipe."""
        return 1 - self.ideal / self.makespan

    @property
    def bubble_over_ideal(self):
        """The bubble divided by the busy time; it may exceed 1. (p - 1)/m for GPipe."""
        return self.makespan / self.ideal - 1

    @property
    def idle_fraction(self):
        """The share of all rank time that is idle; equals bubble_over_total for equal ranks."""
        return sum(self.idle_per_rank) / (self.num_ranks * self.makespan)

    @property
    def span_per_rank(self):
        """Last end minus first start of each rank, as the zero-bubble papers count."""
        return [events[-1].end - events[0].start for events in self.by_rank]

    @property
    def bubble_by_span(self):
        """The bubble rate of the zero-bubble papers (Qi et al. 2023, 2401.10241)."""
        return 1 - self.ideal / max(self.span_per_rank)

    def _peak_held(self, release_kinds):
        # A rank takes one action at a time, so the actions in order give the exact peak: an action
        # that ends has freed its activation before the next one starts.
        peaks = []
        for events in self.by_rank:
            held = peak = 0
            for event in events:
                if event.action.kind == "F":
                    held += 1
                    peak = max(peak, held)
                elif event.action.kind in release_kinds:
                    held -= 1
            peaks.append(peak)
        return peaks

    @property
    def peak_held_per_rank(self):
        """The peak number of (stage, micro-batch) activations that each rank holds, from the start
        of F to the end of B or I."""
        return self._peak_held("BI")

    @property
    def peak_held_until_weight_per_rank(self):
        """The peak number of (stage, micro-batch) activations, to the end of B or W."""
        return self._peak_held("BW")


def to_chrome_trace(timeline):
    """The timeline as text in the Chrome trace format, which Perfetto (ui.perfetto.dev) opens."""
    rows = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in range(timeline.num_ranks)
    ]
    for event in timeline.events:
        row = {
            "name": str(event.action),
            "cat": KINDS[event.action.kind],
            "ph": "X",
            "pid": event.rank,
            "tid": 0,
            "ts": (event.start - timeline.start) * 1000,
            "dur": (event.end - event.start) * 1000,
            "args": event.action._asdict(),
        }
        rows.append(row)
        if event.recompute:  # a slice within the slice, as viewers draw it
            again = {"name": f"{event.action._replace(kind='F')} again", "cat": RECOMPUTED}
            rows.append({**row, **again, "dur": event.recompute * 1000})
    trace = {
        "traceEvents": rows,
        "displayTimeUnit": "ms",
        "otherData": {"name": timeline.name},
    }
    return to_json(trace, indent=0) + "\n"


def from_chrome_trace(text):
    """The Timeline in a text of `to_chrome_trace`, in milliseconds from the first start.

    Raises TimelineError for any other text.
    """
    try:
        trace = parse_json(text, "it")
    except InputError as error:
        raise TimelineError(str(error)) from None
    rows = trace.get("traceEvents") if isinstance(trace, dict) else None
    name = trace.get("otherData") if rows else None
    name = name.get("name") if isinstance(name, dict) else None
    if not isinstance(rows, list) or not isinstance(name, str):
        raise TimelineError("it is not a timeline of this course")
    events, recomputed = [], {}
    for number, row in enumerate(rows):
        event = _event_of(row, f"traceEvents[{number}]")
        if event and row["cat"] == RECOMPUTED:
            recomputed[event.action] = event.end - event.start
        elif event:
            events.append(event)
    timeline = Timeline(
        name, tuple(e._replace(recompute=recomputed.get(e.action, 0.0)) for e in events)
    )
    return _whole(timeline)


def _event_of(row, where):
    """The Event of a row of a trace, or None for a row that is not an action."""
    if not isinstance(row, dict) or row.get("ph") not in ("X", "M"):
        raise TimelineError(f"{where} is not a row that --timeline writes")
    if row["ph"] == "M":
        return None
    named = row.get("args")
    counts = isinstance(named, dict) and set(named) == set(Action._fields)
    kind = named["kind"] if counts else None
    if not isinstance(kind, str) or kind not in KINDS or not isinstance(row.get("cat"), str):
        raise TimelineError(f"{where} is not an action of a schedule")
    if not all(is_count(n, LARGEST_COUNT) for n in (row.get("pid"), *_numbers(named))):
        raise TimelineError(f"{where} has a rank, stage or micro-batch that is not a count")
    times = row.get("ts"), row.get("dur")
    if not all(is_number(time, 0, LONGEST_TIME) for time in times):
        raise TimelineError(f"{where} has a start or a duration that is not a time")
    start, end = times[0] / 1000, sum(times) / 1000
    return Event(row["pid"], Action(**named), start, end)


def _numbers(named):
    return named["stage"], named["microbatch"]


def _whole(timeline):
    """`timeline`, if no action occurs twice and no rank, stage or micro-batch is missing."""
    events = timeline.events
    if not events or timeline.makespan <= 0:
        raise TimelineError("no action in it took any time")
    if len({event.action for event in events}) < len(events):
        raise TimelineError("it has an action twice")
    for what, found in (
        ("rank", {event.rank for event in events}),
        ("stage", {event.action.stage for event in events}),
        ("micro-batch", {event.action.microbatch for event in events}),
    ):
        if len(found) != max(found) + 1:
            raise TimelineError(f"it has {what} {max(found)} and lacks one before it")
    for rank, busy in enumerate(timeline.busy_per_rank):
        if busy > 1.01 * timeline.makespan:  # measured times may differ a little
            raise TimelineError(f"rank {rank} has two actions at the same time")
    return timeline


def read_timeline(path):
    """The Timeline in a file that --timeline wrote. Raises TimelineError, with the file's name."""
    try:
        return from_chrome_trace(read_text(path, LARGEST_FILE))
    except InputError as error:
        raise TimelineError(str(error)) from None
    except TimelineError as error:
        raise TimelineError(f"{path}: {error}") from None
