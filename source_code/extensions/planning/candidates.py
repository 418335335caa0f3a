"""All plans that use every GPU of a machine, and the forecasts of the best.

Candidates are compared by a lower bound, which needs no schedule, and only the most promising are
played by the simulator. A plan with a bound above the forecast of the tenth best is not the best.
"""

from dataclasses import replace

from extensions.planning.bound import lower_bound, memory_bound
from extensions.planning.forecast import forecast
from extensions.planning.training_plan import Plan, balanced_cut
from pipeline.schedule import ScheduleError
from pipeline.schedules import SCHEDULES


def pipelines_over_nodes(model, machine, schedules, base=None, chunk_counts=(2, 3, 4)):
    """Plans with each layer shared by the GPUs of a node, and the pipeline across the nodes.

    `base` has the settings that all share, such as the micro-batch and recomputation.
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
    """The forecasts of those `plans` that fit and exist, the fastest first.

    With `count` only the best are played: as many as have a bound below the `count`th forecast.
    """
    fit = [plan for plan in plans if memory_bound(model, machine, plan) <= machine.memory]
    found = []
    for plan in sorted(fit, key=lambda one: lower_bound(model, machine, one)):
        if count and len(found) >= count:
            if lower_bound(model, machine, plan) >= sorted(one.update for one in found)[count - 1]:
                break
        try:
            found.append(forecast(model, machine, plan))
        except ScheduleError:  # such as interleaving with m not a multiple of p
            continue
    return sorted(found, key=lambda one: one.update)[:count]
