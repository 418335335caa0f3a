# SPDX-License-Identifier: Apache-2.0
"""Lower bounds on the seconds of an update, and the memory of a plan, without a simulation.

A search compares thousands of plans, too many to simulate all of them. The bound never exceeds the
forecast. It equals the forecast if messages take no time and ranks idle only while the pipeline
fills and drains. The memory is that of the forecast: it needs only the number of micro-batches that
each rank of a schedule holds (microbatches_held.py).
"""

from functools import lru_cache

from planning.forecast import exposed_reduction, optimizer_time, stage_costs
from planning.microbatches_held import held_by
from planning.plan_memory import SPLIT, memory_per_rank
from planning.stage_times import stages_of


def work_bound(model, machine, plan):
    """Seconds until the last rank has computed its share of an update, if messages took no time.

    Before its first forward a rank waits for those of the earlier stages, and after its last
    backward these still run theirs.
    """
    forwards, backwards, _, again = stages_of(model, machine, plan).seconds()
    whole = [sum(times) for times in zip(forwards, backwards, again)]
    m, longest, others = plan.microbatches(model), 0.0, 0.0
    for rank in range(plan.ranks):  # its first stage has the same number
        work = m * sum(whole[stage] for stage in plan.stages_of(rank))
        longest = max(longest, others + work)
        others += forwards[rank] if plan.schedule in SPLIT else whole[rank]
    return longest


@lru_cache(maxsize=200_000)
def lower_bound(model, machine, plan):
    """A lower bound on the seconds of an update, whatever the order of the plan's actions.

    A rank cannot start before the first input of its first stage has arrived. After the last
    backward of a rank, the earlier stages still run theirs. Between these two times
    - the rank runs all its actions;
    - its link to the next rank carries all its messages;
    - the rank holds each of its m micro-batches for at least a time t, the trip from its stage to
      the last stage and back. It holds at most h of them at a time, so all of them take at least m
      t/h.
    """
    costs = stage_costs(model, machine, plan)
    m, longest = plan.microbatches(model), 0.0
    pairs = [(plan.rank_of(stage), plan.rank_of(stage + 1)) for stage in range(plan.stages - 1)]
    occupied = [costs.occupied_by(*pair) for pair in pairs]
    hop = [costs.between(*pair) + served for pair, served in zip(pairs, occupied)] + [0.0]
    split = plan.schedule in SPLIT
    backwards = [one + again for one, again in zip(costs.backward, costs.recompute)]
    needed = [one - weight for one, weight in zip(backwards, costs.backward_weight)]
    needed = needed if split else backwards  # what the previous stage waits for
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


@lru_cache(maxsize=200_000)
def memory_bound(model, machine, plan):
    """Bytes on the fullest GPU."""
    return max(memory_per_rank(model, machine, plan))
