# SPDX-License-Identifier: Apache-2.0
"""Predicts a schedule: the start and end of each action, given the costs of actions and messages.

A rank starts its next action as soon as it is free and all messages for the action have arrived. A
message leaves when the action that made it ends, and it does not delay its sender. A hop can be
slow in two ways:

- far: each message takes `transfer`, its latency, and any number of them travel at the same time;
- narrow: each message occupies its link for `occupancy`, its bytes over the bandwidth, and a link
  serves one message at a time, in the order in which they were made. The others wait.

A message arrives `transfer` after its link has served it. Every ordered pair of ranks has a link of
its own, as it has a channel. So the two directions do not disturb each other, and neither do
messages to two different ranks. Where several ranks share a network card, or one rank sends to both
neighbours through the same card, real messages wait longer than here. (In the LogP model of Culler
et al. 1993, the two are the latency L and the gap g; there all messages of a rank share one gap.)
"""

import argparse
import gc
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from lab.timeline import Event, Timeline
from pipeline.command_line import number_from_zero, positive_number
from pipeline.schedule import message_of

LONGEST = 1e15  # the largest cost: sums of costs stay finite


@dataclass(frozen=True)
class Costs:
    """The costs of the actions of a stage and of messages, all in one unit of time.

    Each of `forward`, `backward`, `backward_weight` and `recompute` is a number, or a list with a
    number for each stage. `backward` is the full backward; `backward_weight` is the part of it that
    a split backward does later, by default half of it. `recompute` is the forward that a backward
    runs again before it starts; it is added to the backward. An update costs nothing.

    `transfer` is the latency of a message, and `occupancy` the time for which it occupies its link:
    see above. Each is one number for every pair of ranks, or a dictionary {(source, destination):
    cost}; pairs that are not in it cost nothing. The sums of an update over several ranks have a
    latency but occupy no link.

    `exchange` is a pair of numbers, the time for which a forward and a backward wait for their
    all-to-alls: see experts.py. It is added to the action, but in a pair of actions (pairs.py) one
    can compute while the other waits. `exchanges`, a number or a list with one for each stage, says
    how many all-to-alls share that time: a dispatch and a combine for each layer. `work` has a
    factor for each micro-batch, which multiplies the costs of its forwards and backwards; without
    it all micro-batches are equal.
    """

    forward: float | list = 1.0
    backward: float | list = 2.0
    backward_weight: float | list | None = None
    transfer: float | dict = 0.0
    recompute: float | list = 0.0
    occupancy: float | dict = 0.0
    exchange: tuple[float, float] = (0.0, 0.0)
    exchanges: int | list = 2
    work: tuple[float, ...] | list = ()

    def of(self, action):
        """The cost of one action, with its exchange."""
        return self.computing(action) + self.exchange_of(action)

    def computing(self, action):
        """The cost of one action without its exchange."""
        forward = _of_stage(self.forward, action.stage)
        backward = _of_stage(self.backward, action.stage)
        if self.backward_weight is None:
            weight = backward / 2
        else:
            weight = _of_stage(self.backward_weight, action.stage)
        costs = {"F": forward, "B": backward, "I": backward - weight, "W": weight, "U": 0.0}
        return costs[action.kind] * self.work_of(action) + self.recompute_of(action)

    def recompute_of(self, action):
        """The part of the action's cost in which the stage's forward is run again."""
        again = _of_stage(self.recompute, action.stage) if action.kind in "BI" else 0.0
        return again * self.work_of(action)

    def exchange_of(self, action):
        """The part of the action's cost in which its rank waits for an all-to-all."""
        forward, backward = self.exchange
        waits = {"F": forward, "B": backward, "I": backward}
        return waits.get(action.kind, 0.0) * self.work_of(action)

    def exchanges_of(self, action):
        """The number of the action's all-to-alls."""
        return _of_stage(self.exchanges, action.stage)

    def work_of(self, action):
        """The work of the action's micro-batch, as a multiple of the costs above."""
        return self.work[action.microbatch] if self.work else 1.0

    def of_pair(self, forward, backward):
        """The time of two actions in turns, and the part of it that the figures give the forward.

        Its all-to-alls cut each action into equal parts, such as three for one layer. Where one
        action waits, the other one computes its next part (see turns.py, which performs it).
        """
        both = forward, backward
        now, ready = 0.0, [0.0, 0.0]
        exchanges = [self.exchanges_of(action) for action in both]
        for part in range(max(exchanges) + 1):
            for number, action in enumerate(both):
                if part <= exchanges[number]:
                    now = max(now, ready[number])
                    now += self.computing(action) / (exchanges[number] + 1)
                    ready[number] = now + self.exchange_of(action) / exchanges[number]
        of_forward, of_backward = map(self.computing, both)
        return now, now * of_forward / (of_forward + of_backward)

    def between(self, source, destination):
        """The latency of a message from one rank to another."""
        return _of_pair(self.transfer, source, destination)

    def occupied_by(self, source, destination):
        """How long a message from one rank to another occupies its link."""
        return _of_pair(self.occupancy, source, destination)


def _of_stage(cost, stage):
    return cost[stage] if isinstance(cost, (list, tuple)) else cost


def _of_pair(cost, source, destination):
    return cost.get((source, destination), 0.0) if isinstance(cost, dict) else cost


@contextmanager
def collector_paused():
    """A context without garbage collections, which would scan live objects again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_new_event = partial(tuple.__new__, Event)  # Event(...) takes four times as long


@collector_paused()  # half of the time of a large schedule
def simulate(schedule, costs):
    """Simulate `schedule` with `costs`; returns a Timeline. Raises ScheduleError for a deadlock.

    The time is linear in the number of actions.
    """
    free = [0.0] * schedule.num_ranks
    made = {}  # message -> the rank that made it, and when that action ended
    links = {}  # (source, destination) -> when the link has served all its messages
    arrivals = {}  # (destination, message) -> when it arrives, of messages that occupy a link
    cost_of = {}  # (stage, kind), or with `work` the action -> cost, and the part that recomputes
    events = []
    partners, pair_ends = getattr(schedule, "partners", {}), {}
    for rank, action, needs in schedule.playable_order:
        start = free[rank]
        for need in needs:
            maker, arrived = made[need]
            if maker != rank:
                arrived += costs.between(maker, rank)
                arrived = arrivals.get((rank, need), arrived)
            start = max(start, arrived)
        key = action if costs.work else action[:2]
        if key not in cost_of:
            cost_of[key] = costs.of(action), costs.recompute_of(action)
        cost, recompute = cost_of[key]
        if action in partners:  # its result leaves when the pair has ended
            whole, of_forward = costs.of_pair(action, partners[action])
            end, sends = start + of_forward, start + whole
            pair_ends[partners[action]] = sends
        else:
            end = sends = pair_ends.get(action, start + cost)
        free[rank] = end
        made[message_of(action)] = rank, sends
        if costs.occupancy:
            serve(links, arrivals, schedule.routes_after(action), sends, costs)
        events.append(_new_event((rank, action, start, end, recompute)))
    return Timeline(schedule.name, tuple(events), arrivals)


def serve(links, arrivals, routes, time, costs):
    """Pass the messages of `routes` to their links at `time`; each waits until its link is free."""
    for route in routes:
        link = route.source, route.destination
        occupied = costs.occupied_by(*link)
        if occupied:
            links[link] = max(time, links.get(link, 0.0)) + occupied
            arrivals[route.destination, route.message] = links[link] + costs.between(*link)


def cost(text):
    """The value of a flag as a cost, from 1 / LONGEST to LONGEST."""
    if not 1 / LONGEST <= positive_number(text) <= LONGEST:
        raise argparse.ArgumentTypeError(f"must be {1 / LONGEST} to {LONGEST}, not '{text}'")
    return float(text)


def costs_in(text):
    """The value of a flag as several costs, with commas between them."""
    return [cost(one) for one in text.split(",")]


def cost_or_nothing(text):
    """The value of a flag as a cost that may be 0."""
    return number_from_zero(text) and cost(text)


def sums_done(timeline, cost, buckets=1):
    """Return for each rank when it has its sums, relative to the last action of all ranks.

    A sum takes the time `cost` and starts when its stage is done; the sums of one rank run one
    after the other. With `buckets` equal parts, as in DDP, a sum starts within the stage's last
    backward: a part is ready when its share of that backward is done. A negative value is hidden
    behind the work of other ranks. Times are in the unit of the timeline.
    """
    done = []
    for events in timeline.by_rank:
        last = {e.action.stage: e for e in events if e.action.kind in "BW"}
        ready = [
            event.end - (event.end - event.start) * (1 - part / buckets)
            for event in last.values()
            for part in range(1, buckets + 1)
        ]
        free = 0.0
        for moment in sorted(ready):
            free = max(free, moment) + cost / buckets
        done.append(free - timeline.start - timeline.makespan)
    return done
