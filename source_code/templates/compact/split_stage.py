"""A stage whose backward comes in two halves."""

import torch
from torch import nn
from torch.nn import functional as F


class Stage:
    """Stage `index` of `num_stages`; the last one has the loss. Its backward comes in two halves."""

    def __init__(self, part, index, num_stages, loss_function):
        self.part, self.index, self.loss_function = part, index, loss_function
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.held = {}  # micro-batch -> (input, output), from its forward to its backward
        self.work = []  # what the backward under way puts off: (weight, inputs, gradient of outputs)
        self.put_off = {}  # micro-batch -> that list, from the first half to the second
        for module in part.modules():
            if isinstance(module, nn.Linear):
                module.forward = lambda x, w=module.weight: SplitLinear.apply(x, w, self.work)

    def forward(self, k, inputs, targets=None):
        """Run micro-batch `k` forward; returns the activation for the next stage, or the loss."""
        if not self.is_first:
            inputs.requires_grad_()
        output = self.part(inputs)
        if self.is_last:
            output = self.loss_function(output, targets)
        self.held[k] = inputs, output
        return output.detach()

    def backward_input(self, k, gradient=None):
        """The half that the stage before waits for: returns the gradient of the input."""
        inputs, output = self.held.pop(k)
        torch.autograd.backward(output, gradient)
        self.put_off[k] = self.work.copy()
        self.work.clear()
        return None if self.is_first else inputs.grad

    @torch.no_grad()
    def backward_weight(self, k):
        """The other half: add the gradient of each weight, gᵀ x, to what is there."""
        for weight, inputs, gradient in self.put_off.pop(k):
            more = gradient.flatten(0, -2).T @ inputs.flatten(0, -2)
            weight.grad = more if weight.grad is None else weight.grad.add_(more)


class SplitLinear(torch.autograd.Function):
    """x Wᵀ, whose backward puts the matrix product for the weight off."""

    @staticmethod
    def forward(ctx, inputs, weight, work):
        ctx.save_for_backward(inputs, weight)
        ctx.weight, ctx.work = weight, work
        return F.linear(inputs, weight)

    @staticmethod
    def backward(ctx, gradient):
        inputs, weight = ctx.saved_tensors
        ctx.work.append((ctx.weight, inputs.detach(), gradient.detach()))
        return gradient @ weight if ctx.needs_input_grad[0] else None, None, None
