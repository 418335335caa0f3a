# SPDX-License-Identifier: Apache-2.0
"""Forecasts one update on a large machine: its seconds, where they go, and its memory.

Each stage has its own forward and backward times, from stage_times.py. The simulator plays the
schedule with these times and the time of each message. The part of the gradient sums that no
backward hides, and the optimizer, are added at the end.

Times are in seconds, sizes in bytes. transformer.py and traffic.py name the sources of the counts.
"""

from dataclasses import dataclass
from functools import lru_cache

from lab.simulator import Costs, simulate
from pipeline.schedules import build_schedule
from planning.closed_forms import SECONDS_PER_DAY
from planning.plan_memory import memory_per_rank, shard_group, weights_of
from planning.stage_times import stages_of
from planning.traffic import gather_time, message_costs
from planning.training_plan import Plan

STEADY = ("1f1b", "gpipe", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min")
ROUNDS = 4  # rounds of p micro-batches until the steady phase, if stages are even
PLAYED = 2000  # actions


@dataclass(frozen=True)
class Forecast:
    """What a plan costs: seconds per update, where they go, bytes on the fullest GPU."""

    plan: Plan
    update: float
    memory: float
    bubble_over_ideal: float
    reduction: float  # seconds of `update` for sums of gradients and gathers that nothing hides
    optimizer: float

    def days(self, model, tokens):
        """Days to train on `tokens` tokens."""
        return tokens / (model.batch * model.length) * self.update / SECONDS_PER_DAY

    def tokens_per_second(self, model):
        return model.batch * model.length / self.update

    @property
    def idle(self):
        """The fraction of the schedule's time in which an average rank waits."""
        return max(0.0, self.bubble_over_ideal / (1 + self.bubble_over_ideal))

    def utilisation(self, model, machine):
        """MFU: model operations per second over the peak of the data sheet."""
        return model.model_flops / self.plan.gpus / self.update / machine.peak


def forecast(model, machine, plan):
    """The Forecast of a plan. Raises ScheduleError if its schedule does not exist."""
    timeline, more, ideal = play(model, plan, stage_costs(model, machine, plan))
    end = timeline.makespan
    for rank, events in enumerate(timeline.by_rank):
        last = next(event for event in reversed(events) if event.action.kind in "BW")
        exposed = exposed_reduction(model, machine, plan, rank, last.end - last.start)
        end = max(end, last.end + exposed)
    updating = optimizer_time(model, machine, plan)
    return Forecast(
        plan,
        end + more + updating,
        max(memory_per_rank(model, machine, plan)),
        (timeline.makespan + more) / ideal - 1,
        end - timeline.makespan,
        updating,
    )


def play(model, plan, costs):
    """(Timeline, seconds that it leaves out, the largest busy time of a rank in the whole update).

    In a steady phase each round of p micro-batches takes as long as the round before. If a schedule
    has such a phase, only rounds with about PLAYED actions are simulated, and each further round
    counts as long as the last simulated one. With uneven stages the steady phase may begin late.
    """
    m, p = plan.microbatches(model), plan.ranks
    few = p * max(ROUNDS, PLAYED // (2 * plan.stages * p)) + m % p
    if m <= few + p or plan.schedule not in STEADY:
        timeline = simulate(known_schedule(plan.schedule, p, m, plan.chunks), costs)
        return timeline, 0.0, timeline.ideal
    shorter, timeline = (
        simulate(known_schedule(plan.schedule, p, count, plan.chunks), costs)
        for count in (few, few + p)
    )
    more = (m - few - p) / p * (timeline.makespan - shorter.makespan)
    return timeline, more, timeline.ideal * m / (few + p)


known_schedule = lru_cache(maxsize=64)(build_schedule)  # plans that are compared share schedules


def stage_costs(model, machine, plan):
    """The Costs of a plan for the simulator. The last stage includes the head and the loss.

    Times include the gathers of sharded weights.
    """
    stages = stages_of(model, machine, plan)
    forwards, backwards, weights, recomputed = stages.seconds()
    layers = plan.layers_of(model)
    if plan.sharding in ("gradients", "hybrid", "full"):
        for stage, (gathering, scattering) in enumerate(shard_times(model, machine, plan)):
            again = plan.sharding != "gradients" and plan.reshard
            gathering = gathering if again else 0.0
            forwards[stage] += exposed_by(machine, forwards[stage], gathering, layers[stage])
            work = backwards[stage] + recomputed[stage]
            backwards[stage] += exposed_by(machine, work, gathering + scattering, layers[stage])
    return Costs(forwards, backwards, weights, recompute=recomputed, **all_hops(stages))


def all_hops(stages):
    """Latency and occupancy of all pairs of ranks that exchange activations, as arguments of Costs."""
    machine, plan, messages = stages.machine, stages.plan, {}
    for stage in range(plan.stages - 1):
        for pair in both_ways(plan.rank_of(stage), plan.rank_of(stage + 1)):
            far = plan.is_far(machine, *pair)
            size = stages.message_bytes(stage)
            costs = message_costs(machine, size, far, plan.tensor, plan.senders(machine))
            messages[pair] = max(costs, messages.get(pair, costs))
    return {
        "transfer": {pair: costs[0] for pair, costs in messages.items()},
        "occupancy": {pair: costs[1] for pair, costs in messages.items()},
    }


def both_ways(one, other):
    return [(one, other), (other, one)] if one != other else []


def exposed_by(machine, work, messages, layers):
    """Seconds of `messages` that `work` does not hide: a fraction, or what outlasts the work.

    The messages of the first layer have no work to overlap with.
    """
    longest = work * (1 - 1 / max(layers, 1))
    return messages - min(machine.hidden * messages * (1 - 1 / max(layers, 1)), longest)


def shard_times(model, machine, plan):
    """[gather of the weights, scatter of the gradients] of each stage, in seconds.

    Each is the total over the layers, which are sent one by one.
    """
    group = plan.replicas if plan.sharding == "gradients" else shard_group(machine, plan)
    inside = min(plan.replicas_in_node(machine), group)
    times = []
    for stage, layers in enumerate(plan.layers_of(model)):
        pieces = max(layers, 1)
        weights = weights_of(model, plan, [stage]) / pieces
        sizes = (plan.gathered_bytes * weights, plan.gradient_bytes * weights)
        times.append([pieces * gather_time(machine, size, group, inside) for size in sizes])
    return times


def exposed_reduction(model, machine, plan, rank, last_backward):
    """Seconds of a rank's collectives after the backwards that its last backward does not hide.

    Gradients are ready layer by layer, so all sums except that of the last layer can overlap with
    it. The gather of updated weights, if replicas share an optimizer, overlaps with nothing, unless
    the plan scatters its gradients: such a program gathers during the next forwards.
    """
    stages = stages_of(model, machine, plan)
    weights = weights_of(model, plan, plan.stages_of(rank))
    summed = plan.replicas > 1 and plan.sharding not in ("gradients", "full")  # those scatter
    sums = stages.summing(weights) if summed else 0.0
    once = plan.sharding in ("optimizer", "gradients") or not plan.reshard
    gathers = stages.gathering(weights) if once and plan.replicas > 1 else 0.0
    overlap = plan.overlap and stages.sums_by_layer
    hidden = last_backward * (1 - 1 / model.layers) if overlap else 0.0
    if plan.scatters:
        return max(sums + gathers - min(machine.hidden * (sums + gathers), 2 * hidden), 0.0)
    if plan.sharding == "hybrid":
        hidden = min(machine.hidden * sums, hidden)
    return max(sums - hidden, 0.0) + gathers


def optimizer_time(model, machine, plan):
    """Seconds of the update on the rank with the most weights."""
    shared = plan.sharding in ("optimizer", "gradients")
    group = plan.replicas if shared else shard_group(machine, plan)
    most = max(weights_of(model, plan, plan.stages_of(rank)) for rank in range(plan.ranks))
    return stages_of(model, machine, plan).updating(most / group)
