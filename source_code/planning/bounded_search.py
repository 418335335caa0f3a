# SPDX-License-Identifier: Apache-2.0
"""Searches for the shortest schedule within a time limit, with a lower bound on all schedules.

The search first simulates every named schedule; the shortest one that fits is the one to beat. The
exact search then looks for a shorter schedule until the time limit. The bound holds even if the
time limit ends the search: no schedule with these stages on these ranks and within this room is
shorter.

Measured costs have many digits, and the search would treat two states as different if only their
last digits differ. It therefore uses costs that are rounded *down* to a grid. A shorter action
makes no schedule longer, so the shortest makespan on the grid is a lower bound of the true one.
"""

import math
from dataclasses import replace
from typing import NamedTuple

from lab.simulator import simulate
from pipeline.schedule import Schedule, ScheduleError
from pipeline.schedules import SCHEDULES, build_schedule, synchronous_schedules
from planning.exact_search import Problem, best_schedule, bound_of, first_moment

STEPS = 60  # grid steps in the longest action, if costs are rounded


class Question(NamedTuple):
    """The input of a search; see Problem in exact_search.py. `costs` is a Costs with lists."""

    rank_of_stage: tuple
    num_microbatches: int
    costs: object
    split: bool = False
    room: tuple | None = None
    until_weight: bool = False

    @property
    def num_ranks(self):
        return 1 + max(self.rank_of_stage)


class Answer(NamedTuple):
    """The shortest schedule found, its makespan, and a lower bound on all makespans.

    `known` maps each named schedule that fits to its makespan. `moments` is the number of states
    that the exact search visited.
    """

    schedule: Schedule | None
    makespan: float
    bound: float
    known: dict
    moments: int

    @property
    def proven(self):
        return self.makespan <= self.bound * (1 + 1e-9)

    @property
    def distance(self):
        """By how much the makespan exceeds the bound, as a fraction of the bound."""
        return max(0.0, self.makespan / self.bound - 1)


def search(question, seconds=10.0, name="found"):
    """The Answer found within `seconds`. Its schedule is None if none that fits was found."""
    true = problem_of(question, question.costs)
    rounded, unit = on_grid(question)
    played = {one.name: (simulate(one, question.costs), one) for one in known_schedules(question)}
    known = {title: timeline.makespan for title, (timeline, _) in played.items()}
    best = min(known, key=known.get, default=None)
    schedule = played[best][1] if best else None
    makespan = known[best] if best else math.inf
    bound = bound_of(true, first_moment(true))
    below = min((simulate(one, rounded).makespan for _, one in played.values()), default=math.inf)
    found = best_schedule(problem_of(question, rounded), name, 10**12, below, seconds)
    if found is None:
        return Answer(schedule, makespan, bound, known, 0)
    if found.proven:
        bound = max(bound, min(found.makespan * unit, makespan))
    if found.schedule is not None:
        length = simulate(found.schedule, question.costs).makespan
        if length < makespan:
            schedule, makespan = found.schedule, length
    return Answer(schedule, makespan, bound, known, found.moments)


def problem_of(question, costs):
    shape = question.rank_of_stage, question.num_microbatches
    return Problem(*shape, costs, question.split, question.room, question.until_weight)


def on_grid(question):
    """(Costs in whole numbers of a unit, rounded down; the unit)."""
    costs, stages = question.costs, range(len(question.rank_of_stage))
    weights = costs.backward_weight or [0.0] * len(stages)
    inputs = [whole - weight for whole, weight in zip(costs.backward, weights)]
    hops = list(costs.transfer.values())
    unit = unit_of([*costs.forward, *inputs, *weights, *hops])

    def down(values):
        return [math.floor(value / unit + 1e-9) for value in values]

    weight = down(weights)
    backward = [first + second for first, second in zip(down(inputs), weight)]
    transfer = dict(zip(costs.transfer, down(hops)))
    given = weight if costs.backward_weight else None
    return replace(
        costs, forward=down(costs.forward), backward=backward, backward_weight=given,
        transfer=transfer,
    ), unit  # fmt: skip


def unit_of(values):
    """A coarse unit that divides all values, or the largest value over STEPS if there is none."""
    thousandths = [round(1000 * value) for value in values]
    exact = all(abs(whole - 1000 * value) < 1e-6 for whole, value in zip(thousandths, values))
    common = math.gcd(*thousandths)
    if exact and common and max(thousandths) / common <= 10 * STEPS:
        return common / 1000
    return max(values) / STEPS


def known_schedules(question):
    """Every named synchronous schedule that has these stages on these ranks and fits the room."""
    p, m, stages = question.num_ranks, question.num_microbatches, len(question.rank_of_stage)
    for name in synchronous_schedules():
        if (SCHEDULES[name].chunks is None) != (stages == p):
            continue
        try:
            chunks = stages // p if SCHEDULES[name].chunks else None
            schedule = build_schedule(name, p, m, chunks)
            if fits(schedule, question):
                yield schedule
        except ScheduleError:
            continue


def fits(schedule, question):
    """Whether a schedule has the question's stages and kinds of backward, and fits its room."""
    if not question.split and schedule.kinds & {"I", "W"}:
        return False
    if schedule.num_stages != len(question.rank_of_stage):
        return False
    places = tuple(schedule.rank_of(stage, 0) for stage in range(schedule.num_stages))
    if places != tuple(question.rank_of_stage):
        return False
    timeline = simulate(schedule, question.costs)
    until_weight = question.until_weight
    held = timeline.peak_held_until_weight_per_rank if until_weight else timeline.peak_held_per_rank
    room = question.room or [math.inf] * question.num_ranks
    return all(most <= limit for most, limit in zip(held, room))
