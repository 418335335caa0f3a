"""Data, sharded, tensor or pipeline parallelism: what each asks of a GPU, on paper.

All GPUs are used in one way at a time, or as replicas of a pipeline. Counted are the bytes that a
GPU keeps, the bytes that it sends in a step, the bubble, and the seconds of a step if no message
hides behind computing: an upper bound, since all four hide some. Sizes in bytes, times in seconds.

Model and Machine are those of forecast.py, with its coarse costs; layers keep their input and
recompute the rest. "Megatron" is Narayanan et al. 2021, arXiv 2104.04473.
"""

import math
from typing import NamedTuple

from extensions.planning.forecast import (
    BYTES_PER_PARAMETER,
    BYTES_PER_VALUE,
    batch_time,
    bubble_of_replicas,
)


class Way(NamedTuple):
    """One way to use all GPUs of a machine."""

    name: str
    memory: float  # bytes on a GPU
    sent: float  # bytes that a GPU sends in a step
    bubble: float  # idle over busy
    seconds: float  # of a step
    problem: str  # why it cannot be done, or ""


def ways(model, machine, microbatch=1):
    """The four pure ways, as a list of Way."""
    n = machine.gpus
    return [
        data_parallel(model, machine, microbatch),
        sharded(model, machine, microbatch),
        tensor_parallel(model, machine, microbatch),
        pipelines(model, machine, 1, microbatch, f"pipeline of {n}"),
    ]


def mixes(model, machine, microbatch=1):
    """Replicas x stages: every way to cut the GPUs into equal pipelines."""
    n = machine.gpus
    counts = [count for count in range(1, n + 1) if n % count == 0]
    return [pipelines(model, machine, count, microbatch) for count in counts]


def data_parallel(model, machine, microbatch=1):
    """Every GPU has the whole model; gradients are summed once a step, around a ring."""
    n, weights = machine.gpus, model.parameters
    sent = 2 * (n - 1) / n * BYTES_PER_VALUE * weights
    memory = BYTES_PER_PARAMETER * weights + kept(model, model.layers, microbatch)
    return way("data parallel", model, machine, memory, sent, problem=too_small(model, n))


def sharded(model, machine, microbatch=1):
    """FSDP: every GPU keeps 1/n of everything and gathers a layer's weights when it is their turn.

    Weights are gathered for the forward and again for the backward of each piece of a GPU's share of
    the batch, and gradients are scattered once. The pieces are as few as the memory allows, and not
    smaller than `microbatch`.
    """
    n, weights = machine.gpus, model.parameters
    layer = 2 * BYTES_PER_VALUE * weights / model.layers  # one at work, the next on its way
    least = BYTES_PER_PARAMETER * weights / n + layer
    share = max(model.batch // n, 1)
    room = (machine.memory - least) // kept(model, model.layers, 1)
    piece = max(microbatch, min(share, int(room)))
    pieces = max(1, math.ceil(share / piece))
    sent = (2 * pieces + 1) * (n - 1) / n * BYTES_PER_VALUE * weights
    memory = least + kept(model, model.layers, piece)
    return way("sharded", model, machine, memory, sent, problem=too_small(model, n))


def tensor_parallel(model, machine, microbatch=1):
    """All GPUs share every layer: 8 b s h (t - 1)/t values a layer (Megatron section 3.2)."""
    t = machine.gpus
    values = 8 * model.batch * model.length * model.hidden * (t - 1) / t * model.layers
    memory = BYTES_PER_PARAMETER * model.parameters / t + kept(model, model.layers, microbatch)
    return way("tensor parallel", model, machine, memory, BYTES_PER_VALUE * values)


def pipelines(model, machine, replicas, microbatch=1, name=None):
    """`replicas` pipelines with 1F1B: b s h values each way a micro-batch (Megatron section 3.2)."""
    n = machine.gpus
    ranks = n // replicas
    name = name or f"{replicas} x {ranks}"
    m = model.batch // (replicas * microbatch)
    sent = 0.0
    if ranks > 1:  # an activation to the next rank, a gradient to the one before
        sent += 2 * m * microbatch * model.length * model.hidden * BYTES_PER_VALUE
    if replicas > 1:
        sent += 2 * (replicas - 1) / replicas * BYTES_PER_VALUE * model.parameters / ranks
    held = min(ranks, max(m, 1)) * microbatch
    memory = BYTES_PER_PARAMETER * model.parameters / ranks
    memory += kept(model, model.layers / ranks, held)
    problem = too_small(model, replicas)
    if ranks > model.layers:
        problem = f"{model.layers} layers are too few for {ranks} stages"
    bubble = bubble_of_replicas(n, replicas, model.batch, microbatch)
    action = model.flops_per_update / (machine.flops * n) / max(m, 1)
    busy = batch_time(model.batch, replicas, microbatch, ranks, action / 4, 3 * action / 4)
    return way(name, model, machine, memory, sent, bubble, busy, problem)


def way(name, model, machine, memory, sent, bubble=0.0, busy=None, problem=""):
    """Put a Way together: the time of its messages, and whether it fits."""
    inside = machine.gpus <= machine.gpus_per_node
    bandwidth = machine.bandwidth_in_node if inside else machine.bandwidth
    if busy is None:
        busy = model.flops_per_update / (machine.flops * machine.gpus)
    if not problem and memory > machine.memory:
        problem = f"{memory / 1e9:.0f} GB do not fit"
    return Way(name, memory, sent, bubble, busy + sent / bandwidth, problem)


def kept(model, layers, sequences):
    """Bytes of the inputs of so many layers for so many sequences."""
    return BYTES_PER_VALUE * layers * sequences * model.length * model.hidden


def too_small(model, replicas):
    return f"a batch of {model.batch} for {replicas} replicas" if replicas > model.batch else ""
