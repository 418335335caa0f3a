"""Predicts a schedule: given what actions and transfers cost, when does each start and end?

A rank starts its next action as soon as it is free and everything the action needs has arrived. A
message takes `transfer` after the action that made it; the sender is not held up by it.
"""

from dataclasses import dataclass

from lab.timeline import Event, Timeline
from pipeline.schedule import message_of


@dataclass(frozen=True)
class Costs:
    """What one action of one stage costs, in any one unit of time.

    Each of `forward`, `backward`, `backward_weight` and `recompute` is a number, or a list with a
    number for each stage. `backward` is the full backward; `backward_weight` is the part of it that
    a split backward does later, half of it unless given. `transfer` is the latency of a message, or
    a dictionary with that between two ranks, {(source, destination): cost}; pairs that are not in
    it cost nothing. `recompute` is the forward that a backward runs again before it starts, and
    comes on top of it. An update costs nothing.
    """

    forward: float | list = 1.0
    backward: float | list = 2.0
    backward_weight: float | list | None = None
    transfer: float | dict = 0.0
    recompute: float | list = 0.0

    def of(self, action):
        """The cost of one action."""
        forward = _of_stage(self.forward, action.stage)
        backward = _of_stage(self.backward, action.stage)
        if self.backward_weight is None:
            weight = backward / 2
        else:
            weight = _of_stage(self.backward_weight, action.stage)
        costs = {"F": forward, "B": backward, "I": backward - weight, "W": weight, "U": 0.0}
        return costs[action.kind] + self.recompute_of(action)

    def recompute_of(self, action):
        """The part of that in which the stage's forward is run again."""
        return _of_stage(self.recompute, action.stage) if action.kind in "BI" else 0.0

    def between(self, source, destination):
        """The latency of a message from one rank to another."""
        if isinstance(self.transfer, dict):
            return self.transfer.get((source, destination), 0.0)
        return self.transfer


def _of_stage(cost, stage):
    return cost[stage] if isinstance(cost, (list, tuple)) else cost


def simulate(schedule, costs):
    """Play `schedule` with `costs` into a Timeline. Raises ScheduleError for a deadlock.

    Linear in the number of actions.
    """
    free = [0.0] * schedule.num_ranks
    made = {}  # message -> the rank that made it, and when it was done
    cost_of = {}  # (stage, kind) -> cost
    events = []
    for rank, action, needs in schedule.playable_order:
        start = free[rank]
        for need in needs:
            maker, arrived = made[need]
            if maker != rank:
                arrived += costs.between(maker, rank)
            start = max(start, arrived)
        key = action[:2]
        if key not in cost_of:
            cost_of[key] = costs.of(action)
        end = start + cost_of[key]
        free[rank] = end
        made[message_of(action)] = rank, end
        events.append(Event(rank, action, start, end, costs.recompute_of(action)))
    return Timeline(schedule.name, tuple(events))
