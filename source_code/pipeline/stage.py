"""One stage of the model at work: forward, backward, and what it keeps in between."""

import torch


class Stage:
    """Stage `index` of `num_stages`.

    `part` is its ModelPart. `loss_function(scores, targets)` is used by the last stage only: it
    returns the micro-batch's share of the loss of the whole batch, so that the gradients of all
    micro-batches add up to the gradient of the batch.
    """

    def __init__(self, part, index, num_stages, loss_function):
        self.part, self.index, self.loss_function = part, index, loss_function
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.held = {}  # micro-batch -> (input, output), from its forward to its backward

    def forward(self, microbatch, inputs, targets=None):
        """Run one micro-batch forward.

        `inputs` are tokens (b, length) on the first stage, else activations (b, length, dim).
        Returns the activation for the next stage, or on the last stage the loss, a scalar.
        """
        if not self.is_first:
            inputs.requires_grad_()
        return self.run_forward(microbatch, inputs, targets).detach()

    def backward(self, microbatch, gradient=None):
        """Run one micro-batch backward and add to the gradients of the weights.

        `gradient` is that of the output, (b, length, dim); None on the last stage. Returns the
        gradient of the input for the previous stage, None on the first stage.
        """
        return self.run_backward(microbatch, gradient)

    def run_forward(self, microbatch, inputs, targets):
        output = self.part(inputs)
        if self.is_last:
            output = self.loss_function(output, targets)
        self.held[microbatch] = inputs, output
        return output

    def run_backward(self, microbatch, gradient):
        inputs, output = self.held.pop(microbatch)
        torch.autograd.backward(output, gradient)
        return None if self.is_first else inputs.grad
