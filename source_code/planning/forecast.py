# SPDX-License-Identifier: Apache-2.0
"""Forecasts one update on a large machine: its seconds, where they go, and its memory.

Each stage has its own forward and backward times: matrix products at the machine's rate, all other
operations at its memory speed, sums within layers that GPUs share, and head and loss on the last
stage. The simulator plays the schedule with these times and the time of each message. The part of
the gradient sums that no backward hides, and the optimizer, are added at the end.

Times are in seconds, sizes in bytes. transformer.py and traffic.py name the sources of the counts.
"""

from dataclasses import dataclass
from functools import lru_cache

from lab.simulator import Costs, simulate
from pipeline.schedules import build_schedule
from planning.closed_forms import SECONDS_PER_DAY
from planning.plan_memory import SPLIT, memory_per_rank, shard_group, weights_of
from planning.profiled import ProfiledModel, activation_bytes, stage_times
from planning.time_coefficients import (
    embedding_quantities,
    head_quantities,
    layer_quantities,
)
from planning.traffic import all_reduce_time, gather_time, message_costs
from planning.training_plan import Plan
from planning.transformer import (
    BYTES_PER_VALUE,
    logit_bytes,
    passing_bytes,
    score_bytes,
)

OPTIMIZER_PASS = 60  # bytes per weight that unscaling, the norm, clipping and AdamW read and write
STEADY = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min")
RECOMPUTED_PRODUCTS = 0.45  # of a layer's products: every second, see transformer.py
TENSORS_PER_LAYER = 9  # of a layer of the course's own model
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

    def rate(self, model, recomputed=False):
        """Operations per second and GPU from end to end: the rate that papers publish.

        With `recomputed` the second forward counts as work, as in the tables of Megatron-LM 2021.
        """
        flops = model.flops_per_update if recomputed else model.model_flops
        return flops / self.plan.gpus / self.update

    def tokens_per_second(self, model):
        return model.batch * model.length / self.update

    def utilisation(self, model, machine):
        """MFU: model operations per second over the peak of the data sheet."""
        return self.rate(model) / machine.peak


def forecast(model, machine, plan):
    """The Forecast of a plan. Raises ScheduleError where its schedule does not exist."""
    timeline, more, ideal = play(model, machine, plan)
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


def play(model, machine, plan):
    """(Timeline, seconds that it leaves out, the largest busy time of a rank in the whole update).

    In a steady phase each round of p micro-batches takes as long as the round before. If a schedule
    has such a phase, only rounds with about PLAYED actions are simulated, and each further round
    counts as long as the last simulated one. With uneven stages the steady phase may begin late.
    """
    m, p = plan.microbatches(model), plan.ranks
    costs = stage_costs(model, machine, plan)
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
    """The Costs of a plan for the simulator. The last stage includes the head and the loss."""
    if isinstance(model, ProfiledModel):
        return with_shards(model, machine, plan, *profiled_times(model, plan))
    if machine.measured:
        return measured_costs(model, machine, plan)
    forward, given, weight, again = layer_times(model, machine, plan)
    layers = plan.layers_of(model)
    forwards = [count * forward for count in layers]
    backwards = [count * (given + weight) for count in layers]
    weights = [count * weight for count in layers]
    recomputed = [count * again for count in layers]
    for times, more in zip((forwards, backwards, weights), head_times(model, machine, plan)):
        times[-1] += more
    return with_shards(model, machine, plan, forwards, backwards, weights, recomputed)


def with_shards(model, machine, plan, forwards, backwards, weights, recomputed):
    """These times and all messages as Costs; times include the gathers of sharded weights."""
    layers = plan.layers_of(model)
    if plan.sharding in ("gradients", "hybrid", "full"):
        for stage, (gathering, scattering) in enumerate(shard_times(model, machine, plan)):
            again = plan.sharding != "gradients" and plan.reshard
            gathering = gathering if again else 0.0
            forwards[stage] += exposed_by(machine, forwards[stage], gathering, layers[stage])
            work = backwards[stage] + recomputed[stage]
            backwards[stage] += exposed_by(machine, work, gathering + scattering, layers[stage])
    return Costs(
        forwards, backwards, weights, recompute=recomputed, **all_hops(model, machine, plan)
    )


def profiled_times(model, plan):
    """(forwards, backwards, their parts for the weights, second forwards), a list by stage each."""
    forwards, backwards, again = stage_times(model, plan)
    return forwards, backwards, [one / 2 for one in backwards], again


def all_hops(model, machine, plan):
    """Latency and occupancy of all pairs of ranks that exchange activations, as arguments of Costs."""
    messages = {}
    for stage in range(plan.stages - 1):
        for pair in both_ways(plan.rank_of(stage), plan.rank_of(stage + 1)):
            costs = hop_costs(model, machine, plan, *pair, stage)
            messages[pair] = max(costs, messages.get(pair, costs))
    return {
        "transfer": {pair: costs[0] for pair, costs in messages.items()},
        "occupancy": {pair: costs[1] for pair, costs in messages.items()},
    }


def measured_costs(model, machine, plan):
    """Costs for the simulator on a machine that was measured: see time_coefficients.py."""
    b, split = plan.microbatch, plan.schedule in SPLIT
    times = {kind: [] for kind in "FBIW"}
    again = []
    for stage, layers in enumerate(plan.layers_of(model)):
        quantities = {"action": 1, **layer_quantities(model, b, layers)}
        inside = layer_quantities(model, b, layers)
        if stage == 0:
            quantities |= embedding_quantities(model, b)
        if stage == plan.stages - 1:
            quantities |= head_quantities(model, b)
        messages = machine.measured.message * message_ends(plan, stage)
        for kind, column in times.items():
            seconds = machine.measured.seconds(kind, quantities)
            column.append(seconds + (0.0 if kind == "W" else messages))
        again.append(machine.measured.seconds("F", inside) if plan.recompute == "full" else 0.0)
    whole, weights = times["B"], [one / 2 for one in times["B"]]
    if split:
        weights = times["W"]
        whole = [one + other for one, other in zip(times["I"], weights)]
    hops = all_hops(model, machine, plan)
    return Costs(times["F"], whole, weights, recompute=again, **hops)


def message_ends(plan, stage):
    """How many messages a forward of a stage receives and sends; a backward has as many."""
    neighbours = [other for other in (stage - 1, stage + 1) if 0 <= other < plan.stages]
    return sum(plan.rank_of(other) != plan.rank_of(stage) for other in neighbours)


def both_ways(one, other):
    return [(one, other), (other, one)] if one != other else []


def exposed_by(machine, work, messages, layers):
    """Seconds of `messages` that `work` does not hide: a fraction of them, or what is longer.

    The messages of the first layer have no work to overlap with.
    """
    longest = work * (1 - 1 / max(layers, 1))
    return messages - min(machine.hidden * messages * (1 - 1 / max(layers, 1)), longest)


def layer_times(model, machine, plan):
    """(forward, backward for the input, backward for the weights, recomputed forward) of a layer.

    Seconds of one micro-batch. A backward has two products for each product of the forward, and
    fused attention recomputes its scores (FlashAttention). The forward and the backward have two
    sums over the tensor group each.
    """
    if machine.measured:
        return measured_layer_times(model, machine.measured, plan)
    kernels = plan.fused_attention, plan.sequence_parallel
    shape = plan.microbatch, plan.tensor, plan.recompute, plan.precision, plan.overlapped_tensor
    return _layer_times(model, machine, *shape, *kernels)


def measured_layer_times(model, measured, plan):
    """The four times of `layer_times` on a machine that was measured."""
    quantities = layer_quantities(model, plan.microbatch)
    forward, whole, first, weight = (measured.seconds(kind, quantities) for kind in "FBIW")
    again = forward if plan.recompute == "full" else 0.0
    if plan.schedule in SPLIT:
        return forward, first, weight, again
    return forward, whole / 2, whole / 2, again


@lru_cache(maxsize=10_000)
def _layer_times(model, machine, b, t, recompute, precision, overlapped, flash, parallel):
    rate = machine.fp8_flops if precision == "fp8" else machine.flops
    products = 2 * b * model.length * model.layer_matrices / t / rate
    scores = model.score_flops(b) / t
    scores /= 2 * machine.attention_flops if flash else machine.flops  # flash: half of all pairs
    softmax = score_bytes(model, b, t, flash) / machine.memory_speed
    passing = passing_bytes(model, b, t, parallel) / machine.memory_speed
    activation = BYTES_PER_VALUE * b * model.length * model.hidden
    sums = 2 * all_reduce_time(machine, activation, t, min(t, machine.gpus_per_node))
    sums *= 1 - machine.hidden if overlapped else 1
    forward = products + scores + softmax + passing + sums
    given = products + scores * (2.5 if flash else 2) + 2 * (softmax + passing) + sums
    again = {"none": 0.0, "selective": 0 if flash else scores + softmax, "full": forward}
    again["operator"] = RECOMPUTED_PRODUCTS * products + passing + sums / 2
    return forward, given, products, again[recompute]


def head_times(model, machine, plan):
    """(forward, backward, its part for the weights) of head and loss: seconds of one micro-batch."""
    if machine.measured:
        quantities = head_quantities(model, plan.microbatch)
        forward, whole, weight = (machine.measured.seconds(kind, quantities) for kind in "FBW")
        return forward, whole, weight
    product = model.head_flops(plan.microbatch) / plan.tensor / machine.flops
    loss = logit_bytes(model, plan.microbatch, plan.tensor) / machine.memory_speed / 2
    return product + loss, 2 * product + loss, product


def hop_costs(model, machine, plan, source, destination, stage):
    """(latency, occupancy) in seconds of a message after `stage`: an activation or its gradient."""
    size = machine.bytes_per_value * plan.microbatch * model.length * model.hidden
    if isinstance(model, ProfiledModel):
        size = activation_bytes(model, plan, stage)
    far = plan.is_far(machine, source, destination)
    return message_costs(machine, size, far, plan.tensor, plan.senders(machine))


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
    the plan scatters its gradients: such a program gathers beside the first forwards.
    """
    sums = reduction_time(model, machine, plan, plan.stages_of(rank))
    overlap = plan.overlap and not machine.measured  # measured: one message per stage
    hidden = last_backward * (1 - 1 / model.layers) if overlap else 0.0
    gathers = regathering_time(model, machine, plan, plan.stages_of(rank))
    if plan.scatters:
        return max(sums + gathers - min(machine.hidden * (sums + gathers), 2 * hidden), 0.0)
    return max(sums - hidden, 0.0) + gathers


def reduction_time(model, machine, plan, stages):
    """Seconds that the sums of a rank's gradients over the replicas take, once per update."""
    inside, copies = plan.replicas_in_node(machine), plan.replicas
    weights = weights_of(model, plan, stages)
    if plan.sharding in ("gradients", "full") or copies == 1:
        return 0.0  # already scattered, or nothing to sum
    if machine.measured:
        return machine.measured.sum + machine.measured.sum_byte * 4 * weights
    if plan.sharding == "hybrid":
        size = plan.gradient_bytes * weights / inside
        return all_reduce_time(machine, size, copies // inside, 1)
    times = 1 if plan.scatters else 2  # an all-reduce is a reduce-scatter and an all-gather
    return times * gather_time(machine, plan.gradient_bytes * weights, copies, inside)


def regathering_time(model, machine, plan, stages):
    """Seconds of gathering the updated weights, if the replicas share an optimizer."""
    once = plan.sharding in ("optimizer", "gradients") or not plan.reshard
    if not once or plan.replicas == 1:
        return 0.0
    weights = weights_of(model, plan, stages)
    if machine.measured:  # an all-gather takes half of an all-reduce
        return (machine.measured.sum + machine.measured.sum_byte * 4 * weights) / 2
    inside = plan.replicas_in_node(machine)
    return gather_time(machine, BYTES_PER_VALUE * weights, plan.replicas, inside)


def optimizer_time(model, machine, plan):
    """Seconds of the update on the rank with the most weights."""
    shared = plan.sharding in ("optimizer", "gradients")
    group = plan.replicas if shared else shard_group(machine, plan)
    most = max(weights_of(model, plan, plan.stages_of(rank)) for rank in range(plan.ranks))
    if machine.measured:
        one = machine.measured
        tensors = TENSORS_PER_LAYER * model.layers / plan.ranks
        return (
            one.update + one.update_tensor * tensors + one.update_weight * most / group + one.step
        )
    return OPTIMIZER_PASS * most / group / machine.memory_speed
