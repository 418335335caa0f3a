"""Performs a rank's list of actions, with stages on whatever ranks the schedule has them."""

import os
import sys
from collections import deque

import torch
import torch.distributed as dist

from pipeline.distributed import fitting


class Worker:
    """Performs one rank's list of actions; all ranks know the whole schedule."""

    def __init__(self, job, orders, stages, shape, dtype):
        self.job, self.orders, self.stages = job, orders, stages
        self.shape, self.dtype = shape, dtype  # of an activation: (micro-batch size, length, dim)
        self.ranks = {stage: rank for rank, order in enumerate(orders) for stage, _, _ in order}

    def run_step(self, inputs, targets):
        """Run the whole schedule once. Returns the loss where the last stage is, else None."""
        self.sent, self.here, losses = [], {}, {}
        self.expected = [deque(self.messages_of(order)) for order in self.orders]
        for action in self.orders[self.job.rank]:
            index, kind, k = action
            stage = self.stages[index]
            if kind == "F":
                x = inputs[k] if stage.is_first else self.receive((index - 1, "F", k))
                output = stage.forward(k, x, targets[k])
                if stage.is_last:
                    losses[k] = output
                else:
                    self.send(fitting(stage, output, self.shape, self.dtype), action, index + 1)
            else:
                gradient = None if stage.is_last else self.receive((index + 1, "B", k))
                gradient = stage.backward(k, gradient)
                if not stage.is_first:
                    self.send(gradient, action, index - 1)
        for work, _ in self.sent:
            work.wait()
        return sum(losses.values()) if losses else None

    def messages_of(self, order):
        """The actions of a rank whose results go to this one, in order."""
        for stage, kind, k in order:
            consumer = self.ranks.get(stage + (1 if kind == "F" else -1))
            if consumer == self.job.rank:
                yield stage, kind, k

    def receive(self, wanted):
        """What another action made. From a rank, messages are taken in the order of its sends."""
        source = self.ranks[wanted[0]]
        while wanted not in self.here:
            made, buffer = (
                self.expected[source].popleft(),
                torch.empty(self.shape, dtype=self.dtype),
            )
            buffer = buffer.to(self.job.transport)
            try:
                dist.recv(buffer, source, group=self.job.channels["activation"])
            except RuntimeError as error:
                reason = f"rank {self.job.rank} got no {made} from rank {source}: {error}"
                print(reason.splitlines()[0].split(". ")[0], file=sys.stderr, flush=True)
                os._exit(1)
            self.here[made] = buffer.to(self.job.device)
        return self.here.pop(wanted)

    def send(self, tensor, action, consumer):
        """Hand what `action` made to stage `consumer`, here or on another rank."""
        destination = self.ranks[consumer]
        if destination == self.job.rank:
            self.here[tuple(action)] = tensor
        else:
            buffer = tensor.detach().to(self.job.transport).contiguous()
            work = dist.isend(buffer, destination, group=self.job.channels["activation"])
            self.sent.append((work, buffer))
