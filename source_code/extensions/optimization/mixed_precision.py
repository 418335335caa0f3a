# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: forwards and backwards in 16 bits, master weights in 32 bits.

A bfloat16 number has 8 significant bits. An update is often smaller than a 256th of its weight and
would be rounded away, and a sum of many micro-batches' gradients would stop growing. So every part
of the model exists twice. A copy in bfloat16 runs forwards and backwards. The master in float32
accumulates the gradients of all micro-batches, and the optimizer updates it (Micikevicius et al.
2018, 1710.03740, section 3.1; bfloat16 needs no scaling of the loss).

Torch's own norm of 16-bit numbers also computes in float32, but keeps four times the bytes of its
input for the backward. The copy's norms keep the input and one number per row.
"""

import copy
from functools import partial

import torch


def computing_copy(master, dtype):
    """Return a copy of `master` in `dtype` whose gradients are added to those of `master`.

    If `dtype` is that of the master, the result is the master itself. Buffers keep their type
    unless they are among the part's `tables`, because Hugging Face's rotary frequencies in 16 bits
    would put tokens at wrong positions.
    """
    if all(weight.dtype == dtype for weight in master.parameters()):
        return master
    part = copy.deepcopy(master)
    for weight in part.parameters():
        weight.data = weight.data.to(dtype)
    for name in getattr(part, "tables", ()):
        setattr(part, name, getattr(part, name).to(dtype))
    for weight, updated in zip(part.parameters(), master.parameters()):
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(partial(hand_over, updated))
    for module in part.modules():
        if type(module) is torch.nn.RMSNorm and dtype.itemsize < 4:
            module.forward = partial(frugal_norm, module)
    return part


def frugal_norm(module, x):
    """What `module`, an RMSNorm, returns for x (..., dim) in 16 bits."""
    return NormOf16Bits.apply(x, module.weight, module.eps)


class NormOf16Bits(torch.autograd.Function):
    """RMSNorm computed in float32; its backward needs the 16-bit input and one number per row."""

    @staticmethod
    def forward(context, x, weight, epsilon):
        wide = x.float()
        root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        context.save_for_backward(x, weight, root)
        return (wide * root * weight).to(x.dtype)

    @staticmethod
    def backward(context, gradient):
        x, weight, root = context.saved_tensors
        rows, gradient = x.float() * root, gradient.float()
        of_weight = (gradient * rows).flatten(0, -2).sum(0).to(weight.dtype)
        gradient = gradient * weight
        of_x = root * (gradient - rows * (gradient * rows).mean(-1, keepdim=True))
        return of_x.to(x.dtype), of_weight, None


def hand_over_deferred(stage, master):
    """Let split backwards of `stage`, which computes with a copy, add to the master's gradients.

    The backward for the weights adds gradients without autograd, so no hook runs for them.
    """
    if stage.part is master or not hasattr(stage, "backward_weight"):
        return
    backward_weight = stage.backward_weight

    def and_hand_over(microbatch):
        backward_weight(microbatch)
        for updated, weight in zip(master.parameters(), stage.part.parameters()):
            hand_over(updated, weight)

    stage.backward_weight = and_hand_over


@torch.no_grad()
def hand_over(updated, weight):
    """Add a gradient that has just been computed to the master's, and free it."""
    if weight.grad is None:  # a backward for the input defers the weights
        return
    gradient = weight.grad.to(updated.dtype)
    updated.grad = gradient if updated.grad is None else updated.grad.add_(gradient)
    weight.grad = None


@torch.no_grad()
def refresh(part, master):
    """Copy the master's weights, rounded, into the computing copy; call it after an update."""
    if part is not master:
        for weight, updated in zip(part.parameters(), master.parameters()):
            weight.copy_(updated)
