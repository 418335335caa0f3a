"""A backward in two halves: for the input first, for the weights whenever there is time.

The backward of a linear layer y = x Wᵀ is two matrix products that do not need each other: g W, the
gradient of the input, which the stage before is waiting for, and gᵀ x, the gradient of the weights,
which nobody needs before the update (Qi et al. 2024, 2401.10241, section 2.1). The layers here can
put the second one off: they leave x and g behind, and everything else that the forward had kept is
let go. Norms and the embedding, whose gradients cost no matrix product, do all of theirs at once.
"""

from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F


class PutOff(NamedTuple):
    """The second matrix product of one layer: what it multiplies, and where the result goes."""

    weight: nn.Parameter  # (outputs, inputs)
    inputs: torch.Tensor  # (..., inputs)
    gradient: torch.Tensor  # of the outputs, (..., outputs)


class SplitBackward:
    """Teaches every nn.Linear in `part` to put the gradient of its weight off."""

    def __init__(self, part):
        self.work = None  # a list while weights' gradients are being put off
        for module in part.modules():
            if isinstance(module, nn.Linear):
                module.forward = partial(self._forward, module)

    def _forward(self, module, inputs):
        output = SplitLinear.apply(inputs, module.weight, self)
        return output if module.bias is None else output + module.bias

    @contextmanager
    def putting_off(self):
        """Around a backward: yields the list that receives a PutOff from every layer."""
        self.work = work = []
        try:
            yield work
        finally:
            self.work = None


class SplitLinear(torch.autograd.Function):
    """x Wᵀ; its backward is that of F.linear, or half of it while weights are put off."""

    @staticmethod
    def forward(ctx, inputs, weight, split):
        ctx.save_for_backward(inputs, weight)
        ctx.parameter = weight  # itself: what was saved comes back as another tensor
        ctx.split = split
        return F.linear(inputs, weight)

    @staticmethod
    def backward(ctx, gradient):
        inputs, weight = ctx.saved_tensors
        input_gradient = gradient @ weight if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:  # the weight is frozen
            return input_gradient, None, None
        if ctx.split.work is None:
            return input_gradient, weight_gradient(inputs, gradient), None
        # Detached: whoever holds a tensor with its history holds everything that it was made of.
        ctx.split.work.append(PutOff(ctx.parameter, inputs.detach(), gradient.detach()))
        return input_gradient, None, None


def weight_gradient(inputs, gradient):
    """gᵀ x over all positions: (outputs, inputs)."""
    return gradient.flatten(0, -2).T @ inputs.flatten(0, -2)


def tensors_of(work):
    """What stays in memory for a list of PutOffs."""
    return [tensor for layer in work for tensor in (layer.inputs, layer.gradient)]


@torch.no_grad()
def catch_up(work):
    """Do what was put off: add each weight's gradient to its `.grad`."""
    for weight, inputs, gradient in work:
        more = weight_gradient(inputs, gradient)
        weight.grad = more if weight.grad is None else weight.grad.add_(more)
