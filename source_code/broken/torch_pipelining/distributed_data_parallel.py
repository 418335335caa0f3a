"""Traps of lesson 08: DDP around stages (section "With DistributedDataParallel").

Each function runs one trap; `cured` selects the form that works.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn.functional import mse_loss

from broken.torch_pipelining.small_pipeline import (
    WIDTH,
    build_layer,
    compare_gradients,
    compute_reference_gradients,
    draw_batch,
    run_step,
)
from extensions.torch_pipelining.library import ONE_STAGE, stages_of_rank


def train_replicas(job, name, shapes, by_hand=False):
    """Two pipelines of two ranks, 0 and 1, 2 and 3, each with a batch of its own.

    DDP averages the gradients over the two, or `by_hand` an all-reduce after the step.
    """
    pipelines = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    copies = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    replica, rank = divmod(job.rank, 2)
    chunks = 1 if name in ONE_STAGE else 2
    parts = {}
    for index in stages_of_rank(name, rank, 2, chunks):
        size = 2 // chunks
        part = nn.Sequential(*(build_layer(i) for i in range(index * size, (index + 1) * size)))
        ddp = nn.parallel.DistributedDataParallel
        parts[index] = part if by_hand else ddp(part, process_group=copies[rank])
    example = torch.zeros(2, WIDTH, dtype=torch.float64, requires_grad=True)
    given = {"input_args": example, "output_args": example} if shapes else {}
    stages = [
        PipelineStage(part, index, 2 * chunks, job.device, group=pipelines[replica], **given)
        for index, part in parts.items()
    ]
    of_this_rank = stages[0] if chunks == 1 else stages
    schedule = get_schedule_class(name)(of_this_rank, 4, loss_fn=mse_loss)
    for _ in range(2):  # what DDP learns in the first step, it uses in the second
        for part in parts.values():
            part.zero_grad()
        run_step(schedule, stages, *draw_batch(seed=replica))
    if by_hand:
        for part in parts.values():
            for parameter in part.parameters():
                dist.all_reduce(parameter.grad, group=copies[rank])
                parameter.grad /= 2
    mine = parts if replica == 0 else {}
    compare_gradients(
        job, mine, [gradient / 2 for gradient in compute_reference_gradients(batches=2)]
    )


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


TRAPS = [
    ddp_without_shapes,
    ddp_with_split_backward,
]
