"""Finds out on all ranks, after each step, whether the training has diverged.

Only the rank of the last stage has the loss, and all ranks must end after the same step: they agree
in one all-reduce of two numbers.
"""

import math

import torch
import torch.distributed as dist

NOT_FINITE = ("-inf", "inf", "nan")


def find_not_finite(job, step, loss, norm):
    """What is not finite after step `step`, e.g. "the loss of step 3 is nan", or None.

    `loss` is None on ranks without it, `norm` is that of the whole gradient, or None if nobody
    computes it. Every rank must call it after each step; the answer is the same on all of them.
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
    """0 for a finite number or None, else the place of the value in NOT_FINITE, counted from 1."""
    if value is None or math.isfinite(value):
        return 0
    return 1 + NOT_FINITE.index(str(float(value)))
