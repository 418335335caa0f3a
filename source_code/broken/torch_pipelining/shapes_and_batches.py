# SPDX-License-Identifier: Apache-2.0
"""Traps of lesson 08: shapes, types and masks (section "Shapes and batches")."""

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.nn.functional import cross_entropy, mse_loss

from broken.torch_pipelining import small_pipeline as small


def uneven_batch(job, cured):
    """Every micro-batch must have as many rows as the others.

    Broken: ten rows in four micro-batches, of three, three, two and two. Cured: eight rows.
    """
    rows = 8 if cured else 10
    parts = small.build_own_stages(job)

    def loss_of_all_rows(outputs, targets):  # an output may have rows without targets
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


def more_microbatches_than_rows(job, cured):
    """A batch cannot be cut in more micro-batches than it has rows.

    Broken: sixteen micro-batches of eight rows. Cured: eight.
    """
    parts = small.build_own_stages(job)
    schedule, stages = small.build_schedule(job, parts, microbatches=8 if cured else 16)
    small.run_step(schedule, stages, *small.draw_batch())
    small.compare_gradients(job, parts)


class PositionedStage(nn.Module):
    """A stage that adds three numbers per position: `positions` are (3, rows, WIDTH)."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x, positions):
        return self.part(x) + positions.sum(0)


def batch_in_the_second_dimension(job, cured):
    """Arguments are cut along their first dimension, whatever it is.

    Broken: three positions per row cannot be cut in four. Cured: kwargs_chunk_spec names the
    dimension of the batch.
    """
    inputs, targets = small.draw_batch()
    positions = torch.stack([inputs, inputs / 2, inputs / 4])
    parts = {job.rank: PositionedStage(small.build_own_stages(job)[job.rank])}
    spec = {"kwargs_chunk_spec": {"positions": TensorChunkSpec(1)}} if cured else {}
    schedule, stages = small.build_schedule(job, parts, **spec)
    small.run_step(schedule, stages, inputs, targets, positions=positions)
    whole = small.build_model()
    first, second = PositionedStage(whole[:2]), PositionedStage(whole[2:])
    mse_loss(second(first(inputs, positions), positions), targets).backward()
    small.compare_gradients(job, parts, [parameter.grad for parameter in whole.parameters()])


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


class JoiningStage(nn.Module):
    """The second stage gets two tensors, side by side or one after the other."""

    def __init__(self, part, cured):
        super().__init__()
        self.part, self.cured = part, cured

    def forward(self, x, y):
        if self.cured:
            x, y = x * 1, y * 1  # a product's gradient is a new tensor, a copy's is not
        half = small.WIDTH // 2
        return self.part(torch.cat([x, y], 1)[:, half : half + small.WIDTH])


class TwoOutputs(nn.Module):
    """A stage that sends its output and twice its output, both (rows, WIDTH)."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        x = self.part(x)
        return x, x * 2


def gradients_that_are_views(job, cured):
    """The gradient of a tensor that was joined with another is a view, which gloo does not send.

    Broken: the stage concatenates its two inputs. Cured: it multiplies them by 1 first.
    """
    part = small.build_own_stages(job)[job.rank]
    parts = {job.rank: JoiningStage(part, cured) if job.rank else TwoOutputs(part)}
    schedule, stages = small.build_schedule(job, parts, shapes=False)
    small.run_step(schedule, stages, *small.draw_batch())
    whole = small.build_model()
    inputs, targets = small.draw_batch()
    x, y = TwoOutputs(whole[:2])(inputs)
    mse_loss(JoiningStage(whole[2:], True)(x, y), targets).backward()
    small.compare_gradients(job, parts, [parameter.grad for parameter in whole.parameters()])


def stages_of_two_types(job, cured):
    """Every stage has to compute in the type of what it gets.

    Broken: float32 on rank 0, float64 on rank 1. Cured: float64 on both.
    """
    part = small.build_own_stages(job)[job.rank]
    part = part.float() if job.rank == 0 and not cured else part
    inputs, targets = small.draw_batch()
    stage = PipelineStage(part, job.rank, 2, job.device)
    schedule = Schedule1F1B(stage, 4, loss_fn=mse_loss)
    small.run_step(schedule, [stage], inputs.to(next(part.parameters()).dtype), targets)
    small.compare_gradients(job, {job.rank: part})


def train_on_tokens(job, loss_of, targets, cut_loss=None):
    """One step of classifiers with WIDTH classes: parts, losses, gradients of one process."""
    parts = small.build_own_stages(job)
    loss_fn = cut_loss or loss_of
    schedule, stages = small.build_schedule(job, parts, loss_fn=loss_fn)
    inputs, _ = small.draw_batch()
    losses = small.run_step(schedule, stages, inputs, targets)
    whole = small.build_model()
    loss_of(whole(inputs), targets).backward()
    return parts, losses, [parameter.grad for parameter in whole.parameters()]


IGNORED = -100  # a target that cross_entropy leaves out
CLASSES = [0, IGNORED, 1, 2, 3, IGNORED, IGNORED, 4]  # one, two, one and one in a micro-batch


def ignored_targets(job, cured):
    """A mean over the targets of a micro-batch weighs them by how many others there are.

    Broken: the mean of each micro-batch. Cured: the sum, over the targets of the whole batch.
    """
    targets = torch.tensor(CLASSES)
    share = 4 / (targets != IGNORED).sum().item()  # the schedule divides by its four micro-batches

    def share_of_mean(outputs, targets):
        return cross_entropy(outputs, targets, reduction="sum") * share

    found = train_on_tokens(job, cross_entropy, targets, share_of_mean if cured else None)
    small.compare_gradients(job, found[0], found[2])


def no_target_in_a_microbatch(job, cured):
    """The mean over no target is not a number.

    Broken: all targets of a micro-batch are ignored. Cured: the sum, over those of the whole batch.
    """
    targets = torch.tensor([IGNORED, IGNORED, 1, 2, 3, IGNORED, IGNORED, 4])
    count = (targets != IGNORED).sum().item()

    def share_of_mean(outputs, targets):
        return cross_entropy(outputs, targets, reduction="sum") * 4 / count

    _, losses, _ = train_on_tokens(job, cross_entropy, targets, share_of_mean if cured else None)
    if losses:
        print(f"loss is a number: {bool(torch.stack(losses).isfinite().all())}", flush=True)


def tokens_of_an_uneven_batch(job, cured):
    """A last batch that is smaller shows as two numbers of targets.

    Broken: five rows of eight tokens in two micro-batches, after a batch of six. Cured: six rows.
    """
    parts = small.build_own_stages(job)

    def loss_of_tokens(outputs, targets):
        return cross_entropy(outputs.flatten(0, 1), targets.flatten())

    stage = PipelineStage(parts[job.rank], job.rank, 2, job.device)
    schedule = Schedule1F1B(stage, 2, loss_fn=loss_of_tokens)
    for rows in (6, 6 if cured else 5):
        parts[job.rank].zero_grad()
        inputs = small.draw_batch(8 * rows)[0].view(rows, 8, small.WIDTH)
        targets = torch.arange(8 * rows).view(rows, 8) % small.WIDTH
        small.run_step(schedule, [stage], inputs, targets)
    whole = small.build_model()
    loss_of_tokens(whole(inputs), targets).backward()
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
    """One step with rows of `first` positions and one with `second`; the loss is of row means."""

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
