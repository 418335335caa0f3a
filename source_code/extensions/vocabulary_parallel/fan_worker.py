# SPDX-License-Identifier: Apache-2.0
"""Performs the schedule of a pipeline whose vocabulary is spread over all ranks."""

from functools import reduce

import torch

from pipeline.message import Message
from pipeline.receives import OrderedReceives
from pipeline.schedule import message_of
from pipeline.worker import Worker


class FanWorker(Worker):
    """A Worker for a FanSchedule. The result of S on a rank is (3, micro-batch size, length)."""

    def __init__(self, job, schedule, stages):
        super().__init__(job, schedule, stages)
        self.loss_stage = 2 * schedule.num_ranks
        self.found_shape = 3, *job.shape[:2]
        self.found_dtype = torch.promote_types(job.dtype, torch.float32)

    def ordered_receives(self):
        return FanReceives(self)

    def forward(self, action):
        """Run a stage forward; the loss takes all ranks' parts, other stages take their sum."""
        stage, microbatch = self.stages[action.stage], action.microbatch
        sources = self.schedule.inputs_of(action.stage)
        found = [self.take("activation", source, microbatch) for source in sources]
        if not sources:
            inputs = self.inputs[microbatch]
        else:
            inputs = torch.stack(found) if stage.is_last else reduce(torch.add, found)
        output = stage.forward(microbatch, inputs, self.targets[microbatch])
        if stage.is_last:
            self.losses[microbatch] = output
        else:
            self.give(action, output)

    def backward(self, action):
        stage, microbatch = self.stages[action.stage], action.microbatch
        users = self.schedule.outputs_of(action.stage)
        found = [self.take("gradient", user, microbatch) for user in users]
        gradient = stage.backward(microbatch, reduce(torch.add, found) if found else None)
        if not stage.is_first:
            self.give(action, gradient)

    def give(self, action, tensor):
        """Pass `action`'s result to each taker: all of it, or its part of the loss's gradient."""
        takers = self.schedule.takers_of(action)
        parts = tensor.unbind() if action.stage == self.loss_stage else [tensor] * len(takers)
        of_taker = dict(zip(takers, parts))
        for route in self.routes_after[action]:
            self.send(action, of_taker.pop(route.consumer_stage), self.named(route))
        for part in of_taker.values():  # for a stage of this rank, at most one
            self.results[message_of(action)] = part

    def receive(self, source, message):
        """Receive an activation, a gradient, or a result of S, which has another shape."""
        name = self.name_of(message)
        if name == message:
            return self.job.receive(source, message)
        return self.job.receive(source, name, self.found_shape, self.found_dtype)

    def named(self, route):
        return route._replace(message=self.name_of(route.message))

    def name_of(self, message):
        """Return a Message whose `what` names its content."""
        what, stage, microbatch = message
        if what == "activation" and stage >= self.schedule.num_ranks and stage < self.loss_stage:
            return Message("softmax sums", stage, microbatch)
        if what == "gradient" and stage == self.loss_stage:
            return Message("gradient of the softmax sums", stage, microbatch)
        return message


class FanReceives(OrderedReceives):
    """The receives of a FanWorker, each with the shape and dtype of its message."""

    def __init__(self, worker):
        super().__init__(worker.job, worker.schedule)
        self.worker = worker

    def post_next(self):
        _, route = self.expected.popleft()
        self.posted[route.message] = self.worker.receive(route.source, route.message)
