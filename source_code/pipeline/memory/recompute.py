"""Keeps little of a forward, and runs it again when its backward needs the rest.

A backward needs what its forward computed on the way. Between the two lies most of a step, and
`Stage` keeps everything for that long. The stages here keep only some of it, from which the rest
can be worked out once more (GPipe: Huang et al. 2019, section 2.3, "re-materialization"). The same
operations on the same numbers have the same results, so no digit of the training changes.
"""

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from pipeline.held import HeldMeter
from pipeline.model import cut_evenly
from pipeline.split_backward import tensors_of
from pipeline.stage import Stage

MODES = {
    "none": "everything is kept",
    "stage": "the inputs of --pieces equal parts of a stage are kept, one unless given",
    "layer": "the input of every layer is kept",
    "selective": "everything but the inside of attention is kept",
}


def build_recomputing_stage(mode, num_pieces, part, index, num_stages, recorder, loss_function):
    """A Stage that recomputes as `mode`, a key of MODES, says; the rest is what Stage takes.

    `num_pieces` is how many parts of the stage keep their input in mode `stage`, at most as many as
    it has layers.
    """
    if mode in ("stage", "layer"):
        num_pieces = num_pieces if mode == "stage" else len(part.layers)
        return PiecewiseStage(part, index, num_stages, recorder, loss_function, num_pieces)
    if mode == "selective":
        recompute_attention(part, recorder)
    return Stage(part, index, num_stages, recorder, loss_function)


class PiecewiseStage(Stage):
    """A stage in `num_pieces` runs of layers, of which it keeps the inputs and nothing else.

    Its backward goes through the pieces from the last to the first: run the piece's forward again,
    then its backward. So the insides of one piece of one micro-batch are there at a time. In a
    backward in two halves the weights' half needs the recomputed inputs of the matrices, too: they
    stay until then, as those of a first forward would.
    """

    def __init__(self, part, index, num_stages, recorder, loss_function, num_pieces):
        super().__init__(part, index, num_stages, recorder, loss_function)
        self.pieces = cut_evenly(len(part.layers), num_pieces)
        self.weights = [*part.parameters(), *part.buffers()]

    def run_forward(self, microbatch, inputs, targets):
        """As that of Stage, without a graph: `held` has the input of every piece."""
        kept, x = [], inputs
        with torch.no_grad():
            for piece in self.pieces:
                kept.append(x)
                x = self.run_piece(piece, x, targets)
        self.held[microbatch] = kept, targets
        self.meter.hold((self.index, microbatch), kept)
        return x

    def run_backward(self, microbatch, gradient):
        """As that of Stage, after running forward again what it goes back through."""
        kept, targets = self.held.pop(microbatch)
        recomputed = (self.index, microbatch, "recomputed")
        for piece in reversed(self.pieces):
            x = kept.pop()
            if x.is_floating_point():  # tokens have no gradient
                x.requires_grad_()
            with self.recorder.recomputing(), self.meter.holding(self.weights, recomputed):
                output = self.run_piece(piece, x, targets)
            torch.autograd.backward(output, gradient)
            gradient = x.grad
            self.meter.release(recomputed)
            put_off = tensors_of(self.split.work or []) if self.split else []
            self.meter.hold((self.index, microbatch), kept + put_off)
        return gradient

    def run_piece(self, piece, x, targets):
        x = self.part(x, start=piece[0], end=piece[1])
        is_end = self.is_last and piece == self.pieces[-1]
        return self.loss_function(x, targets) if is_end else x


def recompute_attention(part, recorder):
    """Let every attention in `part` keep queries, keys and values, and mix them again.

    The scores of all positions with all others, which a plain implementation keeps, grow with the
    square of the length and are cheap to work out (Korthikanti et al. 2022, section 5).
    """
    for layer in part.layers.values():
        layer.attention.mix = partial(_checkpointed, layer.attention.mix, recorder)


def _checkpointed(mix, recorder, *inputs):
    # `checkpoint` calls what it is given twice: now, and in the backward.
    calls = iter((mix, partial(_mix_again, mix, recorder)))
    # Nothing in `mix` is random; with dropout in it the generator's state has to be kept, too.
    options = {"use_reentrant": False, "preserve_rng_state": False}
    return checkpoint(lambda *inputs: next(calls)(*inputs), *inputs, **options)


def _mix_again(mix, recorder, *inputs):
    if recorder.meter.active:
        # Here the hooks of `checkpoint` see what is saved, and nobody else's: look on the side. With
        # a meter of its own, since by now the backward has let go of memory that is used again.
        inside = HeldMeter()
        with inside.holding([x for x in inputs if x is not None], "attention"):
            mix(*inputs)
        recorder.meter.hold_for_a_moment(inside.peak)
    with recorder.recomputing():
        return mix(*inputs)
