"""Traps of lesson 08: shapes, types and masks (section "Shapes and batches").

Each function runs one trap; `cured` selects the form that works.
"""

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, SplitPoint, build_stage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn.functional import mse_loss

from broken.torch_pipelining.small_pipeline import (
    BATCH,
    WIDTH,
    build_layer,
    build_model,
    build_own_stages,
    build_schedule,
    compare_gradients,
    compute_reference_gradients,
    draw_batch,
    run_step,
    trace_model,
)


def uneven_batch(job, cured):
    """Every micro-batch must have as many rows as the others.

    Broken: ten rows in four micro-batches, of three, three, two and two. Cured: eight rows.
    """
    rows = 8 if cured else 10
    parts = build_own_stages(job)
    example = torch.zeros(-(-rows // 4), WIDTH, dtype=torch.float64, requires_grad=True)
    stage = PipelineStage(parts[job.rank], job.rank, 2, job.device, example, example)

    def loss_of_all_rows(outputs, targets):  # of as many rows as there are targets
        return (outputs[: len(targets)] - targets).pow(2).mean()

    schedule = get_schedule_class("GPipe")(stage, 4, loss_fn=loss_of_all_rows)
    run_step(schedule, [stage], *draw_batch(rows))
    compare_gradients(job, parts, compute_reference_gradients(rows=rows))


def traced_in_another_type(job, cured):
    """The tracer fixes the dtype of every message.

    Broken: traced in float32, run in float64. Cured: traced in float64.
    """
    model = build_model() if cured else build_model().float()
    example = torch.zeros(2, WIDTH, dtype=torch.float64 if cured else torch.float32)
    pipe = trace_model(job, model, example, split_spec={"2": SplitPoint.BEGINNING})
    part = pipe.get_stage_module(job.rank).double()
    stage = build_stage(part, job.rank, pipe.info(), job.device)
    schedule = get_schedule_class("GPipe")(stage, 4, loss_fn=mse_loss)
    run_step(schedule, [stage], *draw_batch())
    compare_gradients(job, {job.rank: part}, compute_reference_gradients())


class TupleStage(nn.Module):
    """A stage that returns a tuple with None in it, as many layers of Hugging Face do."""

    def __init__(self, part, cured):
        super().__init__()
        self.part, self.cured = part, cured

    def forward(self, x):
        return self.part(x) if self.cured else (self.part(x), None)


def tuple_with_none(job, cured):
    """A stage may return tensors only.

    Broken: it returns (activation, None). Cured: the activation.
    """
    part = build_own_stages(job)[job.rank]
    parts = {job.rank: TupleStage(part, cured) if job.rank == 0 else part}
    schedule, stages = build_schedule(job, parts, shapes=False)
    run_step(schedule, stages, *draw_batch())
    compare_gradients(job, parts, compute_reference_gradients())


class MaskedStage(nn.Module):
    """A stage whose output is zero where its second argument, a mask, is."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x, mask=None):
        x = self.part(x)
        return x if mask is None else x * mask


def mask_without_a_batch(job, cured):
    """A keyword argument is cut along its first dimension, as the batch is.

    Broken: a mask of one row cannot be cut in four. Cured: it is expanded to the batch.
    """
    parts = {job.rank: MaskedStage(build_own_stages(job)[job.rank])}
    schedule, stages = build_schedule(job, parts)
    mask = torch.ones(1, WIDTH, dtype=torch.float64)
    run_step(schedule, stages, *draw_batch(), mask=mask.expand(BATCH, WIDTH) if cured else mask)
    compare_gradients(job, parts, compute_reference_gradients())


def mask_on_one_rank(job, cured):
    """Keyword arguments are not sent to later stages.

    Broken: only rank 0 passes the mask. Cured: both ranks do.
    """
    inputs, targets = draw_batch()
    mask = (inputs > 0).double()
    parts = {job.rank: MaskedStage(build_own_stages(job)[job.rank])}
    schedule, stages = build_schedule(job, parts)
    run_step(
        schedule, stages, inputs, targets, **({"mask": mask} if cured or job.rank == 0 else {})
    )
    first, second = (
        MaskedStage(nn.Sequential(build_layer(0), build_layer(1))),
        nn.Sequential(build_layer(2), build_layer(3)),
    )
    mse_loss(MaskedStage(second)(first(inputs, mask), mask), targets).backward()
    wanted = [*first.parameters(), *second.parameters()]
    compare_gradients(job, parts, [parameter.grad for parameter in wanted])


def loss_per_row(job, cured):
    """The loss function must return one number.

    Broken: one number per row. Cured: their mean.
    """

    def each_row(outputs, targets):
        rows = (outputs - targets).pow(2).mean(1)
        return rows.mean() if cured else rows

    parts = build_own_stages(job)
    schedule, stages = build_schedule(job, parts, loss_fn=each_row)
    run_step(schedule, stages, *draw_batch())
    compare_gradients(job, parts, compute_reference_gradients())


TRAPS = [
    uneven_batch,
    traced_in_another_type,
    tuple_with_none,
    mask_without_a_batch,
    mask_on_one_rank,
    loss_per_row,
]
