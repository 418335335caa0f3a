"""A stage whose backward uses the weights that its forward used."""

import torch
from torch.func import functional_call


class StashingStage:
    """A stage whose backward uses the weights that its forward used (weight stashing)."""

    def __init__(self, part, index, num_stages, loss_function, optimizer):
        self.part, self.index = part, index
        self.loss_function, self.optimizer = loss_function, optimizer
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.held = {}  # mini-batch -> (input, output, weights), from its forward to its backward

    def forward(self, k, inputs, targets=None):
        """Run mini-batch `k` forward; returns the activation for the next stage, or the loss."""
        # .data lets autograd overlook that an update comes before the backward.
        weights = {name: p.data.requires_grad_() for name, p in self.part.named_parameters()}
        if not self.is_first:
            inputs.requires_grad_()
        output = functional_call(self.part, weights, (inputs,))
        if self.is_last:
            output = self.loss_function(output, targets)
        self.held[k] = inputs, output, weights
        return output.detach()

    def backward(self, k, gradient=None):
        """Run mini-batch `k` backward; the gradients of the weights are kept for `update`."""
        inputs, output, weights = self.held.pop(k)
        wanted = [*weights.values()] + ([] if self.is_first else [inputs])
        gradients = torch.autograd.grad(output, wanted, gradient)
        self.gradients = gradients[: len(weights)]
        return None if self.is_first else gradients[-1]

    def update(self, k):
        """Update a copy of the weights: those that mini-batches under way use stay as they are."""
        for parameter, gradient in zip(self.part.parameters(), self.gradients):
            parameter.data = parameter.data.clone()
            parameter.grad = gradient
        self.optimizer.step()
