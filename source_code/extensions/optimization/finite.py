# SPDX-License-Identifier: Apache-2.0
"""Checks on all ranks, before each update, whether the loss and the gradient are finite.

Only the rank of the last stage has the loss, but all ranks must skip the same update or end after
the same step. So they exchange the result in one all-reduce of two numbers.
"""

import math
import sys

import torch
import torch.distributed as dist

NOT_FINITE = ("-inf", "inf", "nan")
MOST_SKIPPED = 10  # updates in a row; then the weights are probably not finite


def add_not_finite_flag(parser):
    """Add --on-nan."""
    what = "end at a loss or norm that is not finite, or leave out that update"
    parser.add_argument("--on-nan", choices=["stop", "skip"], default="stop", help=what)


class UpdateCheck:
    """Decides before each update whether it may be made. Every rank creates one.

    With `skip` an update whose loss or gradient norm is not finite is left out, at most
    MOST_SKIPPED times in a row; without it the training ends at the first such update. `skipped`
    counts the updates that were left out. `diverged` is None, or says why the training has to end.
    Both are the same on all ranks.
    """

    def __init__(self, job, skip=False):
        self.job, self.skip = job, skip
        self.skipped = self.in_a_row = 0
        self.diverged = None

    def allows(self, step, loss, norm):
        """Whether the update of `step` may be made; arguments as those of `find_not_finite`."""
        found = find_not_finite(self.job, step, loss, norm)
        if found is None:
            self.in_a_row = 0
            return True
        self.in_a_row += 1
        if not self.skip or self.in_a_row > MOST_SKIPPED:
            self.diverged = found
            return False
        self.skipped += 1
        if self.job.rank == 0:
            print(f"{found}: its update is left out", file=sys.stderr, flush=True)
        return False


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
