# SPDX-License-Identifier: Apache-2.0
"""Explains the length of a step: its longest path, and a reason for every idle time.

The longest path leads from the first start to the last end. Each of its actions started when the
previous one ended, or when the previous one's message arrived, so none could have started earlier.
A shorter step needs a shorter path (J. E. Kelley and M. R. Walker, Critical-path planning and
scheduling, 1959). The functions need only a timeline, predicted or performed.
"""

from typing import NamedTuple

from lab.story import Wait, name_of_message, short, smallest_time, waits_of
from lab.timeline import Event
from pipeline.schedule import message_of


class Step(NamedTuple):
    """An event of the longest path, and the previous event of the path, None for the first.

    `gap` is the time between the two: the time of a message from another rank or, in a performed
    run, the time between two actions of a rank.
    """

    event: Event
    before: Event | None
    gap: float

    @property
    def by_message(self):
        return self.before is not None and self.before.rank != self.event.rank


class Bubble(NamedTuple):
    """A time in which a rank is idle, between the first start and the last end of all ranks.

    `wait` is the Wait of the rank's next action, None after the rank's last action. `instead` is a
    later action of the rank that was ready and short enough to run here, or None.
    """

    rank: int
    start: float
    end: float
    wait: Wait | None
    instead: Event | None

    @property
    def length(self):
        return self.end - self.start


def longest_path(timeline):
    """The Steps of a longest path, in the order of time. Several may be equally long.

    If both its rank and its message kept an action from starting earlier, the path stays on the
    rank.
    """
    smallest = smallest_time(timeline)
    waits = {wait.event: wait for wait in waits_of(timeline)}
    before_on_rank = {
        event: before
        for events in timeline.by_rank
        for before, event in zip([None, *events], events)
    }
    event = max(timeline.events, key=lambda event: event.end)
    path = []
    while event is not None:
        wait = waits[event]
        before = wait.source if wait.for_message else before_on_rank[event]
        if before is None and wait.source and event.start - timeline.start > smallest:
            before = wait.source  # a rank's first action that began late in a performed run
        path.append(Step(event, before, event.start - before.end if before else 0.0))
        event = before
    return path[::-1]


def tell_path(path):
    """The longest path in a sentence: its length and its parts, in milliseconds."""
    busy = {}
    for step in path:
        busy.setdefault(step.event.rank, []).append(step.event.end - step.event.start)
    work = ", ".join(f"{short(sum(busy[rank]))} on rank {rank}" for rank in sorted(busy))
    total = path[-1].event.end - path[0].event.start
    travels = sum(step.gap for step in path if step.by_message)
    other = sum(step.gap for step in path if not step.by_message)
    smallest = 1e-9 * total
    parts = [
        f"{short(sum(map(sum, busy.values())))} ms of work ({work})",
        *([f"{short(travels)} ms of messages on their way"] if travels > smallest else []),
        *([f"{short(other)} ms between a rank's actions"] if other > smallest else []),
    ]
    changes = sum(step.by_message for step in path)
    way = "stays on one rank" if not changes else f"changes rank {changes} times"
    way = way.replace("1 times", "once") if changes == 1 else way
    return f"The longest path takes {short(total)} ms: {' and '.join(parts)}. It {way}."


def bubbles_of(timeline):
    """Every Bubble, rank by rank in the order of time."""
    smallest = smallest_time(timeline)
    end = timeline.start + timeline.makespan
    waits = {wait.event: wait for wait in waits_of(timeline)}
    ready = ready_times(timeline, waits.values())
    bubbles = []
    for rank, events in enumerate(timeline.by_rank):
        for place, event in enumerate(events):
            wait = waits[event]
            if wait.gap > smallest:
                later = events[place + 1 :]
                instead = _fitting(later, ready, wait.free, event.start, smallest)
                bubbles.append(Bubble(rank, wait.free, event.start, wait, instead))
        if end - events[-1].end > smallest:
            bubbles.append(Bubble(rank, events[-1].end, end, None, None))
    return bubbles


def _fitting(later, ready, start, end, smallest):
    """The first of the later events that was ready and fits between `start` and `end`, or None."""
    for event in later:
        if event.action.kind == "U":
            continue  # an update takes no time, so it fills no bubble
        if max(ready[event], start) + event.end - event.start <= end + smallest:
            return event
    return None


def ready_times(timeline, waits):
    """{event: the time at which all that it needs had arrived}, in the timeline's own times.

    A timeline has the times at which a message was sent and used, but rarely its arrival. Without
    it, the time on the way is taken to be the shortest time from sending to use on the same link.
    """
    fastest = {}  # (source, destination) -> time
    for wait in waits:
        if wait.source:
            link = wait.source.rank, wait.event.rank
            lag = wait.event.start - wait.source.end
            fastest[link] = min(lag, fastest.get(link, lag))
    made = {message_of(event.action): event for event in timeline.events}

    def arrival(message, rank):
        maker = made.get(message)
        if maker is None or maker.rank == rank:
            return maker.end if maker else timeline.start
        travelled = fastest.get((maker.rank, rank), 0.0)
        return timeline.arrivals.get((rank, message), maker.end + travelled)

    return {
        event: max(
            (arrival(need, event.rank) for need in timeline.needs_of(event.action)),
            default=timeline.start,
        )
        for event in timeline.events
    }


def tell_bubble(bubble, timeline):
    """A sentence on why the rank is idle there, and which action it could have run instead."""
    wait = bubble.wait
    if wait is None:
        last = max(timeline.events, key=lambda event: event.end)
        return f"has done all its actions; the step ends with {last.action} on rank {last.rank}"
    if wait.source is None or not wait.for_message:
        return f"nothing was missing for {wait.event.action}; the rank took its time"
    told = f"{wait.event.action} waits for {name_of_message(wait.source)}"
    sent = wait.source.end
    if bubble.end - sent > smallest_time(timeline):
        told += f", sent at {short(sent - timeline.start)} ms"
    if bubble.instead:
        instead = bubble.instead.action
        more = ", and hold one more activation" if instead.kind == "F" else ""
        return f"{told}; the rank could run {instead} here{more}"
    if bubble.start == timeline.start:
        return f"{told}; before that it has nothing to do"
    return f"{told}; no later action of the rank was ready and short enough"
