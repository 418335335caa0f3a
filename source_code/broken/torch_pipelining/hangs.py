"""Traps of lesson 08: nothing happens, on any rank (section "It hangs").

Each function runs one trap; `cured` selects the form that works.
"""

import os

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn.functional import mse_loss

from broken.torch_pipelining.small_pipeline import (
    WIDTH,
    build_model,
    build_own_stages,
    build_schedule,
    compare_gradients,
    compute_reference_gradients,
    draw_batch,
    print_distance,
    run_and_compare_one_step,
    run_step,
    wait_for_all_ranks,
)


def wrong_placement(job, cured):
    """ZB-V needs its stages placed as a V.

    Broken: dealt out in a loop, so that rank 0 has the stages 0 and 4. Cured: 0 and 7.
    """
    run_and_compare_one_step(
        job, "ZBVZeroBubble", 8, None if cured else [job.rank, job.rank + job.num_ranks]
    )


def microbatches_differ(job, cured):
    """Every rank must cut the batch in equally many micro-batches.

    Broken: rank 1 cuts it in two, rank 0 in four. Cured: both in four.
    """
    parts = build_own_stages(job)
    example = torch.zeros(2, WIDTH, dtype=torch.float64, requires_grad=True)
    stage = PipelineStage(parts[job.rank], job.rank, 2, job.device, example, example)
    count = 4 if cured or job.rank == 0 else 2
    schedule = get_schedule_class("GPipe")(stage, count, loss_fn=mse_loss)
    inputs, targets = draw_batch()
    run_step(schedule, [stage], inputs, targets[: 2 * count])
    compare_gradients(job, parts, compute_reference_gradients())


def step_on_one_rank(job, cured):
    """Every rank must call eval().

    Broken: only the rank that reads the result calls it. Cured: both ranks do.
    """
    parts = build_own_stages(job)
    schedule, stages = build_schedule(job, parts)
    inputs, targets = draw_batch()
    scores = None
    if cured or job.rank == 1:
        with torch.no_grad():
            scores = schedule.eval(*([inputs] if job.rank == 0 else []), target=targets)
    if scores is not None:
        print_distance("output", [scores], [build_model()(inputs)])
    wait_for_all_ranks(job)


def dead_rank(job, cured):
    """When a rank is gone, its neighbours lose the connection.

    Broken: rank 1 ends before the step. Cured: it stays.
    """
    if job.rank == 1 and not cured:
        os._exit(0)
    run_and_compare_one_step(job, "GPipe")


TRAPS = [
    wrong_placement,
    microbatches_differ,
    step_on_one_rank,
    dead_rank,
]
