# SPDX-License-Identifier: Apache-2.0
"""Explains a forecast: its seconds in parts, the limiting part, and the effect of changes."""

from dataclasses import replace

from pipeline.schedule import ScheduleError
from planning.bound import memory_bound
from planning.candidates import sharded
from planning.forecast import forecast, play, stage_costs
from planning.machine import Link
from planning.training_plan import balanced_cut

NO_LINK = Link(1e30, 0.0)


def parts_of(model, machine, found):
    """{what: seconds} of a Forecast; the seconds add up to its update.

    "work" is the computation of an average rank. "heaviest rank" is what the rank with the most
    work computes beyond that. "idle" is the time of filling and draining if messages take no time.
    """
    plan = found.plan
    costs = stage_costs(model, machine, plan)
    alone = replace(machine, inside=NO_LINK, between=NO_LINK)
    work, quiet = (rank_work(model, plan, one) for one in (costs, stage_costs(model, alone, plan)))
    average, unsent = sum(work) / plan.ranks, sum(quiet) / plan.ranks
    timeline, more, _ = play(model, plan, replace(costs, transfer=0.0, occupancy=0.0))
    free = timeline.makespan + more
    end = found.update - found.reduction - found.optimizer
    return {
        "work": unsent,
        within_layers(plan): average - unsent,
        "heaviest rank": max(work) - average,
        "idle": free - max(work),
        "messages between stages": end - free,
        "sums of gradients": found.reduction,
        "optimizer": found.optimizer,
    }


def rank_work(model, plan, costs):
    """Seconds of computation of each rank in an update."""
    each = zip(costs.forward, costs.backward, costs.recompute)
    of_stage = [plan.microbatches(model) * sum(times) for times in each]
    return [sum(of_stage[stage] for stage in plan.stages_of(rank)) for rank in range(plan.ranks)]


def within_layers(plan):
    """The name of the messages within the forward and backward of a layer."""
    return "messages within layers" if plan.tensor > 1 else "gathers of sharded weights"


def limit_in_words(model, machine, found):
    """The limit with its share of the update, and before it the work where that is more."""
    parts = parts_of(model, machine, found)
    limit, work = limit_of(model, machine, found, parts), parts.pop("work")
    if limit.startswith("work"):
        return limit
    most = max(parts.values())
    return f"{'work, then ' * (work > most)}{limit} ({most / found.update:.0%})"


def limit_of(model, machine, found, parts=None):
    """The largest part of the update except work, in a few words; "work" if all are below 1%."""
    parts = dict(parts or parts_of(model, machine, found))
    del parts["work"]
    largest = max(parts, key=parts.get)
    if parts[largest] < 0.01 * found.update:
        return "work"
    if largest == "heaviest rank":
        work = rank_work(model, found.plan, stage_costs(model, machine, found.plan))
        return f"work of rank {work.index(max(work))}"
    if largest == "messages between stages":
        plan = found.plan
        hops = [(rank, rank + 1) for rank in range(plan.ranks - 1)]
        far = next((hop for hop in hops if plan.is_far(machine, *hop)), hops[0])
        return f"link of ranks {far[0]} and {far[1]}"
    return largest


def changes(model, machine, plan):
    """Yield (change, Forecast, bytes on the fullest GPU) for each plan that is one step away."""
    steps = {}
    sizes = (plan.microbatch // 2, plan.microbatch * 2)
    for size in () if model.known_sizes else sizes:
        if size and model.batch // plan.replicas % size == 0:
            steps[f"micro-batches of {size}"] = replace(plan, microbatch=size)
    other = "none" if plan.recompute == "full" else "full"
    steps["layers recomputed" if other == "full" else "nothing recomputed"] = replace(
        plan, recompute=other
    )
    shared = ("hybrid",) if plan.replicas_in_node(machine) > 1 else ()  # by replicas in a node
    for sharding in ("none", "optimizer", *shared, "full"):
        if plan.replicas > 1 and sharding != plan.sharding:
            steps[f"sharding {sharding}"] = sharded(plan, sharding)
    if plan.ranks > 1:
        for name, chunks in (("1f1b", 1), ("interleaved-1f1b", 2), ("zb-h1", 1)):
            if name != plan.schedule and chunks * plan.ranks <= model.layers:
                cut = balanced_cut(model, chunks * plan.ranks) if plan.cut else ()
                shape = {"schedule": name, "chunks": chunks, "cut": cut}
                steps[f"schedule {name}"] = replace(plan, **shape)
        even = replace(plan, cut=())
        if even.layers_of(model) != plan.layers_of(model):
            steps["an even cut"] = even
    for what, changed in steps.items():
        try:
            yield what, forecast(model, machine, changed), memory_bound(model, machine, changed)
        except ScheduleError:
            continue
