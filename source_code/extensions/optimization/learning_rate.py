# SPDX-License-Identifier: Apache-2.0
"""A learning rate that changes from update to update: warm-up, then half a cosine.

The rate rises in equal steps to its peak, so that the first updates stay small: their gradients are
large, and the optimizer has no averages yet. Then the rate falls along a cosine to a tenth of the
peak (the shape is that of Loshchilov and Hutter 2017, 1608.03983, section 3, without restarts).
"""

import math

FLOOR = 0.1  # share of the peak at the end of the cosine and after it


class WarmUpThenCosine:
    """Sets the learning rate of `optimizer` for each update.

    The first `warm_up_steps` updates lead to `peak`; update `decay_steps`, counted from 0, has the
    floor. The state is the number of updates made: a run that continues without it would warm up
    again.
    """

    def __init__(self, optimizer, peak, warm_up_steps, decay_steps):
        self.optimizer = optimizer
        self.peak, self.warm_up_steps, self.decay_steps = peak, warm_up_steps, decay_steps
        self.updates = 0
        self.set_rate()

    def advance(self):
        """Note that an update was made, and set the rate of the next one."""
        self.updates += 1
        self.set_rate()

    def set_rate(self):
        share = share_of_peak(self.updates, self.warm_up_steps, self.decay_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.peak * share

    def state_dict(self):
        return {"updates": self.updates}

    def load_state_dict(self, state):
        self.updates = state["updates"]
        self.set_rate()


class ConstantRate:
    """The optimizer's own rate for every update, in a form that a checkpoint can store."""

    def __init__(self):
        self.updates = 0

    def advance(self):
        self.updates += 1

    def state_dict(self):
        return {"updates": self.updates}

    def load_state_dict(self, state):
        self.updates = state["updates"]


def share_of_peak(update, warm_up_steps, decay_steps):
    """Return the rate of update number `update`, counted from 0, as a share of the peak."""
    if update < warm_up_steps:
        return (update + 1) / warm_up_steps
    if update >= decay_steps:
        return FLOOR
    progress = (update - warm_up_steps) / (decay_steps - warm_up_steps)
    return FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * progress)) / 2
