"""A timeline: when every action of a run started and ended.

A predicted run (simulator.py) and a performed one (clock.py) are the same kind of object, so
they can be measured and drawn with the same code. Times are in one unit per timeline: whatever
the costs were given in, milliseconds for a performed run.

Bubble has two conventions, and a number without its convention says nothing:
`bubble_over_total` = idle / (busy + idle), as in GPipe section 2.3;
`bubble_over_ideal` = idle / busy, as in Megatron-LM (Narayanan et al. 2021) section 2.2.1.
"""

import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from pipeline.schedule import KINDS, Action

RECOMPUTED = "recomputed forward"  # a part of a backward's time, in a trace and in a picture


class Event(NamedTuple):
    """One action of a rank. Of its time, `recompute` went into a forward that was run again."""

    rank: int
    action: Action
    start: float
    end: float
    recompute: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """All events of one step, on every rank; `name` says what ran.

    `arrivals` has the time at which a message arrives, {(rank, Message): time}, as far as that is
    known: of a performed run it is not, and of a predicted one for messages that occupy a link.
    """

    name: str
    events: tuple[Event, ...]
    arrivals: dict = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def num_ranks(self):
        return 1 + max(event.rank for event in self.events)

    @cached_property
    def num_stages(self):
        return 1 + max(event.action.stage for event in self.events)

    @cached_property
    def start(self):
        """The first start of any rank: a performed timeline need not begin at 0."""
        return min(event.start for event in self.events)

    @cached_property
    def makespan(self):
        """From the first start to the last end, over all ranks."""
        return max(event.end for event in self.events) - self.start

    @cached_property
    def by_rank(self):
        """The events of each rank, in the order in which it took them."""
        ranks = [[] for _ in range(self.num_ranks)]
        for event in sorted(self.events, key=lambda event: (event.start, event.end)):
            ranks[event.rank].append(event)
        return ranks

    @cached_property
    def busy_per_rank(self):
        """The sum of what each rank's actions took."""
        return [sum(event.end - event.start for event in events) for events in self.by_rank]

    @property
    def idle_per_rank(self):
        """What each rank waited between the first start and the last end of all ranks."""
        return [self.makespan - busy for busy in self.busy_per_rank]

    @property
    def ideal(self):
        """The largest busy time of a rank: no order of the same work can be faster."""
        return max(self.busy_per_rank)

    @property
    def bubble_over_total(self):
        """A share of the makespan, 0 to 1: (p - 1)/(m + p - 1) for GPipe."""
        return 1 - self.ideal / self.makespan

    @property
    def bubble_over_ideal(self):
        """The same over the busy time, which may be above 1: (p - 1)/m for GPipe."""
        return self.makespan / self.ideal - 1

    @property
    def idle_fraction(self):
        """The share of all rank time that is idle; equals bubble_over_total for equal ranks."""
        return sum(self.idle_per_rank) / (self.num_ranks * self.makespan)

    @property
    def span_per_rank(self):
        """Last end minus first start of each rank: what the zero-bubble papers count."""
        return [events[-1].end - events[0].start for events in self.by_rank]

    @property
    def bubble_by_span(self):
        """The bubble rate of the zero-bubble papers (Qi et al. 2023, 2401.10241)."""
        return 1 - self.ideal / max(self.span_per_rank)

    def _peak_held(self, release_kinds):
        # A rank takes one action at a time, so walking its actions in order is exact: an action
        # that ends has let go of its activation before the next one starts.
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
        """Most stage x micro-batch activations held, from the start of F to the end of B or I."""
        return self._peak_held("BI")

    @property
    def peak_held_until_weight_per_rank(self):
        """The same, counted to the end of B or W."""
        return self._peak_held("BW")


def to_chrome_trace(timeline):
    """The Chrome trace format as text; it opens in Perfetto (ui.perfetto.dev) and in a notebook."""
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
    return json.dumps(trace, indent=0) + "\n"


def from_chrome_trace(text):
    """Read what `to_chrome_trace` wrote. Times come back in milliseconds from the first start."""
    trace = json.loads(text)
    rows = [row for row in trace["traceEvents"] if row["ph"] == "X"]
    recomputed = {
        Action(**row["args"]): row["dur"] / 1000 for row in rows if row["cat"] == RECOMPUTED
    }
    events = []
    for row in rows:
        if row["cat"] != RECOMPUTED:
            action = Action(**row["args"])
            start, end = row["ts"] / 1000, (row["ts"] + row["dur"]) / 1000
            events.append(Event(row["pid"], action, start, end, recomputed.get(action, 0.0)))
    return Timeline(trace["otherData"]["name"], tuple(events))
