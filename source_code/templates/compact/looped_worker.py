"""Performs a rank's list of actions where stage s is on rank s modulo the number of ranks."""

import os
import sys

import torch
import torch.distributed as dist

from pipeline.distributed import fitting


class Worker:
    """Performs one rank's list of actions; stage s is on rank s modulo the number of ranks."""

    def __init__(self, job, order, stages, shape, dtype):
        self.job, self.order, self.stages = job, order, stages
        self.shape, self.dtype = shape, dtype  # of an activation: (micro-batch size, length, dim)

    def run_step(self, inputs, targets):
        """Run all actions once. Returns the loss of the batch where the last stage is, else None."""
        self.sent, self.here, losses = [], {}, []
        for index, kind, k in self.order:
            stage = self.stages[index]
            if kind == "F":
                x = inputs[k] if stage.is_first else self.receive("activation", k, index, -1)
                output = stage.forward(k, x, targets[k])
                if stage.is_last:
                    losses.append(output)
                else:
                    output = fitting(stage, output, self.shape, self.dtype)
                    self.send(output, "activation", k, index, 1)
            else:
                gradient = None if stage.is_last else self.receive("gradient", k, index, 1)
                gradient = stage.backward(k, gradient)
                if not stage.is_first:
                    self.send(gradient, "gradient", k, index, -1)
        for work, _ in self.sent:
            work.wait()
        return sum(losses) if losses else None

    def receive(self, what, k, index, step):
        """What stage `index + step` made. A rank that is lost or silent ends this one, too."""
        source = (self.job.rank + step) % self.job.num_ranks
        if source == self.job.rank:
            return self.here.pop((what, k, index))
        buffer = torch.empty(self.shape, dtype=self.dtype, device=self.job.transport)
        try:
            dist.recv(buffer, source, group=self.job.channels[what])
        except RuntimeError as error:
            reason = f"rank {self.job.rank} got no {what} {k} from rank {source}: {error}"
            print(reason.splitlines()[0].split(". ")[0], file=sys.stderr, flush=True)
            os._exit(1)
        return buffer.to(self.job.device)

    def send(self, tensor, what, k, index, step):
        """Hand a result to stage `index + step`; a rank takes them in the order in which they come."""
        destination = (self.job.rank + step) % self.job.num_ranks
        if destination == self.job.rank:
            self.here[what, k, index + step] = tensor
        else:
            buffer = tensor.detach().to(self.job.transport).contiguous()
            work = dist.isend(buffer, destination, group=self.job.channels[what])
            self.sent.append((work, buffer))
