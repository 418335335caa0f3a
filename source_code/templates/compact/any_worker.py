"""Performs a rank's list of actions, with real tensors and real messages."""

from collections import deque

from pipeline.distributed import Receiving, Sending
from pipeline.schedule import Action


class Worker:
    """Performs `schedule` on one rank, whose stages are `stages`, by index."""

    def __init__(self, job, schedule, stages, shape, dtype):
        self.job, self.schedule, self.stages = job, schedule, stages
        self.shape, self.dtype = shape, dtype  # of an activation: (micro-batch size, length, dim)
        self.order = schedule.orders[job.rank]

    def run_step(self, inputs, targets):
        """Run the whole schedule once. Returns the loss of the batch where the last stage is."""
        self.results, self.sent, self.losses = {}, [], {}
        self.expected, self.posted = {}, {}
        for source, destination, action in self.schedule.messages:
            if destination == self.job.rank:
                self.expected.setdefault(source, deque()).append(action)
        for source in self.expected:
            self.post_receive(source)
        for action in self.order:
            stage, k = self.stages[action.stage], action.microbatch
            if action.kind == "F":
                x = inputs[k] if stage.is_first else self.take(action.stage - 1, "F", k)
                output = stage.forward(k, x, targets[k])
                if stage.is_last:
                    self.losses[k] = output
                else:
                    self.give(action, output)
            elif action.kind == "B":
                gradient = None if stage.is_last else self.take(action.stage + 1, "B", k)
                gradient = stage.backward(k, gradient)
                if not stage.is_first:
                    self.give(action, gradient)
        for sending in self.sent:
            sending.wait()
        return sum(self.losses.values()) if self.losses else None

    def give(self, action, tensor):
        """Hand what `action` made to the stage that needs it, here or on another rank."""
        destination = self.schedule.destination_of(action)
        if destination == self.job.rank:
            self.results[action] = tensor
        else:
            self.sent.append(Sending(self.job, tensor, destination, tuple(action)))

    def take(self, *result):
        """What a neighbouring stage made, waiting for it if it has not arrived."""
        source = self.schedule.ranks[result[0], result[2]]
        while result not in self.results:
            action, receiving = self.posted[source]
            self.results[action] = receiving.wait()
            self.post_receive(source)
        return self.results.pop(result)

    def post_receive(self, source):
        """Expect the next message from `source`, in the order in which it is sent."""
        if self.expected[source]:
            action = self.expected[source].popleft()
            receiving = Receiving(self.job, self.shape, self.dtype, source, tuple(action))
            self.posted[source] = action, receiving
