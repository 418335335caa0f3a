# SPDX-License-Identifier: Apache-2.0
"""Runs pretrain_llama.py with a reader's feed-forward network; build_llama.py reads the output.

One argument: a JSON file with the function and the program's flags (see request.py).
"""

import runpy
import shlex
import sys
from pathlib import Path

import torch

from course.building.request import errors_told, read_request
from pipeline import model

PROGRAM = Path(__file__).resolve().parents[2] / "pretrain_llama.py"


def main():
    """Replace the forward of the feed-forward network by the reader's function; run the program."""
    request, [function] = read_request(sys.argv[1])
    check_alone(function)

    def forward(layer, x):
        with errors_told():
            return function(x, layer.gate.weight, layer.up.weight, layer.down.weight)

    model.FeedForward.forward = forward
    sys.argv = [str(PROGRAM), *shlex.split(request["flags"])]
    runpy.run_path(str(PROGRAM), run_name="__main__")


def check_alone(function):
    """Exit with a message if the output has another shape than x, or an input gets no gradient."""
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    weights = [torch.randn(shape, dtype=torch.float64) for shape in ((6, 4), (6, 4), (4, 6))]
    for weight in (x, *weights):
        weight.requires_grad_()
    with errors_told():
        made = function(x, *weights)
    if not torch.is_tensor(made) or made.shape != x.shape:
        shape = tuple(made.shape) if torch.is_tensor(made) else type(made).__name__
        sys.exit(f"your layer returns {shape} for x of {tuple(x.shape)}; return the shape of x")
    made.square().sum().backward()
    names = [name for name, w in zip(("x", "gate", "up", "down"), (x, *weights)) if w.grad is None]
    if names:
        sys.exit(f"no gradient comes back to {', '.join(names)}: your layer leaves it out")


if __name__ == "__main__":
    main()
