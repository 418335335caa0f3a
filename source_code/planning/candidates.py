# SPDX-License-Identifier: Apache-2.0
"""All plans that use every GPU of a machine, and the forecasts of the fastest.

Candidates are compared by lower bounds, which need no simulation: first by `work_bound`, then by
`lower_bound`. Only the plans with the lowest bounds that fit into memory are simulated.
"""

import heapq
import math
from dataclasses import replace
from functools import lru_cache
from itertools import islice, product
from typing import NamedTuple

from files.inputs import InputError
from pipeline.schedule import ScheduleError
from pipeline.schedules import SCHEDULES
from planning.bound import lower_bound, memory_bound, work_bound
from planning.forecast import forecast
from planning.known_models import is_of_the_course
from planning.training_plan import Plan, balanced_cut

SIZES = (1, 2, 4, 8, 16, 32)  # sequences per micro-batch
CHUNKS = (2, 3, 4, 5, 6, 8)
# Not planned: looped-bfs, which holds as much as gpipe and is as idle as interleaved-1f1b; and
# dualpipe-v, which pays off only for models with experts, and no plan covers them.
PLANNED = ("1f1b", "gpipe", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min")

DEEPEST = 128  # ranks of a pipeline: the work to write v-half and v-min grows with the square
MOST_SIMULATED = 200  # plans of a search
MOST_PLANS = 150_000  # of one model on one machine, compared in a minute or two


class Search(NamedTuple):
    """The best forecasts, the fastest first, and how many plans were compared to find them."""

    best: list
    compared: int
    proven: bool  # whether no plan without a simulation can be among the best


def search_plans(model, machine, plans, count=8):
    """A Search for the `count` fastest of `plans` that fit into memory.

    At most MOST_SIMULATED plans are simulated: those with the lowest `lower_bound`. The plans are
    bounded in the order of `work_bound`, the lowest first. If the work bound of the next plan
    reaches the largest bound of the plans that are kept, no later plan can be among them.
    """
    by_work = [
        (work_bound(model, machine, plan), number, plan) for number, plan in enumerate(plans)
    ]
    kept = []  # a heap of (- bound, number, plan), so that the greatest bound is first
    for work, number, plan in sorted(by_work):
        if len(kept) == MOST_SIMULATED and work >= -kept[0][0]:
            break
        if memory_bound(model, machine, plan) <= machine.memory:
            entry = -lower_bound(model, machine, plan), number, plan
            (heapq.heappush if len(kept) < MOST_SIMULATED else heapq.heappushpop)(kept, entry)
    if not kept:
        return Search([], len(by_work), True)
    best = forecasts(model, machine, [plan for _, _, plan in kept], count)
    proven = len(kept) < MOST_SIMULATED or (len(best) == count and best[-1].update <= -min(kept)[0])
    return Search(best, len(by_work), proven)


def all_plans(model, machine, precision="bf16"):
    """Every Plan that uses all GPUs and suits the model's layers, heads and batch.

    The plans vary in replicas, stages, tensor group, schedule, chunks, micro-batch, cut,
    recomputation, sharding, and in what fills a node. Their memory is not checked. A pipeline has
    at most DEEPEST ranks.
    """
    kernels = "plain" if is_of_the_course(model) and precision == "bf16" else "fused"
    shared = {"kernels": kernels, "precision": precision}
    for tensor in divisors(min(machine.gpus, machine.gpus_per_node)):
        groups = machine.gpus // tensor
        if model.head_count % tensor or machine.gpus % tensor:
            continue
        for ranks in divisors(groups):
            replicas = groups // ranks
            if ranks > min(model.layers, DEEPEST) or model.batch % replicas:
                continue
            base = Plan(ranks=ranks, replicas=replicas, tensor=tensor, **shared)
            for shape in shapes(model, base):
                yield from shardings(machine, shape)


def plans_to_compare(model, machine, precision):
    """A list of `all_plans`. Raises InputError if comparing them would take more than minutes."""
    plans = list(islice(all_plans(model, machine, precision=precision), MOST_PLANS + 1))
    if len(plans) > MOST_PLANS:
        raise InputError(
            f"--gpus {machine.gpus} and --batch-size {model.batch} have so many divisors that there "
            f"are more than {MOST_PLANS:,} plans; use a number with fewer, such as a power of 2"
        )
    return plans


def check_precision(precision, model, machine):
    """Raise InputError if nothing says how fast this machine computes in this precision."""
    if precision == "fp8" and model.known_sizes:
        raise InputError("--precision fp8: a profile has the times of its own precision; use bf16")
    if precision == "fp8" and not machine.fp8_flops:
        raise InputError(
            "--precision fp8: this machine's file has no 'fp8_teraflops'; use bf16, or a machine "
            "such as dgx-h100"
        )


@lru_cache(maxsize=10_000)
def divisors(number):
    """All divisors, the smallest first."""
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return tuple(sorted({*small, *(number // one for one in small)}))


def shapes(model, plan):
    """Variants of the plan: every schedule, chunks, micro-batch, recomputation and cut."""
    orders = [("1f1b", 1)]
    if plan.ranks > 1:
        orders = [pair for name in PLANNED for pair in chunked(model, plan, name)]
    sizes = [
        size for size in model.known_sizes or SIZES if model.batch // plan.replicas % size == 0
    ]
    modes = ("none", "operator", "full") if plan.kernels == "fused" else ("none", "full")
    for (name, chunks), size, recompute in product(orders, sizes, modes):
        rounds = model.batch // plan.replicas // size
        if name == "interleaved-1f1b" and rounds % plan.ranks:
            continue  # the number of its micro-batches must be a multiple of the ranks
        shape = {"schedule": name, "chunks": chunks, "microbatch": size, "recompute": recompute}
        even = replace(plan, **shape)
        cut = balanced_cut(model, even.stages)
        yield replace(even, cut=cut)
        if list(cut) != even.layers_of(model):
            yield even


def chunked(model, plan, name):
    """(name, chunks) for each number of chunks that the schedule and the model allow."""
    generator = SCHEDULES[name]
    counts = CHUNKS if generator.chunks else (1,)
    if generator.fixed_chunks:
        counts = (generator.chunks,)
    return [(name, count) for count in counts if count * plan.ranks <= model.layers]


def shardings(machine, plan):
    """Variants of the plan: every sharding that makes a difference, and every order of ranks."""
    kinds = ["none"]
    if plan.replicas > 1:
        kinds += ["optimizer"]
        if plan.kernels == "fused":
            kinds += ["gradients"]
        if plan.schedule in ("1f1b", "interleaved-1f1b"):  # each action gathers
            kinds += ["full"] if plan.replicas == plan.replicas_in_node(machine) else []
            kinds += ["full", "hybrid"] if plan.replicas > machine.gpus_per_node else []
    several = plan.tensor < machine.gpus_per_node < machine.gpus  # groups in a node, and nodes
    varied = several and plan.replicas > 1 < plan.ranks
    orders = ("stages", "replicas") if varied else ("stages",)
    for sharding, neighbours in product(dict.fromkeys(kinds), orders):
        yield replace(sharded(plan, sharding), neighbours=neighbours)


def sharded(plan, sharding):
    """The plan with another sharding; ZeRO-1 scatters gradients, but not in the course's script."""
    scatters = sharding == "optimizer" and plan.kernels == "fused"
    return replace(plan, sharding=sharding, scatters=scatters)


def pipelines_over_nodes(model, machine, schedules, base=None, chunk_counts=(2, 3, 4)):
    """Plans with tensor parallelism inside each node and a pipeline across the nodes.

    `base` is a Plan with the settings that all plans share, such as micro-batch and recomputation.
    """
    tensor = min(machine.gpus, machine.gpus_per_node)
    groups = machine.gpus // tensor
    base = replace(base or Plan(), tensor=tensor)
    for ranks in range(1, groups + 1):
        replicas = groups // ranks
        if groups % ranks or ranks > model.layers or model.batch % (replicas * base.microbatch):
            continue
        for name in schedules:
            for chunks in chunk_counts if SCHEDULES[name].chunks and ranks > 1 else (1,):
                if ranks * chunks <= model.layers and (chunks > 1 or not SCHEDULES[name].chunks):
                    cut = balanced_cut(model, ranks * chunks)
                    shape = {"ranks": ranks, "chunks": chunks, "replicas": replicas, "cut": cut}
                    yield replace(base, schedule=name, **shape)


def forecasts(model, machine, plans, count=None):
    """The Forecasts of those `plans` that fit into memory and whose schedule exists, fastest first.

    Of those that take the same time, the one with the fewest bytes is first. With `count` only the
    `count` fastest are returned, and a plan is simulated only if its bound is below the `count`th
    fastest forecast so far.
    """
    fit = [plan for plan in plans if memory_bound(model, machine, plan) <= machine.memory]
    found = []
    fit.sort(key=lambda one: memory_bound(model, machine, one))  # the leanest of equals is played
    for plan in sorted(fit, key=lambda one: lower_bound(model, machine, one)):
        if count and len(found) >= count:
            if lower_bound(model, machine, plan) >= sorted(one.update for one in found)[count - 1]:
                break
        try:
            found.append(forecast(model, machine, plan))
        except ScheduleError:  # such as interleaved 1F1B if m is not a multiple of p
            continue
    return sorted(found, key=lambda one: (one.update, one.memory))[:count]
