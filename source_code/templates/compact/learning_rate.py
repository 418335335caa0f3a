"""A learning rate that changes from update to update: warm-up, then half a cosine."""

import math


def set_rate(optimizer, peak, update, warm_up_steps, decay_steps):
    """The learning rate of one update: warm-up, then half a cosine down to a tenth."""
    share = (update + 1) / warm_up_steps
    if update >= warm_up_steps:
        progress = min(1.0, (update - warm_up_steps) / (decay_steps - warm_up_steps))
        share = 0.1 + (1 - 0.1) * (1 + math.cos(math.pi * progress)) / 2
    optimizer.param_groups[0]["lr"] = peak * share
