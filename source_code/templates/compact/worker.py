"""Performs a rank's list of actions where stage r is on rank r."""

import os
import sys
from collections import deque

import torch
import torch.distributed as dist

from pipeline.distributed import fitting


class Worker:
    """Performs one rank's list of actions; the stages before and after are on its neighbours."""

    def __init__(self, job, order, stage, shape, dtype):
        self.job, self.order, self.stage = job, order, stage
        self.shape, self.dtype = shape, dtype  # of an activation: (micro-batch size, length, dim)

    def run_step(self, inputs, targets):
        """Run all actions once. Returns the loss of the batch on the last rank, else None."""
        stage, self.sent, losses = self.stage, deque(), []
        previous, following = self.job.rank - 1, self.job.rank + 1
        for _, kind, k in self.order:
            if kind == "F":
                x = inputs[k] if stage.is_first else self.receive(previous, "activation")
                output = stage.forward(k, x, targets[k])
                if stage.is_last:
                    losses.append(output)
                else:
                    output = fitting(stage, output, self.shape, self.dtype)
                    self.send(output, following, "activation")
            elif kind == "W":
                stage.backward_weight(k)
            elif kind == "U":
                stage.update(k)
            else:
                gradient = None if stage.is_last else self.receive(following, "gradient")
                gradient = stage.backward(k, gradient)
                if not stage.is_first:
                    self.send(gradient, previous, "gradient")
        while self.sent:
            self.sent.popleft()[0].wait()
        return sum(losses) if losses else None

    def receive(self, source, what):
        """Wait for a neighbour's message; a neighbour that is lost or silent ends this rank, too."""
        buffer = torch.empty(self.shape, dtype=self.dtype, device=self.job.transport)
        try:
            dist.recv(buffer, source, group=self.job.channels[what])
        except RuntimeError as error:
            reason = f"rank {self.job.rank} got no {what} from rank {source}: {error}"
            print(reason.splitlines()[0].split(". ")[0], file=sys.stderr, flush=True)
            os._exit(1)
        return buffer.to(self.job.device)

    def send(self, tensor, destination, what):
        """Send without waiting, but for what was sent so long ago that it has been used."""
        buffer = tensor.detach().to(self.job.transport).contiguous()
        self.sent.append((dist.isend(buffer, destination, group=self.job.channels[what]), buffer))
        if len(self.sent) > 2 * self.job.num_ranks:
            self.sent.popleft()[0].wait()
