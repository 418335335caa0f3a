# SPDX-License-Identifier: Apache-2.0
"""The bytes that a plan sends per update: from one GPU, and out of one node.

The bytes per GPU show which kind of parallelism sends least. On a cluster the bytes per node
decide, because the links inside a node are ten times as fast. The formulas are those of Megatron-LM
2021 (arXiv 2104.04473) section 3.2 for tensor and pipeline parallelism, of the ZeRO paper (arXiv
1910.02054) section 7 for sharding, and of traffic.py for rings over several nodes.
"""

from planning.plan_memory import shard_group, weights_of
from planning.transformer import BYTES_PER_VALUE


def bytes_per_gpu(model, machine, plan):
    """Bytes per update from the GPU that sends the most, which is in the middle of a pipeline."""
    m = plan.microbatches(model)
    pipeline = 0.0
    if plan.ranks > 1:
        neighbours = 2 if plan.ranks > 2 or plan.chunks > 1 else 1
        pipeline = neighbours * m * plan.chunks * activation(model, plan) / plan.tensor
    per_layer = {"none": 4, "selective": 4, "operator": 5, "full": 6}[
        plan.recompute
    ]  # all-reduces per layer
    cut = plan.layers_of(model)
    layers = max(sum(cut[stage] for stage in plan.stages_of(rank)) for rank in range(plan.ranks))
    missing = (plan.tensor - 1) / plan.tensor
    tensor = 2 * missing * per_layer * m * layers * activation(model, plan)
    return pipeline + tensor + sum(size for size, _, _ in data_rings(model, machine, plan))


def bytes_per_node(model, machine, plan):
    """Bytes per update that leave a node, for the node that sends the most to other nodes."""
    m = plan.microbatches(model)
    far = 0
    for rank in range(plan.ranks):
        for other in (rank - 1, rank + 1):
            last = other in (-1, plan.ranks)
            if last and plan.chunks == 1 or plan.ranks == 1:
                continue
            far += plan.is_far(machine, rank, other % plan.ranks)
    pipelines = machine.gpus_per_node / (plan.tensor * plan.ranks)
    if pipelines < 1:  # a pipeline over several nodes: both ends of a node's part send
        far, pipelines = min(far, 2), 1
    if plan.neighbours == "replicas" and far:  # each rank of a node has its neighbours elsewhere
        far = min(far, 2)
        pipelines = min(machine.gpus_per_node // plan.tensor, plan.replicas)
    sent = far * pipelines * m * plan.chunks * activation(model, plan)
    for size, members, inside in data_rings(model, machine, plan):
        if members > inside:
            sent += size * machine.gpus_per_node / inside
    return sent


def activation(model, plan):
    """Bytes of the activation of one micro-batch between two stages."""
    return BYTES_PER_VALUE * plan.microbatch * model.length * model.hidden


def data_rings(model, machine, plan):
    """(bytes that each member sends, members, members per node) of each collective of a rank."""
    copies, inside = plan.replicas, plan.replicas_in_node(machine)
    weights = max(weights_of(model, plan, plan.stages_of(rank)) for rank in range(plan.ranks))
    group, gradient = shard_group(machine, plan), plan.gradient_bytes * weights
    passes = plan.microbatches(model)
    rings = []
    if plan.sharding == "gradients":
        missing = (copies - 1) / copies
        each = passes * gradient + BYTES_PER_VALUE * weights
        rings.append((missing * each, copies, inside))
    if group > 1:
        missing = (group - 1) / group
        each = passes * (2 * BYTES_PER_VALUE * weights + gradient)
        rings.append((missing * each, group, min(inside, group)))
    if plan.sharding == "hybrid" and copies > group:
        nodes = copies // group
        rings.append((2 * (nodes - 1) / nodes * gradient / group, nodes, 1))
    if plan.sharding == "optimizer":
        # Each replica gets the whole sums (sharded_optimizer.py), and the weights are gathered.
        missing = (copies - 1) / copies
        rings.append((missing * (2 * gradient + BYTES_PER_VALUE * weights), copies, inside))
    if plan.sharding == "none":
        rings.append((2 * (copies - 1) / copies * gradient, copies, inside))
    return rings
