# SPDX-License-Identifier: Apache-2.0
"""Traps of lesson 08: DDP around stages (section "With DistributedDataParallel")."""

from types import SimpleNamespace

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from broken.torch_pipelining import small_pipeline as small


def train_replicas(job, name, shapes, by_hand=False):
    """Train two pipelines, one on ranks 0 and 1 and one on ranks 2 and 3, each with its own batch.

    DDP averages the gradients over the two; with `by_hand` an all-reduce after the step does it.
    """
    pipelines = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    copies = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    replica, rank = divmod(job.rank, 2)
    pipeline = SimpleNamespace(rank=rank, num_ranks=2, device=job.device)
    parts = small.build_own_stages(pipeline, name)
    if not by_hand:
        parts = {
            index: DistributedDataParallel(part, process_group=copies[rank])
            for index, part in parts.items()
        }
    schedule, stages = small.build_schedule(
        pipeline, parts, name, shapes=shapes, group=pipelines[replica]
    )
    for _ in range(2):  # what DDP learns in the first step, it uses in the second
        for part in parts.values():
            part.zero_grad()
        small.run_step(schedule, stages, *small.draw_batch(seed=replica))
    if by_hand:
        for part in parts.values():
            for parameter in part.parameters():
                dist.all_reduce(parameter.grad, group=copies[rank])
                parameter.grad /= 2
    means = [total / 2 for total in small.compute_reference_gradients(batches=2)]
    small.compare_gradients(job, parts if replica == 0 else {}, means)


def ddp_without_shapes(job, cured):
    """DDP's hooks run in the forward with which the library infers shapes.

    Broken: the stage gets no example tensors. Cured: it gets them.
    """
    train_replicas(job, "GPipe", shapes=cured)


def ddp_with_split_backward(job, cured):
    """A backward in two halves never fires DDP's hooks.

    Broken: DDP around the stages of ZB-V. Cured: the gradients are averaged by hand.
    """
    train_replicas(job, "ZBVZeroBubble", shapes=True, by_hand=cured)
