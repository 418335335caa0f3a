# SPDX-License-Identifier: Apache-2.0
"""Traps of lesson 08: nothing happens, on any rank (section "It hangs")."""

import os

from broken.torch_pipelining import small_pipeline as small


def wrong_placement(job, cured):
    """ZB-V needs its stages placed as a V.

    Broken: dealt out in a loop, so that rank 0 has the stages 0 and 4. Cured: 0 and 7.
    """
    indices = None if cured else [job.rank, job.rank + job.num_ranks]
    parts = small.build_own_stages(job, "ZBVZeroBubble", indices)
    small.run_and_compare(job, "ZBVZeroBubble", 8, parts)


def microbatches_differ(job, cured):
    """Every rank must cut the batch in equally many micro-batches.

    Broken: rank 1 cuts it in two, rank 0 in four. Cured: both in four.
    """
    parts = small.build_own_stages(job)
    count = 4 if cured or job.rank == 0 else 2
    schedule, stages = small.build_schedule(job, parts, microbatches=count, rows=2 * count)
    inputs, targets = small.draw_batch()
    small.run_step(schedule, stages, inputs, targets[: 2 * count])
    small.compare_gradients(job, parts)


def step_on_one_rank(job, cured):
    """Every rank must call eval().

    Broken: only the rank that reads the result calls it. Cured: both ranks do.
    """
    schedule, stages = small.build_schedule(job, small.build_own_stages(job))
    if cured or job.rank == 1:
        small.evaluate(schedule, stages)


def dead_rank(job, cured):
    """When a rank is gone, its neighbours lose the connection.

    Broken: rank 1 ends before the step. Cured: it stays.
    """
    if job.rank == 1 and not cured:
        os._exit(0)
    small.run_and_compare(job)
