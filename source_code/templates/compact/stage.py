"""One stage of the model at work."""

import torch


class Stage:
    """Stage `index` of `num_stages`; the last one has the loss."""

    def __init__(self, part, index, num_stages, loss_function):
        self.part, self.index, self.loss_function = part, index, loss_function
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.held = {}  # micro-batch -> (input, output), from its forward to its backward

    def forward(self, k, inputs, targets=None):
        """Run micro-batch `k` forward; returns the activation for the next stage, or the loss."""
        if not self.is_first:
            inputs.requires_grad_()
        output = self.part(inputs)
        if self.is_last:
            output = self.loss_function(output, targets)
        self.held[k] = inputs, output
        return output.detach()

    def backward(self, k, gradient=None):
        """Run micro-batch `k` backward from the output's gradient; returns that of the input."""
        inputs, output = self.held.pop(k)
        torch.autograd.backward(output, gradient)
        return None if self.is_first else inputs.grad
