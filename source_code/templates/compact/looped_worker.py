"""Performs a rank's list of actions where stage s is on rank s modulo the number of ranks."""

from collections import deque

from pipeline.distributed import Receiving, Sending


class Worker:
    """Performs one rank's list of actions; stage s is on rank s modulo the number of ranks."""

    def __init__(self, job, order, stages, shape, dtype):
        self.job, self.order, self.stages = job, order, stages
        self.shape, self.dtype = shape, dtype  # of an activation: (micro-batch size, length, dim)

    def run_step(self, inputs, targets):
        """Run all actions once. Returns the loss of the batch on the last rank, else None."""
        self.sent, self.here, losses = deque(), {}, []
        for index, kind, k in self.order:
            stage = self.stages[index]
            if kind == "F":
                x = inputs[k] if stage.is_first else self.take("activation", k, index, -1)
                output = stage.forward(k, x, targets[k])
                if stage.is_last:
                    losses.append(output)
                else:
                    self.give(output, "activation", k, index, 1)
            else:
                gradient = None if stage.is_last else self.take("gradient", k, index, 1)
                gradient = stage.backward(k, gradient)
                if not stage.is_first:
                    self.give(gradient, "gradient", k, index, -1)
        while self.sent:
            self.sent.popleft().wait()
        return sum(losses) if losses else None

    def take(self, what, k, index, step):
        """What stage `index + step` made: from here if that is this rank's, too."""
        source = (self.job.rank + step) % self.job.num_ranks
        if source == self.job.rank:
            return self.here.pop((what, k, index))
        return Receiving(self.job, self.shape, self.dtype, source, f"{what} {k}").wait()

    def give(self, tensor, what, k, index, step):
        """Hand a result to stage `index + step`; each takes them in the order in which they come."""
        destination = (self.job.rank + step) % self.job.num_ranks
        if destination == self.job.rank:
            self.here[what, k, index + step] = tensor
        else:
            self.sent.append(Sending(self.job, tensor, destination, f"{what} {k}"))
