# SPDX-License-Identifier: Apache-2.0
"""The optimizer and the learning rate of torch_pipelining.py, both torch's own."""

import math

import torch
from torch.optim.lr_scheduler import LambdaLR


def build_optimizer_and_rates(arguments, parameters):
    """Return the optimizer and its learning-rate scheduler.

    With --warm-up N the rate rises for N steps, then falls along half a cosine. WarmUpThenCosine
    in learning_rate.py has a floor, and a form that a checkpoint can store.
    """
    if arguments.optimizer == "adamw":
        optimizer = torch.optim.AdamW(parameters, lr=arguments.learning_rate)
    else:
        momentum = 0.9 if arguments.optimizer == "momentum" else 0.0
        optimizer = torch.optim.SGD(parameters, lr=arguments.learning_rate, momentum=momentum)

    def share_of_rate(step):
        if not arguments.warm_up:
            return 1.0
        if step < arguments.warm_up:
            return (step + 1) / arguments.warm_up
        way = (step - arguments.warm_up) / (arguments.steps - arguments.warm_up)
        return (1 + math.cos(math.pi * way)) / 2

    return optimizer, LambdaLR(optimizer, share_of_rate)
