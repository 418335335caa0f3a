"""The backward of lesson 02 in two halves, for the input and for the weights (lesson 09).

Zero Bubble: Qi et al. 2023, arXiv 2401.10241, section 2.
"""

from collections import deque
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from course.building.my_pipeline import backward, forward


def input_half(gradient, inputs, weight, deferred):
    """Backward of y = x Aᵀ for x: returns its gradient, and leaves in `deferred` what W needs."""
    deferred.append((weight, inputs, gradient))
    return gradient @ weight


def weight_half(deferred):
    """Add to the gradients of the weights all that was deferred, and forget it."""
    while deferred:
        weight, inputs, gradient = deferred.pop()
        more = gradient.flatten(0, -2).T @ inputs.flatten(0, -2)
        weight.grad = more if weight.grad is None else weight.grad + more


class SplitLinear(torch.autograd.Function):
    """The product x Aᵀ, whose backward runs only the half for x."""

    @staticmethod
    def forward(ctx, inputs, weight, stage):
        ctx.save_for_backward(inputs)
        ctx.weight, ctx.stage = weight, stage
        return inputs @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        (inputs,) = ctx.saved_tensors
        return input_half(gradient, inputs.detach(), ctx.weight, ctx.stage.deferred), None, None


def split(stage):
    """Let every linear layer of the stage defer the gradient of its weight."""
    stage.deferred = []
    for module in stage.modules():
        if isinstance(module, nn.Linear):
            module.forward = partial(_linear, module.weight, stage)


def _linear(weight, stage, inputs):
    return SplitLinear.apply(inputs, weight, stage)


def backward_input(stage, k, held, sends):
    """The half I of micro-batch `k`, as `backward`. Returns a function that runs its half W."""
    backward(stage, k, held, sends)
    deferred, stage.deferred = stage.deferred, []
    return partial(weight_half, deferred)


def zb_h1_step(stage, inputs, targets):
    """One step of this rank. Returns the loss on the last rank, None elsewhere."""
    held, sends, shares, later = {}, [], [], deque()
    rank = dist.get_rank()
    warm_up = min(len(inputs), dist.get_world_size() - 1 - rank)
    for k in range(warm_up):
        shares.append(forward(stage, k, inputs, targets, held, sends))
    for k in range(len(inputs) - warm_up):
        shares.append(forward(stage, warm_up + k, inputs, targets, held, sends))
        later.append(backward_input(stage, k, held, sends))
        if len(later) > rank:
            later.popleft()()
    for k in range(len(inputs) - warm_up, len(inputs)):
        later.append(backward_input(stage, k, held, sends))
        later.popleft()()
    while later:
        later.popleft()()
    for send in sends:
        send.wait()
    return sum(shares) if stage.following is None else None
