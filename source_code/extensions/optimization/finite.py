# SPDX-License-Identifier: Apache-2.0
"""Checks on all ranks, before each update, whether the loss and the gradient are finite.

Only the rank of the last stage has the loss, but all ranks must end after the same step. So they
exchange the result in one all-reduce of two numbers.
"""

import math

import torch
import torch.distributed as dist

NOT_FINITE = ("-inf", "inf", "nan")


def find_not_finite(job, step, loss, norm):
    """Return what is not finite in step `step`, e.g. "the loss of step 3 is nan", or None.

    `loss` is None on ranks without it. `norm` is the norm of the whole gradient, or None if it is
    not computed. Every rank must call this after each step; the result is the same on all ranks.
    """
    values = {
        f"the loss of step {step}": None if loss is None else loss.item(),
        f"the gradient norm of step {step}": norm,
    }
    kinds = torch.tensor([kind_of(value) for value in values.values()])
    if job.num_ranks > 1:
        with job.waiting_for_all("the end of the step"):
            dist.all_reduce(kinds, dist.ReduceOp.MAX)
    found = (
        f"{name} is {NOT_FINITE[kind - 1]}" for name, kind in zip(values, kinds.tolist()) if kind
    )
    return next(found, None)


def kind_of(value):
    """Return 0 for a finite number or None, else the value's place in NOT_FINITE, from 1."""
    if value is None or math.isfinite(value):
        return 0
    return 1 + NOT_FINITE.index(str(float(value)))
