"""How many bytes each rank of a plan needs: weights, gradients, optimizer, activations.

For the course's own models this is what footprint.py counts, which equals the measured bytes; here
tensor groups and sharding are counted, too. Not counted: what CUDA and NCCL take for themselves,
messages on their way, and the gaps of an allocator.
"""

from extensions.planning.held import held_by
from extensions.planning.transformer import (
    BYTES_PER_VALUE,
    deferred_by_loss,
    deferred_bytes,
    kept_by_loss,
    kept_bytes,
)

STATE_BYTES = 12  # per weight: 32-bit weight, mean, mean of squares
STATE_BYTES_WHOLE = 8  # the same where the weights themselves have 32 bits
# Schedules whose backwards have two halves.
SPLIT = ("zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe-v")
FLUSHED = ("gpipe", "looped-bfs")  # all forwards first, so that all losses wait


def weights_of(model, plan, stages):
    """How many weights a GPU computes with that has these stages, by index."""
    layers = plan.layers_of(model)
    count = sum(layers[stage] for stage in stages) * model.layer_weights
    if 0 in stages:
        count += model.embedding_weights
    if len(layers) - 1 in stages and not (model.tied and 0 in stages):
        count += model.head_weights
    return count / plan.tensor


def shard_group(machine, plan):
    """Over how many replicas weights are sharded."""
    sharing = {"full": plan.replicas, "hybrid": plan.replicas_in_node(machine)}
    return sharing.get(plan.sharding, 1)


def memory_per_rank(model, machine, plan):
    """Bytes of each rank of a pipeline: weights, gradients, optimizer, activations, losses."""
    layers = plan.layers_of(model)
    group = shard_group(machine, plan)
    state_group = plan.replicas if plan.sharding == "optimizer" else group
    kernels = plan.fused_attention, plan.sequence_parallel
    kept = kept_bytes(model, plan.microbatch, plan.tensor, plan.recompute, *kernels)
    at_work = kept_bytes(model, plan.microbatch, plan.tensor, "none", *kernels)
    loss = kept_by_loss(model, plan.microbatch, plan.tensor)
    value = machine.bytes_per_value
    wider = value / BYTES_PER_VALUE
    kept, at_work, loss = kept * wider, at_work * wider, loss * wider
    deferred = wider * deferred_bytes(model, plan.microbatch, plan.tensor) / kept
    shape = plan.schedule, plan.ranks, plan.chunks, plan.microbatches(model)
    held = held_by(*shape, deferred)
    found = []
    for rank in range(plan.ranks):
        stages = plan.stages_of(rank)
        weights = weights_of(model, plan, stages)
        states = weights * (value + plan.gradient_bytes) / group
        states += weights * (STATE_BYTES if value < 4 else STATE_BYTES_WHOLE) / state_group
        if group > 1:  # two layers whole: one at work, one on its way
            states += (
                2 * (BYTES_PER_VALUE + plan.gradient_bytes) * model.layer_weights / plan.tensor
            )
        own = max(layers[stage] for stage in stages)
        activations = held[rank] * own * kept
        own_loss = loss if len(layers) - 1 in stages else 0.0
        if plan.recompute == "full":  # one layer at a time, on the last stage with the loss
            activations += at_work - kept + own_loss
            activations -= kept * held[rank] if stages == [0] else 0.0  # its input are tokens
        elif own_loss and plan.schedule in SPLIT and plan.chunks == 1:
            whole = own * kept + loss
            later = (
                own * deferred * kept
                + wider * deferred_by_loss(model, plan.microbatch, plan.tensor)
            ) / whole
            activations = held_by(*shape, later)[rank] * whole
        else:
            activations += own_loss * (held[rank] // plan.chunks if plan.schedule in FLUSHED else 1)
        found.append(states + activations)
    return found
