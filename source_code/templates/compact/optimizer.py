"""The update that turns gradients into new weights."""

import torch


def build_optimizer(name, parameters, learning_rate):
    """`sgd`, `momentum` (0.9) or `adamw` over `parameters`."""
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=learning_rate)
    momentum = 0.9 if name == "momentum" else 0.0
    return torch.optim.SGD(parameters, lr=learning_rate, momentum=momentum)
