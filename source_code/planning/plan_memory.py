# SPDX-License-Identifier: Apache-2.0
"""How many bytes each rank of a plan needs: weights, gradients, optimizer, activations.

For the course's own models counted_memory.py counts the bytes, which equal the measured ones. The
papers' formulas give them for other models, and if a tensor group shares the layers or replicas
share the weights. Not counted are the memory of CUDA and NCCL themselves, messages in transit, and
the gaps of an allocator.
"""

from functools import lru_cache

from extensions.real_models.saved_part import SavedSettings
from pipeline.model import ModelConfig, cut_as
from pipeline.schedules import build_schedule
from planning.counted_memory import predict_memory
from planning.known_models import is_of_the_course
from planning.microbatches_held import held_by
from planning.profiled import ProfiledModel, kept_per_stage
from planning.transformer import (
    BYTES_PER_VALUE,
    deferred_by_loss,
    deferred_bytes,
    kept_by_loss,
    kept_bytes,
)

TIGHT = 0.9  # of the memory; one in eighteen of the published runs needs more than that
USABLE = 0.9  # of a measured machine's memory; the rest is for its other programs
STATE_BYTES = 12  # per 16-bit weight: 32-bit copy, mean, mean of squares; a wider one has no copy
# Schedules whose backwards have two halves.
SPLIT = ("zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe-v")
FLUSHED = ("gpipe", "looped-bfs")  # all forwards run first, so all losses are held
ROUNDS = 4  # rounds of p micro-batches, after which no other schedule holds more


def usable(machine, gigabytes=None):
    """Bytes that a plan may need of a GPU: the given gigabytes, or those it is sold with.

    A GPU with "80 GB" has more: torch reports 79.15 GiB of an A100 and 79.10 GiB of an H100, which
    are 85 GB. The rest is left to CUDA, NCCL and the gaps of the allocator.
    """
    if gigabytes:
        return gigabytes * 1e9
    return USABLE * machine.memory if machine.measured else machine.memory


def weights_of(model, plan, stages):
    """The number of weights that a GPU with these stages (a list of indices) computes with."""
    return model.stage_weights(plan.layers_of(model), stages) / plan.tensor


def shard_group(machine, plan):
    """The number of replicas over which the weights are sharded."""
    sharing = {"full": plan.replicas, "hybrid": plan.replicas_in_node(machine)}
    return sharing.get(plan.sharding, 1)


def memory_per_rank(model, machine, plan):
    """Bytes of each rank of a pipeline: weights, gradients, optimizer, activations, losses."""
    if is_of_the_course(model) and plan.kernels == "plain" and plan.gradient_bytes == 4:
        if plan.tensor == 1 and plan.sharding in ("none", "optimizer"):
            return [sum(parts) for parts in memory_by_counting(model, machine, plan)]
    if isinstance(model, ProfiledModel):
        return memory_of_profile(model, machine, plan)
    return memory_by_formulas(model, machine, plan)


def memory_of_profile(model, machine, plan):
    """Bytes of each rank from a profile; layers keep activations until a whole backward has run."""
    kept, at_work = kept_per_stage(model, plan)
    held = held_by(plan.schedule, plan.ranks, plan.chunks, plan.microbatches(model))
    found = []
    for rank in range(plan.ranks):
        stages = plan.stages_of(rank)
        weights = weights_of(model, plan, stages)
        largest = max(kept[stage] for stage in stages)
        working = max(at_work[stage] for stage in stages)
        states = state_bytes(machine, plan, weights, model.bytes_per_value)
        found.append(states + held[rank] * largest + working)
    return found


def state_bytes(machine, plan, weights, value):
    """Bytes per GPU of weights of `value` bytes each, with gradients and optimizer, as sharded."""
    group = shard_group(machine, plan)
    shared = plan.sharding in ("optimizer", "gradients")
    state_group = plan.replicas if shared else group
    gradient_group = plan.replicas if plan.sharding == "gradients" else group
    gradient = plan.gradient_bytes if value == 2 else value
    states = STATE_BYTES if value == 2 else 2 * value
    kept = value / (group if plan.reshard else 1)
    return weights * (kept + gradient / gradient_group + states / state_group)


def memory_by_counting(model, machine, plan):
    """(weights, gradients, optimizer, activations) in bytes per rank, for the course's model."""
    m, p = plan.microbatches(model), plan.ranks
    few = min(m, ROUNDS * p)
    heads, kv_heads = model.head_count, model.kv_heads or model.head_count
    config = ModelConfig(
        model.layers, model.hidden, heads, kv_heads, model.length, model.vocabulary
    )
    if model.norms_in_float32:
        widths = {"head_dim": config.head_dim, "hidden_dim": config.hidden_dim}
        config = SavedSettings(**vars(config), **widths)
    mode = "layer" if plan.recompute == "full" else plan.recompute
    rest = plan.chunks, tuple(plan.layers_of(model)), plan.microbatch, machine.bytes_per_value, mode
    rest += (plan.replicas if plan.sharding == "optimizer" else 1,)
    counted = _counted(config, plan.schedule, p, few, *rest)
    if m == few or plan.schedule not in FLUSHED:
        return counted
    fewer = _counted(config, plan.schedule, p, few - 1, *rest)  # a further one adds as much
    return [
        (*one[:3], one[3] + (m - few) * (one[3] - less[3])) for one, less in zip(counted, fewer)
    ]


@lru_cache(maxsize=20_000)
def _counted(config, schedule, p, m, chunks, cut, rows, width, mode, shards):
    orders = build_schedule(schedule, p, m, chunks)
    further = {"recompute": mode, "shards": shards}
    ranks = predict_memory(config, orders, cut_as(cut), rows, width, **further)
    return [(one.weights, one.gradients, one.optimizer, one.activations) for one in ranks]


def memory_by_formulas(model, machine, plan):
    """Bytes of each rank for any model, tensor group and sharding, by the papers' formulas."""
    layers = plan.layers_of(model)
    group = shard_group(machine, plan)
    kernels = plan.fused_attention, plan.sequence_parallel, plan.kernels, plan.precision
    kept = kept_bytes(model, plan.microbatch, plan.tensor, plan.recompute, *kernels)
    at_work = kept_bytes(model, plan.microbatch, plan.tensor, "none", *kernels)
    if plan.sequence_parallel:  # two gathered inputs and their gradients
        whole = BYTES_PER_VALUE * plan.microbatch * model.length * model.hidden
        at_work += 4 * whole * (plan.tensor - 1) / plan.tensor
    loss = kept_by_loss(model, plan.microbatch, plan.tensor, plan.loss_in_pieces)
    value = machine.bytes_per_value
    wider = value / BYTES_PER_VALUE
    kept, at_work, loss = kept * wider, at_work * wider, loss * wider
    deferred = wider * deferred_bytes(model, plan.microbatch, plan.tensor) / kept
    shape = plan.schedule, plan.ranks, plan.chunks, plan.microbatches(model)
    held, each = held_by(*shape, deferred), state_bytes(machine, plan, 1, value)
    found = []
    for rank in range(plan.ranks):
        stages = plan.stages_of(rank)
        states = weights_of(model, plan, stages) * each
        if group > 1:  # two whole layers: one in use, one in transit
            states += (
                2 * (BYTES_PER_VALUE + plan.gradient_bytes) * model.layer_weights / plan.tensor
            )
        own = max(layers[stage] for stage in stages)
        activations = held[rank] * own * kept
        own_loss = loss if len(layers) - 1 in stages else 0.0
        if own_loss and plan.schedule in SPLIT and plan.chunks == 1:
            again = plan.recompute == "full"  # then the scores exist only in a backward
            whole = own * kept + (0.0 if again else loss)
            later = deferred_by_loss(model, plan.microbatch, plan.tensor)
            later = (own * deferred * kept + wider * later) / whole
            activations = held_by(*shape, later)[rank] * whole
            activations += at_work - kept + loss if again else 0.0
        elif plan.recompute == "full":  # one layer at a time; on the last stage also the loss
            activations += at_work - kept + own_loss
            activations -= kept * held[rank] if stages == [0] else 0.0  # its input is tokens
        else:
            activations += own_loss * (held[rank] // plan.chunks if plan.schedule in FLUSHED else 1)
        found.append(states + activations)
    return found
