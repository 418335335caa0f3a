# SPDX-License-Identifier: Apache-2.0
"""An embedding and a head that share one matrix, with the piece of case 8."""

from broken.pipelines.faults import RANKS
from pipeline.message import Message
from pipeline.model import starting_weight
from pipeline.one_process import build_model


def start_tied(part, arguments):
    """Start the embedding and the head, whichever the part has, as the same matrix."""
    for module in (getattr(part, "embedding", None), getattr(part, "head", None)):
        if module is not None:
            matrix = starting_weight("head.weight", module.weight.shape, arguments.seed)
            module.weight.data.copy_(matrix)


class TiedGradient(Message):
    """What a stage has gathered for the matrix that it shares."""

    def __str__(self):
        return f"the {self.what}"


def exchange_tied_gradient(job, stage, pieces):
    """Exchange the gradient of the tied matrix between the first and the last rank."""
    if not (stage.is_first or stage.is_last):
        return
    other, name = RANKS - 1 - job.rank, TiedGradient("gradient of the tied matrix", stage.index, 0)
    weight = stage.part.embedding.weight if stage.is_first else stage.part.head.weight
    receiving = job.receive(other, name, weight.shape, weight.dtype)
    job.send(weight.grad, other, name)
    weight.grad = pieces.tied_gradient(weight.grad, receiving.wait())


def build_tied_model(arguments, device):
    """The whole model; embedding and head are one matrix."""
    model = build_model(arguments, device)
    start_tied(model, arguments)
    model.head.weight = model.embedding.weight
    return model
