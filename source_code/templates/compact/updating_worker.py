"""Performs a rank's list of actions where stage r is on rank r."""

from collections import deque

from pipeline.distributed import Receiving, Sending


class Worker:
    """Performs one rank's list of actions; stage r is on rank r."""

    def __init__(self, job, order, stage, shape, dtype, record):
        self.job, self.order, self.stage, self.record = job, order, stage, record
        self.shape, self.dtype = shape, dtype  # of an activation: (micro-batch size, length, dim)

    def run_step(self, inputs, targets):
        """Run all actions once; `record` takes the loss of each mini-batch on the last rank."""
        stage, self.sent = self.stage, deque()
        previous, following = self.job.rank - 1, self.job.rank + 1
        for _, kind, k in self.order:
            if kind == "F":
                x = inputs[k] if stage.is_first else self.receive(previous, f"activation {k}")
                output = stage.forward(k, x, targets[k])
                if stage.is_last:
                    self.record(k, output)
                else:
                    self.send(output, following, f"activation {k}")
            elif kind == "B":
                gradient = None if stage.is_last else self.receive(following, f"gradient {k}")
                gradient = stage.backward(k, gradient)
                if not stage.is_first:
                    self.send(gradient, previous, f"gradient {k}")
            else:
                stage.update(k)
        while self.sent:
            self.sent.popleft().wait()

    def receive(self, source, what):
        return Receiving(self.job, self.shape, self.dtype, source, what).wait()

    def send(self, tensor, destination, what):
        self.sent.append(Sending(self.job, tensor, destination, what))
        if len(self.sent) > 2 * self.job.num_ranks:  # that one has long been used: let go of it
            self.sent.popleft().wait()
