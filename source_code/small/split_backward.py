# SPDX-License-Identifier: Apache-2.0
"""The backward of a linear layer in two halves: for its input, and later for its weight (lesson 09).

    python split_backward.py

The half for the input is what the stage before waits for; the half for the weight can fill a bubble.
Zero Bubble: Qi et al. 2023, arXiv 2401.10241, section 2. The program needs torch and nothing else.
"""

import sys
from functools import partial

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def input_half(gradient, inputs, weight, deferred):
    """Backward of y = x Aᵀ for x: returns its gradient, and leaves in `deferred` what W needs."""
    deferred.append((weight, inputs, gradient))
    return gradient @ weight


def weight_half(deferred):
    """Add what was deferred to the gradients of the weights, and empty the list."""
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
    """Let every linear layer of the stage (none has a bias) defer the gradient of its weight."""
    stage.deferred = []
    for module in stage.modules():
        if type(module) is nn.Linear:  # a subclass may compute something else
            module.forward = partial(_linear, module.weight, stage)


def _linear(weight, stage, inputs):
    return SplitLinear.apply(inputs, weight, stage)


def take_deferred(stage):
    """Return a function that runs the half W of all backwards since the last call."""
    deferred, stage.deferred = stage.deferred, []
    return partial(weight_half, deferred)


def main():
    """Run both halves of a small stage, and compare their work and gradients with autograd's."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [nn.Linear(16, 64, bias=False), nn.Tanh(), nn.Linear(64, 16, bias=False)]
    stage = nn.Sequential(*layers).double()
    inputs = torch.rand(8, 16, dtype=torch.float64, requires_grad=True)

    with FlopCounterMode(display=False) as whole:
        output = stage(inputs).square().mean()
        forward_flops = whole.get_total_flops()
        output.backward()
    expected = [tensor.grad for tensor in (inputs, *stage.parameters())]
    inputs.grad = None
    stage.zero_grad()

    split(stage)
    output = stage(inputs).square().mean()
    with FlopCounterMode(display=False) as half_i:
        output.backward()
    no_weight_yet = all(weight.grad is None for weight in stage.parameters())
    with FlopCounterMode(display=False) as half_w:
        take_deferred(stage)()
    found = [tensor.grad for tensor in (inputs, *stage.parameters())]
    largest = max((a - b).abs().max().item() for a, b in zip(expected, found))

    print(f"whole backward  {whole.get_total_flops() - forward_flops} FLOPs")
    print(f"half I          {half_i.get_total_flops()} FLOPs, weights untouched: {no_weight_yet}")
    print(f"half W          {half_w.get_total_flops()} FLOPs")
    print(f"largest difference of a gradient: {largest:.1e}")


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit("split_backward.py has no flags; leave them out")
    main()
