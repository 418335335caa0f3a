"""Planning on paper: how long a large model trains on so many GPUs, and with which schedule.

The closed forms are those of Megatron-LM (Narayanan et al. 2021, arXiv 2104.04473, "Megatron"
below). What they leave out, the latency of messages and how chunks and memory play together, the
course's simulator adds. Times are in seconds, sizes in bytes.

The model of costs is coarse on purpose, and says so: every GPU computes at one constant rate, all
layers cost the same, activations are recomputed in the backward, gradients are averaged between
the replicas after the last backward, and nothing overlaps with a transfer but other micro-batches.
"""

import math
from dataclasses import dataclass, replace

from lab.simulator import Costs, simulate
from pipeline.schedule import ScheduleError
from pipeline.schedules import SCHEDULES, build_schedule

BYTES_PER_PARAMETER = 16  # 16-bit weight and gradient, 32-bit weight, mean and mean of squares
BYTES_PER_VALUE = 2  # of an activation or a gradient that travels
SECONDS_PER_DAY = 86_400


@dataclass(frozen=True)
class Model:
    """A GPT as Megatron counts it; `batch` is in sequences an update."""

    layers: int
    hidden: int
    length: int = 2048
    vocabulary: int = 51_200
    batch: int = 1536

    @property
    def parameters(self):
        """Megatron equation 2."""
        l, h, v, s = self.layers, self.hidden, self.vocabulary, self.length  # noqa: E741
        return 12 * l * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * l * h))

    @property
    def flops_per_update(self):
        """Megatron equation 3; a second forward, for recomputed activations, is in it."""
        l, h, v, s = self.layers, self.hidden, self.vocabulary, self.length  # noqa: E741
        return 96 * self.batch * s * l * h**2 * (1 + s / (6 * h) + v / (16 * l * h))


@dataclass(frozen=True)
class Machine:
    """GPUs in nodes. `flops` is what one GPU reaches, not what its data sheet says."""

    gpus: int
    flops: float = 140e12
    memory: float = 80e9
    bandwidth: float = 25e9  # bytes a second of one GPU to another node
    latency: float = 10e-6  # of a message
    gpus_per_node: int = 8
    bandwidth_in_node: float = 300e9  # bytes a second of one GPU to another one of its node


@dataclass(frozen=True)
class Plan:
    """How GPUs are used: `tensor` x `ranks` x `replicas` of them, and the schedule."""

    schedule: str
    ranks: int  # stages are ranks x chunks
    chunks: int
    replicas: int
    tensor: int  # GPUs that share every layer (tensor parallelism), within a node
    microbatch: int = 1  # sequences

    def microbatches(self, model):
        return model.batch // (self.replicas * self.microbatch)


@dataclass(frozen=True)
class Forecast:
    """What a plan costs: seconds an update, bytes on the fullest GPU, and where the time goes."""

    plan: Plan
    update: float
    memory: float
    bubble_over_ideal: float
    averaging: float  # seconds of `update` in which replicas average their gradients

    def days(self, model, tokens):
        """To train on so many tokens."""
        return tokens / (model.batch * model.length) * self.update / SECONDS_PER_DAY


def training_days(parameters, tokens, gpus, flops):
    """Megatron equation 4: 8 T P / (n X), for large models; `flops` is X, reached by one GPU."""
    return 8 * tokens * parameters / (gpus * flops) / SECONDS_PER_DAY


def bubble_over_ideal(ranks, microbatches, chunks=1):
    """Megatron sections 2.2.1 and 2.2.2: (p - 1)/(v m)."""
    return (ranks - 1) / (chunks * microbatches)


def bubble_of_replicas(gpus, replicas, batch, microbatch=1):
    """Megatron section 3.3.1, without tensor parallelism: (n - d)/(B/b)."""
    return (gpus - replicas) / (batch / microbatch)


def batch_time(batch, replicas, microbatch, ranks, forward, backward):
    """Megatron equation 1: (B/(d b) + p - 1)(t_f + t_b)."""
    return (batch / (replicas * microbatch) + ranks - 1) * (forward + backward)


def forecast(model, machine, plan):
    """A Forecast from the simulator. Raises ScheduleError where the schedule does not exist."""
    m = plan.microbatches(model)
    schedule = build_schedule(plan.schedule, plan.ranks, m, plan.chunks)
    stages = schedule.num_stages
    compute = model.flops_per_update / (plan.tensor * plan.replicas * machine.flops) / m / stages
    values = plan.microbatch * model.length * model.hidden  # of one layer's input
    transfer = 0.0
    if plan.ranks > 1:
        # The GPUs that share a layer share the message, too (Megatron section 4.1).
        transfer = machine.latency + BYTES_PER_VALUE * values / plan.tensor / machine.bandwidth
    # A forward is a quarter of the work: the backward recomputes one and costs two more.
    timeline = simulate(schedule, Costs(compute / 4, 3 * compute / 4, transfer=transfer))
    share = model.parameters / (plan.tensor * plan.ranks)
    averaging = 0.0
    if plan.replicas > 1:  # around a ring: each sends and receives all but its own part, twice
        rounds = 2 * (plan.replicas - 1) / plan.replicas
        averaging = rounds * BYTES_PER_VALUE * share / machine.bandwidth
    held = max(timeline.peak_held_per_rank) * math.ceil(model.layers / stages)
    return Forecast(
        plan,
        timeline.makespan + averaging,
        share * BYTES_PER_PARAMETER + held * BYTES_PER_VALUE * values,
        timeline.bubble_over_ideal,
        averaging,
    )


def candidates(model, machine, schedules, chunk_counts=(2, 3, 4)):
    """The plans that use all GPUs and cut layers and batch evenly, tensor parallel in a node."""
    tensor = min(machine.gpus, machine.gpus_per_node)
    groups = machine.gpus // tensor
    for ranks in range(1, groups + 1):
        if groups % ranks or model.layers % ranks or model.batch % (groups // ranks):
            continue
        plan = Plan("1f1b", ranks, 1, groups // ranks, tensor)
        for name in schedules:
            for chunks in chunk_counts if SCHEDULES[name].chunks else (1,):
                if model.layers % (ranks * chunks) == 0 and (chunks == 1 or ranks > 1):
                    yield replace(plan, schedule=name, chunks=chunks)


def forecasts(model, machine, schedules=("gpipe", "1f1b", "interleaved-1f1b")):
    """The forecasts of all candidates whose weights fit, the fastest first.

    With what they hold for backwards some may still need more memory than a GPU has.
    """
    found = []
    for plan in candidates(model, machine, schedules):
        weights = BYTES_PER_PARAMETER * model.parameters / (plan.tensor * plan.ranks)
        if weights > machine.memory:
            continue
        try:
            found.append(forecast(model, machine, plan))
        except ScheduleError:  # such as interleaving with m not a multiple of p
            continue
    return sorted(found, key=lambda one: one.update)
