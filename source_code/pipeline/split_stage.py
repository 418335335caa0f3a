# SPDX-License-Identifier: Apache-2.0
"""A stage with a split backward: first for the input, later for the weights.

The backward of a linear layer y = x Wᵀ is two independent matrix products: g W, the gradient of the
input, for which the previous stage waits, and gᵀ x, the gradient of the weights, which is not
needed before the update (Qi et al. 2023, 2401.10241, section 2). The layers here can defer the
second product: they keep x and g, and everything else that the forward kept is freed. Norms, biases
and the embedding compute their gradients at once, because these need no matrix product.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from pipeline.stage import Stage


class Deferred(NamedTuple):
    """A weight gradient that is still to be computed: gᵀ x of one layer."""

    weight: nn.Parameter  # (outputs, inputs)
    inputs: torch.Tensor  # (..., inputs)
    gradient: torch.Tensor  # of the outputs, (..., outputs)


class SplitStage(Stage):
    """A Stage that can also run the two halves of a backward by themselves."""

    def __init__(self, part, index, num_stages, loss_function):
        super().__init__(part, index, num_stages, loss_function)
        self.deferred = {}  # micro-batch -> its Deferred, from I to W
        self.deferring = None  # the list that receives them during an I
        for module in part.modules():
            if is_plain(module):
                module.forward = partial(self.linear, module)

    def linear(self, module, inputs):
        output = SplitLinear.apply(inputs, module.weight, self)
        return output if module.bias is None else output + module.bias

    def backward_input(self, microbatch, gradient=None):
        """Run the backward for the input, for which the previous stage waits.

        Arguments and result are those of `backward`. Of what the forward had kept, only the inputs
        of the linear layers stay, with the gradients of their outputs, until `backward_weight`.
        """
        self.deferring = self.deferred[microbatch] = []
        try:
            return self.run_backward(microbatch, gradient)
        finally:
            self.deferring = None

    @torch.no_grad()
    def backward_weight(self, microbatch):
        """Run the backward for the weights, and add to their gradients."""
        for weight, inputs, gradient in self.deferred.pop(microbatch):
            more = weight_gradient(inputs, gradient)
            weight.grad = more if weight.grad is None else weight.grad.add_(more)


def is_plain(module):
    """Whether a module computes what nn.Linear does, with a weight that is a parameter.

    A subclass with another forward is left to autograd. So is a weight that is made from other
    parameters before each forward, as by weight norm. There, I runs the whole backward.
    """
    computes = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    if not computes or "weight" not in module._parameters:
        return False
    own = vars(module).get("forward")  # that of another SplitStage of the same part, or the user's
    function = getattr(getattr(own, "func", None), "__func__", None)
    return own is None or function is SplitStage.linear


class SplitLinear(torch.autograd.Function):
    """x Wᵀ; its backward is that of F.linear, or its half for the input while `stage` defers."""

    @staticmethod
    def forward(ctx, inputs, weight, stage):
        ctx.save_for_backward(inputs, weight)
        ctx.parameter = weight  # save_for_backward would return another tensor object
        ctx.stage = stage
        return F.linear(inputs, weight)

    @staticmethod
    def backward(ctx, gradient):
        inputs, weight = ctx.saved_tensors
        input_gradient = gradient @ weight if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:  # the weight is frozen
            return input_gradient, None, None
        if ctx.stage.deferring is None:
            return input_gradient, weight_gradient(inputs, gradient), None
        # Detached, because a tensor with its graph keeps all tensors of that graph alive.
        ctx.stage.deferring.append(Deferred(ctx.parameter, inputs.detach(), gradient.detach()))
        return input_gradient, None, None


def weight_gradient(inputs, gradient):
    """gᵀ x over all positions: (outputs, inputs)."""
    return gradient.flatten(0, -2).T @ inputs.flatten(0, -2)


def stage_class_for(schedule):
    """SplitStage where the schedule has backwards in two halves, else Stage."""
    return SplitStage if "I" in schedule.kinds else Stage
