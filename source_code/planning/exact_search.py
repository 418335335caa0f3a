# SPDX-License-Identifier: Apache-2.0
"""Finds the shortest schedule of a pipeline, and proves that no shorter one exists.

The state of a pipeline at one moment is what is in front of its stations: how many micro-batches
wait for the forward of stage 2, when the next one arrives, and when each rank is free. From there a
rank can start one of a few actions, and each of them leads to another such state. The search goes
through all states, action by action, and drops those that cannot matter:

- of two ways to the same state, the later one;
- a state from which even a lower bound on the remaining time ends too late.

The result is the best of all legal schedules with these stages on these ranks, for every order of
actions on each rank and every wait before an action. Three arguments make the search finite, and
the tests compare it with an exhaustive search:

1. For a given order of actions on each rank, nothing is gained by starting an action later than it
   can start (such schedules are called semi-active: Pinedo, Scheduling, section 2.3). A rank may
   still wait deliberately: its next action may be one that cannot start yet, instead of one that
   can.
2. Micro-batches are alike. If the third to leave a stage is not the third to arrive there, the two
   can exchange their numbers from there on: no start changes, and no count of held micro-batches.
   So every stage can take them in the order of their arrival.
3. Actions can be listed in the order in which they start, whichever rank they run on.
"""

import time
from typing import NamedTuple

from pipeline.schedule import Action, Schedule
from pipeline.schedules.legal import check_legal

WIDTHS = (1, 10, 100, 1_000, 10_000, 100_000)


class Station(NamedTuple):
    """One kind of action of one stage, with a queue of micro-batches in front of it.

    `next` is the index of the station at which a micro-batch arrives `latency` after the end of
    this action; None at the last station. `tail` is the least time from the end of this action to
    the end of the micro-batch's last action.
    """

    stage: int
    kind: str
    rank: int
    cost: float
    next: int | None
    latency: float
    tail: float


class Moment(NamedTuple):
    """The state of a pipeline at the `time` at which its latest action started.

    `queues[station]` has the times at which the micro-batches in front of a station arrive or have
    arrived. `free[rank]` is the time at which the rank's current action ends. `past` is the pair of
    the latest action's station and the `past` before it.
    """

    time: float
    queues: tuple
    free: tuple
    past: tuple | None


class SearchResult(NamedTuple):
    """The shortest schedule found, its makespan, and a lower bound on all makespans.

    `proven` is true if no legal schedule is shorter. `moments` is the number of states visited.
    `schedule` is None if no schedule was found that is shorter than the known one.
    """

    schedule: Schedule | None
    makespan: float
    bound: float
    proven: bool
    moments: int


class Problem:
    """The input of the search: stages on ranks, micro-batches, costs, split backwards, room.

    `rank_of_stage[stage]` is a rank. With `split` every backward is an I and a W. A whole backward
    is then never better: it is an I and a W in a row, whose gradient leaves later. `room[rank]` is
    the largest number of (stage, micro-batch) activations that a rank may hold, from the start of F
    to the end of B or I, or with `until_weight` to the end of B or W; without `room` any number.
    `costs` is a Costs of simulator.py, best with whole numbers, so that equal times compare equal.
    Messages may have a latency. Raises ValueError for an `occupancy`: a Moment has no queues in
    front of links.
    """

    def __init__(
        self, rank_of_stage, num_microbatches, costs, split=False, room=None, until_weight=False
    ):
        if costs.occupancy:
            raise ValueError("the search has no links that messages occupy; leave occupancy out")
        self.rank_of_stage = tuple(rank_of_stage)
        self.num_ranks = 1 + max(rank_of_stage)
        self.num_microbatches = num_microbatches
        self.room, self.until_weight = room, until_weight
        last = len(rank_of_stage) - 1
        way = [(stage, "F") for stage in range(last + 1)]
        way += [(stage, "I" if split else "B") for stage in range(last, -1, -1)]
        # A micro-batch passes these stations one after the other; each W branches off its I.
        self.way = range(len(way))
        sides = [(stage, "W") for stage in range(last + 1)] if split else []
        self.stations = []
        # From the last station to the first: the tail of a station includes all after it.
        tail = costs.of(Action(0, "W", 0)) if split else 0.0
        for index in reversed(self.way):
            stage, kind = way[index]
            rank, cost = rank_of_stage[stage], costs.of(Action(stage, kind, 0))
            following, latency = None, 0.0
            if index + 1 < len(way):
                following = index + 1
                beyond = rank_of_stage[way[following][0]]
                latency = 0.0 if beyond == rank else costs.between(rank, beyond)
                tail += latency + costs.of(Action(*way[following], 0))
            self.stations.insert(0, Station(stage, kind, rank, cost, following, latency, tail))
        for stage, kind in sides:
            cost = costs.of(Action(stage, kind, 0))
            self.stations.append(Station(stage, kind, rank_of_stage[stage], cost, None, 0.0, 0.0))
        self.side_of = {way.index((stage, "I")): len(way) + stage for stage, _ in sides}


def best_schedule(
    problem, name="found", most_moments=500_000, below=float("inf"), seconds=float("inf")
):
    """The shortest schedule of a Problem, as a SearchResult; None if none was found or known.

    Each sweep goes through all actions and keeps the `width` most promising states after each
    action; the next sweep keeps ten times as many. A schedule is proven if a sweep dropped no state
    for lack of width, or if its makespan equals the bound of the empty pipeline. Otherwise the
    search ends after `most_moments` states, or after `seconds`, with the shortest schedule found so
    far. `below` is the makespan of a schedule that is already known: the search looks only for
    shorter ones.
    """
    deadline = time.monotonic() + seconds
    start = first_moment(problem)
    bound = bound_of(problem, start)
    best, makespan, moments = None, below, 0
    proven = makespan <= bound
    for width in () if proven else WIDTHS:
        end, complete, looked_at = sweep(problem, start, width, makespan, deadline)
        moments += looked_at
        if end is not None:
            best, makespan = end, max(end.free)
        proven = complete or makespan == bound
        if proven or moments > most_moments or time.monotonic() > deadline:
            break
    if best is None and below == float("inf"):
        return None
    schedule = schedule_of(problem, best, name) if best else None
    return SearchResult(schedule, makespan, makespan if proven else bound, proven, moments)


def sweep(problem, start, width, below, deadline=float("inf")):
    """(best last state or None, whether no state was dropped for lack of width, states visited).

    The best last state is the one that ends first, before `below`.
    """
    layer, complete, looked_at = [start], True, 0
    for _ in range(problem.num_microbatches * len(problem.stations)):
        following = {}
        for number, moment in enumerate(layer):
            if number % 1000 == 0 and time.monotonic() > deadline:
                return None, False, looked_at
            for later in moments_after(problem, moment):
                looked_at += 1
                key = what_matters(later)
                if key in following and following[key][1].time <= later.time:
                    continue
                bound = bound_of(problem, later)
                if bound < below:
                    following[key] = bound, later
        ranked = sorted(following.values(), key=lambda found: (found[0], found[1].time))
        complete = complete and len(ranked) <= width
        layer = [moment for _, moment in ranked[:width]]
    return min(layer, key=lambda moment: max(moment.free), default=None), complete, looked_at


def first_moment(problem):
    """The first state: all micro-batches are in front of the first stage, all ranks are free."""
    queues = [()] * len(problem.stations)
    queues[0] = (0.0,) * problem.num_microbatches
    return Moment(0.0, tuple(queues), (0.0,) * problem.num_ranks, None)


def moments_after(problem, moment):
    """One Moment for each action that a rank can take next, starting no earlier than the last one."""
    held = held_per_rank(problem, moment) if problem.room else None
    for index, station in enumerate(problem.stations):
        queue = moment.queues[index]
        if not queue:
            continue
        if station.kind == "F" and held and held[station.rank] >= problem.room[station.rank]:
            continue
        start = max(moment.time, moment.free[station.rank], queue[0])
        end = start + station.cost
        queues, free = list(moment.queues), list(moment.free)
        free[station.rank] = end
        queues[index] = queue[1:]
        if station.next is not None:
            queues[station.next] += (end + station.latency,)
        if index in problem.side_of:
            queues[problem.side_of[index]] += (end,)
        past = (index, moment.past)
        yield Moment(start, tuple(queues), tuple(free), past)


def held_per_rank(problem, moment):
    """How many activations each rank holds once its current action has ended.

    An activation is held if its micro-batch has left F and is in front of a later station, up to
    the stage's own B or I.
    """
    held = [0] * problem.num_ranks
    for stage, rank in enumerate(problem.rank_of_stage):
        backward = len(problem.way) - 1 - stage
        held[rank] += sum(len(queue) for queue in moment.queues[stage + 1 : backward + 1])
        if problem.until_weight and backward in problem.side_of:
            held[rank] += len(moment.queues[problem.side_of[backward]])
    return held


def what_matters(moment):
    """A key that is equal for moments with equal continuations; all times count from now."""
    now = moment.time
    queues = tuple(tuple(max(0.0, at - now) for at in queue) for queue in moment.queues)
    return queues, tuple(max(0.0, at - now) for at in moment.free)


def bound_of(problem, moment):
    """A lower bound on the makespan of every schedule that continues from this state.

    A rank cannot start its remaining work before a micro-batch arrives, and after its last backward
    the gradient still passes the earlier stages. The same holds for each station alone. Delays
    between ranks that compete are left out, so the true makespan may be longer.
    """
    bound = max(moment.free)
    ranks = range(problem.num_ranks)
    ready = [max(moment.time, at) for at in moment.free]
    head, tail = [float("inf")] * len(ranks), [float("inf")] * len(ranks)
    urgent, later = [0.0] * len(ranks), [0.0] * len(ranks)
    left, arrival = 0, 0.0
    for index in problem.way:
        station, queue = problem.stations[index], moment.queues[index]
        rank = station.rank
        left += len(queue)
        if left:
            start = max(ready[rank], queue[0] if queue else arrival)
            bound = max(bound, start + left * station.cost + station.tail)
            head[rank] = min(head[rank], start)
            urgent[rank] += left * station.cost
            if station.kind != "F":
                tail[rank] = min(tail[rank], station.tail)
            arrival = start + station.cost + station.latency
        if index in problem.side_of:
            side = problem.side_of[index]
            weight, waiting = problem.stations[side], moment.queues[side]
            if left + len(waiting):
                start = max(ready[rank], waiting[0] if waiting else arrival - station.latency)
                bound = max(bound, start + (left + len(waiting)) * weight.cost)
                head[rank] = min(head[rank], start)
                later[rank] += (left + len(waiting)) * weight.cost
    for rank in ranks:
        if urgent[rank]:
            bound = max(bound, head[rank] + urgent[rank] + tail[rank])
        if urgent[rank] + later[rank]:
            bound = max(bound, head[rank] + urgent[rank] + later[rank])
    return bound


def schedule_of(problem, moment, name):
    """The Schedule that led to a last state."""
    taken = []
    past = moment.past
    while past is not None:
        index, past = past
        taken.append(problem.stations[index])
    orders = [[] for _ in range(problem.num_ranks)]
    counts = {}
    for station in reversed(taken):
        microbatch = counts.get(station, 0)
        counts[station] = microbatch + 1
        orders[station.rank].append(Action(station.stage, station.kind, microbatch))
    return check_legal(Schedule(name, tuple(map(tuple, orders))))
