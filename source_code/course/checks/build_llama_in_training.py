# SPDX-License-Identifier: Apache-2.0
"""Runs pretrain_llama.py with a reader's feed-forward network; build_llama.py reads the output."""

import os
import runpy
import shlex
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from course.building.messages import tell
from course.building.on_ranks import functions_of
from pipeline import model

PROGRAM = Path(__file__).resolve().parents[2] / "pretrain_llama.py"


def main(request, function):
    """Replace the forward of the feed-forward network by the reader's function; run the program."""
    if complaint := complaint_of(function):
        tell("report", value=complaint)
        return
    # Defined again, without anything that `function` has kept from the call above, and with other
    # random numbers than on another rank.
    torch.manual_seed(int(os.environ["RANK"]))
    (trained,) = functions_of(request)

    def forward(layer, x):
        return trained(x, layer.gate.weight, layer.up.weight, layer.down.weight)

    model.FeedForward.forward = forward
    sys.argv = [str(PROGRAM), *shlex.split(request["flags"])]
    try:
        runpy.run_path(str(PROGRAM), run_name="__main__")
    except SystemExit as end:  # with 0, as the program ends
        if end.code:
            raise


def complaint_of(function):
    """The sentence on a wrong output, an unchanged layer or an absent gradient; or None."""
    x = torch.randn(5, 3, 4, dtype=torch.float64)  # the training has two rows
    weights = [torch.randn(shape, dtype=torch.float64) for shape in ((6, 4), (6, 4), (4, 6))]
    for weight in (x, *weights):
        weight.requires_grad_()
    made = function(x, *weights)
    if not torch.is_tensor(made) or made.shape != x.shape:
        shape = tuple(made.shape) if torch.is_tensor(made) else type(made).__name__
        return f"your layer returns {shape} for x of {tuple(x.shape)}; return the shape of x"
    if made.dtype != x.dtype:
        return f"your layer returns {made.dtype} for x of {x.dtype}; return the dtype of x"
    if not made.isfinite().all():
        return (
            "your layer returns a nan or an infinite number: is there the root or the logarithm of a "
            "negative number, or a division by zero?"
        )
    gate, up, down = weights
    if torch.allclose(made, (F.silu(x @ gate.T) * (x @ up.T)) @ down.T):
        return "that is the feed-forward network that the model has already; change something in it"
    if not made.requires_grad:
        return (
            "no gradient comes back: nothing leads from your layer's result to x and the matrices"
        )
    made.square().sum().backward()
    names = [
        name
        for name, w in zip(("x", "gate", "up", "down"), (x, *weights))
        if w.grad is None or not w.grad.any()
    ]
    if names:
        return (
            f"no gradient comes back to {', '.join(names)}: your layer leaves it out, or its "
            "derivative is zero"
        )
