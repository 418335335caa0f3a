"""What a plan takes at least, and what it needs, without playing its schedule.

A search looks at thousands of plans. The bound is exact where messages are free and the schedule
has no other gap than filling and draining; it is never more than the forecast. Memory is the
forecast's own, by the formulas for how many micro-batches a schedule holds.
"""

from functools import lru_cache

from extensions.planning.forecast import (
    exposed_reduction,
    head_times,
    layer_times,
    optimizer_time,
    stage_costs,
)
from extensions.planning.held import held_by
from extensions.planning.plan_memory import SPLIT, memory_per_rank
from extensions.planning.profiled import ProfiledModel, seconds_of_all_layers


def work_bound(model, machine, plan):
    """Seconds of computing in an update, spread evenly over the ranks: below every other bound."""
    if isinstance(model, ProfiledModel):
        return plan.microbatches(model) * seconds_of_all_layers(model, plan) / plan.ranks
    layers = model.layers * sum(layer_times(model, machine, plan))
    head = sum(head_times(model, machine, plan)[:2])
    return plan.microbatches(model) * (layers + head) / plan.ranks


@lru_cache(maxsize=200_000)
def lower_bound(model, machine, plan):
    """Seconds of an update that no order of a plan's actions falls below.

    A rank can start when its first stage's first input is there, and after its last backward the
    stages before it still have theirs. In between
    - it has all its actions to do;
    - its link to the next rank has all their messages to serve;
    - it holds at most so many micro-batches, each for at least its way to the last stage and back:
      so many of them, times that way, over how many there are at a time.
    """
    costs = stage_costs(model, machine, plan)
    m, longest = plan.microbatches(model), 0.0
    pairs = [(plan.rank_of(stage), plan.rank_of(stage + 1)) for stage in range(plan.stages - 1)]
    occupied = [costs.occupied_by(*pair) for pair in pairs]
    hop = [costs.between(*pair) + served for pair, served in zip(pairs, occupied)] + [0.0]
    split = plan.schedule in SPLIT
    backwards = [one + again for one, again in zip(costs.backward, costs.recompute)]
    needed = [one - weight for one, weight in zip(backwards, costs.backward_weight)]
    needed = needed if split else backwards  # of a backward, before the stage before can go on
    return_trip = [0.0] * (plan.stages + 1)
    for stage in reversed(range(plan.stages)):
        way = costs.forward[stage] + needed[stage] + (2 * hop[stage])
        return_trip[stage] = way + return_trip[stage + 1]
    held = held_by(plan.schedule, plan.ranks, plan.chunks, m)
    for rank in range(plan.ranks):
        stages = plan.stages_of(rank)
        first = stages[0]
        ahead = sum(costs.forward[:first]) + sum(hop[:first])
        after = sum(needed[:first]) + sum(hop[:first])
        work = m * sum(costs.forward[stage] + backwards[stage] for stage in stages)
        exposed = exposed_reduction(model, machine, plan, rank, backwards[first])
        longest = max(longest, ahead + work + max(0.0 if split else after, exposed))
        serving = m * sum(occupied[stage] for stage in stages if stage < plan.stages - 1)
        waiting = m * sum(return_trip[stage] for stage in stages) / held[rank]
        longest = max(longest, ahead + max(serving, waiting) + after)
    return longest + optimizer_time(model, machine, plan)


def memory_bound(model, machine, plan):
    """Bytes on the fullest GPU."""
    return max(memory_per_rank(model, machine, plan))
