# SPDX-License-Identifier: Apache-2.0
"""A stage with expert layers: their auxiliary losses enter its own backward.

The loss of a batch is the mean over its tokens plus the auxiliary losses of all layers of all
stages. A derivative of a sum is the sum of the derivatives, so the auxiliary loss of a stage needs
no message: its gradient starts on the rank of the stage, in the backward of the same micro-batch,
and reaches the stages before with the gradient of the input. Only the number that is printed has
to be collected.
"""

import torch

from extensions.experts.expert_layer import expert_layers
from extensions.pretraining.padding import PADDING
from pipeline.collectives import Summing
from pipeline.split_stage import SplitStage


class ExpertStage(SplitStage):
    """A SplitStage that adds `factor` times the sequences' auxiliary losses to the batch's loss.

    `factor` is that of the Routing over the number of sequences of the batch. `auxiliary` adds up
    this stage's share of the loss.
    """

    def __init__(self, part, index, num_stages, loss_function, factor):
        super().__init__(part, index, num_stages, loss_function)
        self.factor, self.auxiliary = factor, 0.0

    def run_forward(self, microbatch, inputs, targets):
        mark_padding(self.part, targets)
        output = super().run_forward(microbatch, inputs, targets)
        auxiliary = self.factor * auxiliary_loss(self.part)
        self.held[microbatch] = inputs, [output, auxiliary]
        self.auxiliary += auxiliary.item()
        return output

    def run_backward(self, microbatch, gradient):
        inputs, outputs = self.held.pop(microbatch)
        torch.autograd.backward(outputs, [gradient, None])
        return None if self.is_first else inputs.grad


def mark_padding(part, targets):
    """Tell the expert layers which tokens are real."""
    for layer in expert_layers(part).values():
        layer.real = targets != PADDING


def auxiliary_loss(part):
    """The auxiliary losses of the last forward, summed over the part's layers and the sequences."""
    return sum(layer.auxiliary for layer in expert_layers(part).values())


def total_loss(job, loss, stages):
    """Return the loss of the batch with all auxiliary losses, on every rank.

    `loss` is this rank's share of the mean over the tokens, None on ranks without the last stage.
    """
    total = torch.zeros(1, dtype=torch.float64, device=job.device)
    total += sum(stage.auxiliary for stage in stages) + (0.0 if loss is None else loss.detach())
    for stage in stages:
        stage.auxiliary = 0.0
    ranks = tuple(range(job.num_ranks))
    if job.num_ranks > 1:
        Summing(job, [total], ranks, "its share of the loss").wait()
    return total[0]
