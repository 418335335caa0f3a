# SPDX-License-Identifier: Apache-2.0
"""Compares data, sharded, hybrid, tensor and pipeline parallelism on a given machine.

Each of them is compared at its best settings: size of a micro-batch, recomputation, 1F1B or
interleaved 1F1B, and whether the stages or the replicas of a pipeline fill a node. The seconds are
those of forecast.py: a message takes the time of the link that it crosses, a ring enters and leaves
each node once, and messages that can overlap with computation do.
"""

from dataclasses import replace
from itertools import product
from typing import NamedTuple

from planning.bound import memory_bound
from planning.bytes_sent import bytes_per_gpu, bytes_per_node
from planning.candidates import forecasts
from planning.forecast import forecast
from planning.training_plan import Plan, balanced_cut


class Way(NamedTuple):
    """One way to use all GPUs of a machine, at its best."""

    name: str
    plan: Plan
    memory: float  # bytes on the fullest GPU
    sent: float  # bytes that a GPU sends in an update
    leaving: float  # bytes that leave a node in an update
    idle: float  # fraction of the schedule's time in which a GPU waits
    seconds: float  # of an update
    problem: str  # why it cannot be done, or ""


def ways(model, machine):
    """A list of Way: the whole model on each GPU or node, then pipelines, the longest first."""
    n, node = machine.gpus, min(machine.gpus, machine.gpus_per_node)
    whole = {"data parallel": Plan(replicas=n), "sharded": Plan(replicas=n, sharding="full")}
    if n > node:
        whole["hybrid"] = Plan(replicas=n, sharding="hybrid")
        tensor = Plan(tensor=node, replicas=n // node, sharding="full")
        whole[f"tensor {node}, sharded"] = tensor
        whole[f"tensor {node}, {n // node} stages"] = Plan(tensor=node, ranks=n // node)
    else:
        whole[f"tensor {node}"] = Plan(tensor=node)
    found = [best(model, machine, name, plan) for name, plan in whole.items()]
    for ranks in range(n, 1, -1):
        if n % ranks == 0:
            plan = Plan(ranks=ranks, replicas=n // ranks)
            found.append(best(model, machine, f"{n // ranks} x {ranks}", plan))
    return found


def best(model, machine, name, plan):
    """The fastest Way with the plan's replicas, stages and tensor group that fits into memory.

    If there is none, the `problem` of the returned Way tells why.
    """
    problem = cannot(model, machine, plan)
    if problem:
        return Way(name, plan, 0.0, 0.0, 0.0, 0.0, float("inf"), problem)
    plans = list(settings(model, plan))
    fastest = forecasts(model, machine, plans, 1)
    if fastest:
        return as_way(name, model, machine, fastest[0])
    smallest = min(plans, key=lambda one: memory_bound(model, machine, one))
    found = forecast(model, machine, smallest)
    return as_way(name, model, machine, found, f"{found.memory / 1e9:.0f} GB do not fit")


def as_way(name, model, machine, found, problem=""):
    sent = bytes_per_gpu(model, machine, found.plan)
    leaving = bytes_per_node(model, machine, found.plan)
    return Way(name, found.plan, found.memory, sent, leaving, found.idle, found.update, problem)


def settings(model, plan):
    """Variants of the plan: every number of chunks, micro-batch, recomputation, order of ranks."""
    share = model.batch // plan.replicas
    sizes = [size for size in (1, 2, 4, 8, 16, 32) if share % size == 0]
    orders = ("stages", "replicas") if plan.ranks > 1 and plan.replicas > 1 else ("stages",)
    chunk_counts = [1]
    if plan.ranks > 1:
        chunk_counts += [v for v in (2, 4) if model.layers >= v * plan.ranks]
    for v, size, recompute, order in product(chunk_counts, sizes, ("none", "full"), orders):
        if v > 1 and share // size % plan.ranks:
            continue  # interleaved 1F1B needs a multiple of the number of ranks
        yield replace(
            plan,
            schedule="1f1b" if v == 1 else "interleaved-1f1b",
            chunks=v,
            microbatch=size,
            recompute=recompute,
            neighbours=order,
            cut=balanced_cut(model, plan.ranks * v),
        )


def cannot(model, machine, plan):
    """Why a plan cannot be carried out, whatever the memory, or ""."""
    n, node = machine.gpus, machine.gpus_per_node
    if n > node and n % node and (plan.tensor > 1 or plan.sharding == "hybrid"):
        return f"{n} GPUs do not fill nodes of {node}"
    if model.batch % plan.replicas:
        return f"a batch of {model.batch} for {plan.replicas} replicas"
    if plan.ranks > model.layers:
        return f"{model.layers} layers are too few for {plan.ranks} stages"
    return ""
