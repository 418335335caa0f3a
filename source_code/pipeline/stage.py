"""One stage of the model at work: forward, backward in one or in two, what it holds in between."""

import torch

from pipeline.schedule import Action
from pipeline.split_backward import SplitBackward, catch_up, tensors_of


class Stage:
    """Stage `index` of `num_stages`.

    `part` is its ModelPart. `loss_function(scores, targets)` is used by the last stage only; it
    returns the micro-batch's share of the loss of the whole batch, so that the gradients of all
    micro-batches add up to the gradient of the batch.
    """

    def __init__(self, part, index, num_stages, recorder, loss_function):
        self.part = part
        self.index = index
        self.is_first = index == 0
        self.is_last = index == num_stages - 1
        self.recorder = recorder
        self.meter = recorder.meter
        self.loss_function = loss_function
        self.held = {}  # micro-batch -> (input, output), from its forward to its backward
        self.split = None  # a SplitBackward, once somebody asks for it
        self.put_off = {}  # micro-batch -> the work for its weights, from I to W

    def allow_split_backward(self):
        """Called before the first forward, when the schedule has backwards in two halves."""
        self.split = SplitBackward(self.part)

    def forward(self, microbatch, inputs, targets=None):
        """Run one micro-batch forward.

        `inputs` are tokens (b, length) on the first stage, else activations (b, length, dim).
        Returns the activation for the next stage, or on the last stage the loss, a scalar.
        """
        with self.recorder.record(Action(self.index, "F", microbatch)):
            if not self.is_first:
                inputs.requires_grad_()
            output = self.run_forward(microbatch, inputs, targets)
        output = output.detach()
        self.recorder.note(self, inputs, output)
        return output

    def backward(self, microbatch, gradient=None):
        """Run one micro-batch backward and add to the gradients of the weights.

        `gradient` is that of the output, (b, length, dim); None on the last stage. Returns the
        gradient of the input for the previous stage, None on the first stage.
        """
        with self.recorder.record(Action(self.index, "B", microbatch)):
            input_gradient = self.run_backward(microbatch, gradient)
        self.meter.release((self.index, microbatch))
        self.recorder.note(self, gradient, input_gradient)
        return input_gradient

    def backward_input(self, microbatch, gradient=None):
        """Run the half of the backward that the stage before waits for.

        Arguments and result are those of `backward`. Of what the forward had kept, only the inputs
        of the linear layers stay, with the gradients of their outputs, until `backward_weight`.
        """
        with self.recorder.record(Action(self.index, "I", microbatch)):
            with self.split.putting_off() as work:
                input_gradient = self.run_backward(microbatch, gradient)
        self.put_off[microbatch] = work
        self.meter.hold((self.index, microbatch), tensors_of(work))
        self.recorder.note(self, gradient, input_gradient)
        return input_gradient

    def backward_weight(self, microbatch):
        """Run the other half, and add to the gradients of the weights."""
        with self.recorder.record(Action(self.index, "W", microbatch)):
            catch_up(self.put_off.pop(microbatch))
        self.meter.release((self.index, microbatch))
        self.recorder.note(self)

    def gathered(self):
        """What the backwards so far have added up for the weights, as a list of tensors."""
        return [weight.grad for weight in self.part.parameters() if weight.grad is not None]

    def run_forward(self, microbatch, inputs, targets):
        """The work of a forward: the output, with the graph that its backward needs in `held`."""
        weights = [*self.part.parameters(), *self.part.buffers()]
        with self.meter.holding(weights, (self.index, microbatch)):
            output = self.part(inputs)
            if self.is_last:
                output = self.loss_function(output, targets)
        self.held[microbatch] = (inputs, output)
        return output

    def run_backward(self, microbatch, gradient):
        """The work of a backward: the gradient of the input, None on the first stage."""
        inputs, output = self.held.pop(microbatch)
        torch.autograd.backward(output, gradient)
        return None if self.is_first else inputs.grad
