"""Traps of lesson 08: shapes, types and masks (section "Shapes and batches")."""

import torch
from torch import nn
from torch.nn.functional import mse_loss

from broken.torch_pipelining import small_pipeline as small


def uneven_batch(job, cured):
    """Every micro-batch must have as many rows as the others.

    Broken: ten rows in four micro-batches, of three, three, two and two. Cured: eight rows.
    """
    rows = 8 if cured else 10
    parts = small.build_own_stages(job)

    def loss_of_all_rows(outputs, targets):  # of as many rows as there are targets
        return (outputs[: len(targets)] - targets).pow(2).mean()

    schedule, stages = small.build_schedule(job, parts, rows=rows, loss_fn=loss_of_all_rows)
    small.run_step(schedule, stages, *small.draw_batch(rows))
    small.compare_gradients(job, parts, small.compute_reference_gradients(rows=rows))


def traced_in_another_type(job, cured):
    """The tracer fixes the dtype of every message.

    Broken: traced in float32, run in float64. Cured: traced in float64.
    """
    model = small.build_model() if cured else small.build_model().float()
    example = torch.zeros(2, small.WIDTH, dtype=torch.float64 if cured else torch.float32)
    pipe = small.trace_model(job, model, "2", example=example)
    parts = {job.rank: pipe.get_stage_module(job.rank).double()}
    small.run_traced(job, pipe, parts)
    small.compare_gradients(job, parts)


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
    part = small.build_own_stages(job)[job.rank]
    parts = {job.rank: TupleStage(part, cured) if job.rank == 0 else part}
    small.run_and_compare(job, parts=parts, shapes=False)


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
    parts = {job.rank: MaskedStage(small.build_own_stages(job)[job.rank])}
    schedule, stages = small.build_schedule(job, parts)
    mask = torch.ones(1, small.WIDTH, dtype=torch.float64)
    mask = mask.expand(small.BATCH, small.WIDTH) if cured else mask
    small.run_step(schedule, stages, *small.draw_batch(), mask=mask)
    small.compare_gradients(job, parts)


def mask_on_one_rank(job, cured):
    """Keyword arguments are not sent to later stages.

    Broken: only rank 0 passes the mask. Cured: both ranks do.
    """
    inputs, targets = small.draw_batch()
    mask = (inputs > 0).double()
    parts = {job.rank: MaskedStage(small.build_own_stages(job)[job.rank])}
    schedule, stages = small.build_schedule(job, parts)
    passed = {"mask": mask} if cured or job.rank == 0 else {}
    small.run_step(schedule, stages, inputs, targets, **passed)
    whole = small.build_model()
    first, second = MaskedStage(whole[:2]), MaskedStage(whole[2:])
    mse_loss(second(first(inputs, mask), mask), targets).backward()
    small.compare_gradients(job, parts, [parameter.grad for parameter in whole.parameters()])


def loss_per_row(job, cured):
    """The loss function must return one number.

    Broken: one number per row. Cured: their mean.
    """

    def each_row(outputs, targets):
        rows = (outputs - targets).pow(2).mean(1)
        return rows.mean() if cured else rows

    small.run_and_compare(job, loss_fn=each_row)


def longer_rows(job, cured):
    """The buffers for messages have the size of the first step.

    Broken: rows of 16 positions, then of 24. Cured: a schedule for each length.
    """
    train_on_lengths(job, 16, 24, cured)


def shorter_rows(job, cured):
    """A shorter message leaves the end of its buffer as it was.

    Broken: rows of 16 positions, then of 12. Cured: a schedule for each length.
    """
    train_on_lengths(job, 16, 12, cured)


def train_on_lengths(job, first, second, new_schedule):
    """One step with rows of `first` positions and one with `second`; the loss is of their means."""

    def loss_of_means(outputs, targets):
        return mse_loss(outputs.mean(1), targets)

    parts = small.build_own_stages(job)
    schedule = None
    for length in (first, second):
        if schedule is None or new_schedule:
            schedule, stages = small.build_schedule(job, parts, shapes=False, loss_fn=loss_of_means)
        parts[job.rank].zero_grad()
        inputs, targets = small.draw_batch()
        inputs = (
            inputs[:, None] * torch.arange(1, length + 1, dtype=torch.float64)[:, None] / length
        )
        small.run_step(schedule, stages, inputs, targets)
    whole = small.build_model()
    loss_of_means(whole(inputs), targets).backward()
    small.compare_gradients(job, parts, [parameter.grad for parameter in whole.parameters()])
