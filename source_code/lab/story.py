# SPDX-License-Identifier: Apache-2.0
"""Describes each block of a timeline and its wait, and what each rank does at a given time.

Both need only the timeline, so they work for a predicted run and for a performed one.
Times in the sentences are counted from the timeline's start, as on the axis of a drawing.
"""

from typing import NamedTuple

from lab.timeline import Event
from pipeline.schedule import KINDS, message_of


class Wait(NamedTuple):
    """Why `event` started when it did.

    `free` is the end of the rank's previous action; for its first action, the timeline's start.
    `source` is the event on another rank that made the message for this event, or None if it needs
    no message. An update over several ranks needs several messages; `source` is then the last one's
    event. `for_message` says whether the rank waited for the message.
    """

    event: Event
    free: float
    source: Event | None
    for_message: bool

    @property
    def gap(self):
        """The time for which the rank was idle before the event."""
        return self.event.start - self.free


class Moment(NamedTuple):
    """The actions and the held activations of one rank at one time.

    `doing` has the events under way: one, none while the rank waits, or an update that takes no
    time, together with the event after it. `next` is the rank's next event, None after the
    last. `held` has the (stage, micro-batch) whose forward has started and backward has not ended.
    """

    rank: int
    doing: tuple[Event, ...]
    next: Event | None
    held: tuple[tuple[int, int], ...]


def waits_of(timeline):
    """The Wait of every event, in the order of `timeline.events`. Linear in their number.

    A rank waited for a message if the message was sent after the rank was free. A message that was
    sent earlier and was still on its way cannot be told from a slow rank. It counts as waited for
    only if no message of the timeline was used sooner after it was sent, or if the event started at
    the arrival that the timeline has for it.
    """
    free = {}
    for events in timeline.by_rank:
        ready = timeline.start
        for event in events:
            free[event] = ready
            ready = event.end
    made = {message_of(event.action): event for event in timeline.events}
    replicas = {stage: len(ranks) for stage, ranks in _ranks_by_stage(timeline).items()}
    sources = []
    for event in timeline.events:
        needs = timeline.needs_of(event.action, replicas[event.action.stage])
        sent = [made[need] for need in needs if need in made and made[need].rank != event.rank]
        sources.append(max(sent, key=lambda source: source.end, default=None))
    lags = [event.start - source.end for event, source in zip(timeline.events, sources) if source]
    fastest = min(lags, default=0.0)
    smallest = smallest_time(timeline)
    waits = []
    for event, source in zip(timeline.events, sources):
        arrival = source and timeline.arrivals.get((event.rank, message_of(source.action)))
        for_message = (
            source is not None
            and event.start - free[event] > smallest
            and (
                source.end - free[event] > smallest
                or event.start - source.end <= fastest + smallest
                or (arrival is not None and abs(event.start - arrival) <= smallest)
            )
        )
        waits.append(Wait(event, free[event], source, for_message))
    return waits


def _ranks_by_stage(timeline):
    ranks = {}
    for event in timeline.events:
        ranks.setdefault(event.action.stage, set()).add(event.rank)
    return ranks


def smallest_time(timeline):
    """The smallest meaningful time of a timeline; anything shorter is a rounding error."""
    return 1e-9 * timeline.makespan


def stories_of(timeline, unit="ms"):
    """The result of `tell` for each event, in the order of `timeline.events`."""
    return [tell(wait, timeline, unit) for wait in waits_of(timeline)]


def tell(wait, timeline, unit="ms"):
    """Two half-sentences on an event: the action and its times, and why it started then.

    ("forward of micro-batch 3 on stage 1, rank 1, 40 to 50 ms",
     "waited 10 ms for the activation of micro-batch 3 from rank 0")
    """
    return _what_and_when(wait.event, timeline.start, unit), _why_then(wait, timeline, unit)


def _what_and_when(event, start, unit):
    stage, kind, microbatch = event.action
    unit = f" {unit}" if unit else ""
    again = f", its first {short(event.recompute)}{unit} the forward again"
    return (
        f"{KINDS[kind]} of micro-batch {microbatch} on stage {stage}, rank {event.rank}, "
        f"{short(event.start - start)} to {short(event.end - start)}{unit}"
        + (again if event.recompute else "")
    )


def _why_then(wait, timeline, unit):
    smallest = smallest_time(timeline)
    unit = f" {unit}" if unit else ""
    late = wait.gap > smallest
    after = f"began {short(wait.gap)}{unit} after rank {wait.event.rank} was free"
    if wait.source is None:
        return (f"{after}; " if late else "") + "needs no message"
    what = name_of_message(wait.source)
    sent = f"sent at {short(wait.source.end - timeline.start)}{unit}"
    if not late:
        return f"did not wait; {what} was {sent}"
    if not wait.for_message:
        return f"{after}; {what} was {sent}"
    on_its_way = wait.event.start - wait.source.end > smallest
    return f"waited {short(wait.gap)}{unit} for {what}" + (f", {sent}" if on_its_way else "")


def name_of_message(source):
    """The message that `source` made, with its rank, in words."""
    what, _, microbatch = message_of(source.action)
    return f"the {what} of micro-batch {microbatch} from rank {source.rank}"


def short(time):
    """A time with four digits, never in exponential notation."""
    return f"{time:.4g}" if abs(time) < 1000 else f"{time:.0f}"


def times_of(timelines):
    """Every time at which something starts or ends in one of the timelines, in order."""
    events = [event for timeline in timelines for event in timeline.events]
    times = {event.start for event in events} | {event.end for event in events}
    smallest = max(map(smallest_time, timelines))
    ordered = sorted(times)
    # Of several times that differ only by rounding, the last: by then all events have happened.
    return [
        time
        for time, following in zip(ordered, [*ordered[1:], float("inf")])
        if following - time > smallest
    ]


def moments_at(timeline, time, until="BI"):
    """The Moment of each rank at `time`, in the timeline's own times; ends come before starts.

    With `until="BW"` an activation counts as held until the backward for the weights has ended.
    """
    moments = []
    for rank, events in enumerate(timeline.by_rank):
        doing, held, following = [], {}, None
        for event in events:
            if event.start > time:
                following = event
                break
            if time < event.end or event.start == event.end == time:
                doing.append(event)
            key = (event.action.stage, event.action.microbatch)
            if event.action.kind == "F":
                held[key] = None
            elif event.action.kind in until and event.end <= time:
                held.pop(key, None)
        moments.append(Moment(rank, tuple(doing), following, tuple(sorted(held))))
    return moments
