# SPDX-License-Identifier: Apache-2.0
"""A schedule is data: for each rank, the actions it takes, in order.

The simulator predicts it, the worker performs it and the figures draw it, whichever way it was
made. This file holds the data, and what each action needs and makes. The check that a schedule is
legal is in schedules/legal.py, its text form in schedules/text_form.py.
"""

from collections import deque
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

from pipeline.message import Message

KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward for the input",
    "W": "backward for the weights",
    "U": "update",  # in asynchronous schedules only: elsewhere the update follows the whole step
}
DURATIONS = {"F": 1, "B": 2, "I": 1, "W": 1, "U": 0}  # relative, for the order of messages


class ScheduleError(ValueError):
    """A schedule cannot be performed; the text says which rank, which step, and why."""


class Action(NamedTuple):
    """One action of a rank: `kind` (a key of KINDS) of `microbatch` on `stage`."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self):
        return f"{self.stage}{self.kind}{self.microbatch}"

    def describe(self):
        return f"the {KINDS[self.kind]} of micro-batch {self.microbatch} on stage {self.stage}"


class Route(NamedTuple):
    """The path of a message from one rank to another, and the stage that uses it."""

    message: Message
    source: int
    destination: int
    consumer_stage: int

    def __str__(self):
        return str(self.message)


_new_message = partial(tuple.__new__, Message)  # Message(...) takes four times as long


def message_of(action):
    """Return the Message that an action makes, for this rank or another; None for W and U.

    A full backward and a backward for the input both make the gradient of the stage's input.
    """
    stage, kind, microbatch = action
    if kind == "F":
        return _new_message(("activation", stage, microbatch))
    if kind in "BI":
        return _new_message(("gradient", stage, microbatch))
    return None


def needs_of(action, num_stages, replicas=1):
    """The messages that must exist before `action` can start, as a list.

    A backward needs the activation of its own stage, too. W and U need the gradient that the
    backward of their own stage makes: the same backward leaves what W computes with, or the weight
    gradient that U applies. `replicas` is the number of ranks that have the stage: each update adds
    up the gradients of as many consecutive micro-batches, one from each replica.
    """
    stage, kind, microbatch = action
    if kind == "F":
        return [_new_message(("activation", stage - 1, microbatch))] if stage > 0 else []
    if kind == "W":
        return [_new_message(("gradient", stage, microbatch))]
    if kind == "U":
        return [_new_message(("gradient", stage, k)) for k in update_group(microbatch, replicas)]
    own = _new_message(("activation", stage, microbatch))
    if stage == num_stages - 1:
        return [own]
    return [own, _new_message(("gradient", stage + 1, microbatch))]


def update_group(microbatch, replicas):
    """The micro-batches whose gradients go into the same update of a stage with replicas."""
    first = microbatch - microbatch % replicas
    return range(first, first + replicas)


@dataclass(frozen=True)
class Schedule:
    """`orders[rank]` is the tuple of actions that the rank takes, in order.

    A stage belongs to one rank. In an asynchronous schedule it may be replicated on several, which
    take its micro-batches in turn and update their copies together (PipeDream's 1F1B-RR: Narayanan
    et al. 2019, section 3.2). Several equal pipelines side by side are one schedule, too, in which
    every micro-batch has one rank for each stage (see replicas.py).
    """

    name: str
    orders: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self):
        return len(self.orders)

    @cached_property
    def num_stages(self):
        return 1 + max(action.stage for order in self.orders for action in order)

    @cached_property
    def num_microbatches(self):
        return 1 + max(action.microbatch for order in self.orders for action in order)

    @cached_property
    def kinds(self):
        """The letters of all kinds of action in it, as a set."""
        return {action.kind for order in self.orders for action in order}

    @cached_property
    def rank_of_passage(self):
        """{(stage, micro-batch): rank} for every stage and micro-batch."""
        return {
            (stage, microbatch): rank
            for rank, order in enumerate(self.orders)
            for stage, _, microbatch in order
        }

    def rank_of(self, stage, microbatch):
        """Return the rank on which a micro-batch passes a stage."""
        return self.rank_of_passage[stage, microbatch]

    @cached_property
    def ranks_of_stage(self):
        """The ranks of every stage, as a dictionary of tuples: one, or the replicas in turn."""
        ranks = {}
        for stage, microbatch in sorted(self.rank_of_passage):
            ranks.setdefault(stage, {})[self.rank_of(stage, microbatch)] = None
        return {stage: tuple(found) for stage, found in ranks.items()}

    def stages_of(self, rank):
        """Return the stages of a rank, in order."""
        return sorted({action.stage for action in self.orders[rank]})

    @cached_property
    def pairs(self):
        """The ordered pairs of ranks that exchange messages."""
        return sorted({(route.source, route.destination) for route in self.messages})

    def needs_of(self, action):
        """The messages that must exist before `action` can start."""
        replicas = len(self.ranks_of_stage[action.stage]) if action.kind == "U" else 1
        return needs_of(action, self.num_stages, replicas)

    @cached_property
    def playable_order(self):
        """All actions as (rank, action, needs), each after everything it needs.

        Raises ScheduleError if the schedule deadlocks before its end.
        """
        return _play(self)

    def routes_after(self, action):
        """The Routes of the messages that `action` sends to other ranks: here one or none."""
        message = message_of(action)
        if message is None:
            return []
        consumer_stage = action.stage + (1 if message.what == "activation" else -1)
        if not 0 <= consumer_stage < self.num_stages:
            return []
        source = self.rank_of(action.stage, action.microbatch)
        destination = self.rank_of(consumer_stage, action.microbatch)
        if source == destination:
            return []
        return [Route(message, source, destination, consumer_stage)]

    @cached_property
    def places(self):
        """{action: (when it ends, its rank)}, by DURATIONS and with messages that take no time.

        It is the action's place in the one order of messages: see receives.py.
        """
        free, made, places = [0] * self.num_ranks, {}, {}
        for rank, action, needs in self.playable_order:
            start = max(free[rank], *(made[need] for need in needs), 0)
            free[rank] = made[message_of(action)] = start + DURATIONS[action.kind]
            places[action] = free[rank], rank
        return places

    @cached_property
    def actions_before(self):
        """{message: for each rank, how many of its actions are known to have ended when it is sent}.

        A rank counts its own actions, and takes over the counts of the sender of each message.
        """
        known = [(0,) * self.num_ranks] * self.num_ranks
        before = {}
        for rank, action, needs in self.playable_order:
            counts = [max(found) for found in zip(known[rank], *(before[need] for need in needs))]
            counts[rank] += 1
            known[rank] = before[message_of(action)] = tuple(counts)
        return before

    @cached_property
    def placed_messages(self):
        """(place, Route) of every message, sorted by the places of the actions that make them."""
        places = self.places.items()
        return sorted((place, route) for a, place in places for route in self.routes_after(a))

    @property
    def messages(self):
        """The Route of every message, in the one order."""
        return [route for _, route in self.placed_messages]


def _play(schedule):
    """Advance each rank until it has to wait, then the ranks that wait for its results.

    Linear in the number of actions.
    """
    played = []
    done = set()
    waiting = {}  # message -> ranks that wait for it
    step = [0] * schedule.num_ranks
    ready = deque(range(schedule.num_ranks))
    while ready:
        rank = ready.popleft()
        order = schedule.orders[rank]
        while step[rank] < len(order):
            action = order[step[rank]]
            needs = schedule.needs_of(action)
            missing = [need for need in needs if need not in done]
            if missing:
                waiting.setdefault(missing[0], []).append(rank)
                break
            played.append((rank, action, needs))
            step[rank] += 1
            message = message_of(action)
            done.add(message)
            if message in waiting:
                ready.extend(waiting.pop(message))
    stuck = [rank for rank, order in enumerate(schedule.orders) if step[rank] < len(order)]
    if stuck:
        raise ScheduleError(_explain_deadlock(schedule, step, waiting, stuck))
    return played


def _explain_deadlock(schedule, step, waiting, stuck):
    needed = {rank: message for message, ranks in waiting.items() for rank in ranks}
    made_by = {message_of(a): rank for rank, order in enumerate(schedule.orders) for a in order}

    def waits(rank):
        what, stage, microbatch = needed[rank]
        pass_ = "forward" if what == "activation" else "backward"
        return (
            f"rank {rank} cannot take step {step[rank]} ({schedule.orders[rank][step[rank]]}) "
            f"before the {pass_} of micro-batch {microbatch} on stage {stage}"
        )

    for rank in stuck:
        if needed[rank] not in made_by:
            return f"{waits(rank)}, which no rank takes"
    # Follow the waits until a rank comes up twice: the ranks from there on are the cycle.
    chain = [stuck[0]]
    while chain.count(chain[-1]) < 2:
        chain.append(made_by[needed[chain[-1]]])
    cycle = chain[chain.index(chain[-1]) : -1]
    sentences = [
        f"{waits(rank)}, which rank {made_by[needed[rank]]} still has ahead of it" for rank in cycle
    ]
    return "deadlock: " + "; ".join(sentences)
