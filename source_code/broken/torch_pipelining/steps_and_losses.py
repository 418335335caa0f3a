"""Traps of lesson 08: steps, losses and gradients (section "Steps, losses, evaluation").

Each function runs one trap; `cured` selects the form that works.
"""

import math

import torch
import torch.distributed as dist
from torch import nn

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
    print_distance,
    run_step,
    wait_for_all_ranks,
)
from extensions.torch_pipelining.library import forwards_only


def step_without_grad(job, cured):
    """step() needs gradients; under torch.no_grad() only eval() works.

    Broken: step(), then eval(). Cured: eval() alone.
    """
    parts = build_own_stages(job)
    schedule, stages = build_schedule(job, parts)
    inputs, targets = draw_batch()
    arguments = [inputs] if job.rank == 0 else []
    with torch.no_grad():
        if not cured:
            schedule.step(*arguments, target=targets)
        scores = schedule.eval(*arguments, target=targets)
    if job.rank == 1:
        print_distance("output", [scores], [build_model()(inputs)])
    wait_for_all_ranks(job)


def eval_without_targets(job, cured):
    """If the schedule has a loss function, eval() needs targets.

    Broken: none. Cured: the targets of the batch.
    """
    parts = build_own_stages(job)
    schedule, stages = build_schedule(job, parts)
    inputs, targets = draw_batch()
    with torch.no_grad():
        scores = schedule.eval(
            *([inputs] if job.rank == 0 else []), target=targets if cured else None
        )
    if job.rank == 1:
        print_distance("output", [scores], [build_model()(inputs)])
    wait_for_all_ranks(job)


def loss_on_the_wrong_rank(job, cured):
    """In a V the last stage, and so the loss, is on rank 0.

    Broken: the targets go to rank 1. Cured: to rank 0.
    """
    parts = build_own_stages(job, "ZBVZeroBubble")
    schedule, stages = build_schedule(job, parts, "ZBVZeroBubble")
    inputs, targets = draw_batch()
    has_loss = job.rank == (0 if cured else job.num_ranks - 1)
    schedule.step(*([inputs] if job.rank == 0 else []), target=targets if has_loss else None)
    compare_gradients(job, parts, compute_reference_gradients())


def eval_of_a_v(job, cured):
    """eval() fails when two neighbouring stages are on one rank.

    Broken: eval() of ZB-V. Cured: eval() while its list of actions has forwards only.
    """
    parts = build_own_stages(job, "ZBVZeroBubble")
    schedule, stages = build_schedule(job, parts, "ZBVZeroBubble")
    inputs, targets = draw_batch()
    arguments = [inputs] if job.rank == 0 else []
    with torch.no_grad():
        if cured:
            with forwards_only(schedule):
                scores = schedule.eval(*arguments, target=targets)
        else:
            scores = schedule.eval(*arguments, target=targets)
    if job.rank == 0:
        print_distance("output", [scores], [build_model()(inputs)])
    wait_for_all_ranks(job)


def gradients_kept(job, cured):
    """A second step adds its gradients to those of the first.

    Broken: two steps without zero_grad(). Cured: zero_grad() before each.
    """
    parts = build_own_stages(job)
    schedule, stages = build_schedule(job, parts)
    for _ in range(2):
        if cured:
            for part in parts.values():
                part.zero_grad()
        run_step(schedule, stages, *draw_batch())
    compare_gradients(job, parts, compute_reference_gradients())


def accumulation(job, cured):
    """scale_grads divides all accumulated gradients in every step: the first step's twice.

    Broken: two steps for one update, with scale_grads. Cured: one division after both steps.
    """
    parts = build_own_stages(job)
    schedule, stages = build_schedule(job, parts, scale_grads=not cured)
    for seed in range(2):
        run_step(schedule, stages, *draw_batch(seed=seed))
    if cured:
        for part in parts.values():
            for parameter in part.parameters():
                parameter.grad /= 4  # once, by the number of micro-batches
    compare_gradients(job, parts, compute_reference_gradients(batches=2))


def sum_loss(job, cured):
    """scale_grads is right for a loss that is a mean over the rows.

    Broken: a sum over the rows, divided once more. Cured: scale_grads=False.
    """

    def sum_of_rows(outputs, targets):
        return (outputs - targets).pow(2).sum() / (BATCH * WIDTH)

    parts = build_own_stages(job)
    schedule, stages = build_schedule(job, parts, loss_fn=sum_of_rows, scale_grads=not cured)
    run_step(schedule, stages, *draw_batch())
    compare_gradients(job, parts, compute_reference_gradients())


def clipping(job, cured):
    """clip_grad_norm_ on a rank sees the norm of that rank's stages only.

    Broken: each rank clips by its own norm. Cured: all clip by the norm of the whole model.
    """
    parts = build_own_stages(job)
    schedule, stages = build_schedule(job, parts)
    run_step(schedule, stages, *draw_batch())
    parameters = list(parts[job.rank].parameters())
    if cured:
        squares = sum(parameter.grad.pow(2).sum() for parameter in parameters)
        dist.all_reduce(squares)
        factor = min(1.0, 0.01 / (math.sqrt(squares) + 1e-6))
        for parameter in parameters:
            parameter.grad *= factor
    else:
        nn.utils.clip_grad_norm_(parameters, 0.01)
    model = build_model()
    compute_reference_gradients(model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    compare_gradients(job, parts, [parameter.grad for parameter in model.parameters()])


def all_scores_kept(job, cured):
    """The last stage keeps the output of every micro-batch unless told otherwise.

    Broken: the default. Cured: return_outputs=False.
    """
    parts = build_own_stages(job)
    schedule, stages = build_schedule(job, parts)
    run_step(schedule, stages, *draw_batch(), return_outputs=not cured)
    if job.rank == 1:
        print(f"outputs kept after the step: {len(stages[0].output_chunks)}", flush=True)
    wait_for_all_ranks(job)


def batch_norm(job, cured):
    """BatchNorm takes the statistics of one micro-batch.

    Broken: BatchNorm, which depends on the cut. Cured: LayerNorm, which does not.
    """

    def with_norm(index):
        norm = nn.LayerNorm(WIDTH) if cured else nn.BatchNorm1d(WIDTH)
        return nn.Sequential(build_layer(index), norm.double())

    parts = {job.rank: nn.Sequential(with_norm(2 * job.rank), with_norm(2 * job.rank + 1))}
    schedule, stages = build_schedule(job, parts)
    run_step(schedule, stages, *draw_batch())
    whole = nn.Sequential(*(with_norm(index) for index in range(4)))
    compare_gradients(job, parts, compute_reference_gradients(whole))


TRAPS = [
    step_without_grad,
    eval_without_targets,
    loss_on_the_wrong_rank,
    eval_of_a_v,
    gradients_kept,
    accumulation,
    sum_loss,
    clipping,
    all_scores_kept,
    batch_norm,
]
