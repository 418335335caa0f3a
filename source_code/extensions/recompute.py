# SPDX-License-Identifier: Apache-2.0
"""Activation recomputation: keeps little of a forward, and runs it again before its backward.

A backward needs the intermediate results of its forward. Most of a step lies between the two, and
`Stage` keeps all of them for that time. The stages here keep only some, from which they compute the
rest again (GPipe: Huang et al. 2019, section 2.3, "re-materialization"). The same operations on the
same numbers give the same results, so no digit of the training changes.
"""

from contextlib import contextmanager
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from pipeline.model import cut_evenly
from pipeline.split_stage import SplitStage
from pipeline.stage import Stage

MODES = {
    "none": "everything is kept",
    "stage": "the inputs of --pieces equal parts of a stage are kept, one unless given",
    "layer": "the input of every layer is kept",
    "selective": "everything but the inside of attention is kept",
}


def recomputing(stage, mode, num_pieces=1):
    """Return `stage` itself, or one like it, that recomputes by `mode`, a key of MODES.

    In mode `stage` the stage is divided into `num_pieces` pieces, each of which keeps its input;
    there are at most as many pieces as layers.
    """
    if mode == "selective":
        recompute_attention(stage)
    if mode in ("none", "selective"):
        return stage
    num_pieces = num_pieces if mode == "stage" else len(stage.part.layers)
    chosen = PiecewiseSplitStage if isinstance(stage, SplitStage) else PiecewiseStage
    num_stages = stage.index + 1 if stage.is_last else stage.index + 2
    return chosen(num_pieces, stage.part, stage.index, num_stages, stage.loss_function)


class Pieces:
    """A stage divided into `num_pieces` pieces of layers, which keeps only their inputs.

    Its backward goes through the pieces from the last to the first, and runs each piece's forward
    again before its backward. So at any time only the activations inside one piece of one
    micro-batch exist. In a split backward the weight gradients need the recomputed inputs of the
    matrices, too, which are kept until then as those of a first forward would be.
    """

    def __init__(self, num_pieces, part, index, num_stages, loss_function):
        super().__init__(part, index, num_stages, loss_function)
        self.pieces = cut_evenly(len(part.layers), num_pieces)
        self.generators = {}  # micro-batch -> the generators' states before each piece

    def run_forward(self, microbatch, inputs, targets):
        """Run the forward as Stage does, without a graph: `held` has the input of every piece."""
        kept, states, x = [], [], inputs
        with torch.no_grad():
            for piece in self.pieces:
                kept.append(x)
                before = generators_of(x)
                x = self.run_piece(piece, x, targets)
                states.append(needed_again(before, x))
        self.held[microbatch], self.generators[microbatch] = (kept, targets), states
        return x

    def run_backward(self, microbatch, gradient):
        """Run the backward as Stage does, after running each piece's forward again."""
        (kept, targets), states = self.held[microbatch], self.generators.pop(microbatch)
        for piece in reversed(self.pieces):
            x = kept[-1]
            if x.is_floating_point():  # tokens have no gradient
                x.requires_grad_()
            with drawing_again(states.pop()):
                output = self.run_again(partial(self.run_piece, piece, targets=targets), x)
            if output.requires_grad:  # not of the first layers, if they are frozen
                torch.autograd.backward(output, gradient)
            gradient = x.grad
            kept.pop()
        del self.held[microbatch]
        return gradient

    def run_again(self, function, *inputs):
        return function(*inputs)

    def run_piece(self, piece, x, targets):
        x = self.part(x, start=piece[0], end=piece[1])
        is_end = self.is_last and piece == self.pieces[-1]
        return self.loss_function(x, targets) if is_end else x

    def kept(self, microbatch):
        """Return the inputs of the pieces whose backward has not run yet."""
        return list(self.held[microbatch][0]) if microbatch in self.held else []


def generators_of(x):
    """The states of the random generators, on the host and on the device of `x`."""
    return torch.get_rng_state(), get_device_states(x)


def needed_again(before, x):
    """The states `before` a forward to `x` if it has drawn random numbers, such as dropout's."""
    on_host, (_, on_devices) = generators_of(x)
    same = torch.equal(on_host, before[0]) and all(map(torch.equal, on_devices, before[1][1]))
    return None if same else before


@contextmanager
def drawing_again(generators):
    """A context in which the random numbers are those that followed `generators`, if any."""
    if generators is None:
        yield
        return
    on_host, on_devices = generators
    with torch.random.fork_rng(on_devices[0]):
        torch.set_rng_state(on_host)
        set_device_states(*on_devices)
        yield


class PiecewiseStage(Pieces, Stage):
    """A Stage that recomputes piece by piece."""


class PiecewiseSplitStage(Pieces, SplitStage):
    """A SplitStage that recomputes piece by piece."""


def recompute_attention(stage):
    """Let each attention of `stage` keep queries, keys, values, and mix them again in its backward.

    The scores of all positions with all others, which a plain implementation keeps, grow with the
    square of the length and are cheap to work out (Korthikanti et al. 2022, section 5).
    """
    stage.run_again = lambda function, *inputs: function(*inputs)
    for layer in stage.part.layers.values():
        layer.attention.mix = partial(checkpointed, stage, layer.attention.mix)


def checkpointed(stage, mix, *inputs):
    """What `mix(*inputs)` returns, (batch, heads, length, head_dim); the backward mixes again."""
    # `checkpoint` calls what it is given twice: now, and in the backward.
    states = [generators_of(inputs[0])]

    def first(*inputs):
        output = mix(*inputs)
        states[0] = needed_again(states[0], output)
        return output

    def again(*inputs):
        with drawing_again(states[0]):
            return stage.run_again(mix, *inputs)

    calls = iter((first, again))
    options = {"use_reentrant": False, "preserve_rng_state": False}  # `again` restores it
    return checkpoint(lambda *inputs: next(calls)(*inputs), *inputs, **options)
