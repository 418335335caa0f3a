# SPDX-License-Identifier: Apache-2.0
"""Performs a rank's list of actions, with real tensors and real messages.

Receives are posted in the one order of messages that follows from the schedule: see receives.py. A
rank keeps the buffer of a sent message until another message shows that the receiver has used it: a
message from the receiver, or from a rank that has heard from it since.
"""

from pipeline.message import Message
from pipeline.receives import OrderedReceives
from pipeline.schedule import message_of


class Worker:
    """Performs `schedule` on one rank.

    `stages` are this rank's, by index. Activations and gradients have the job's shape and dtype.
    """

    def __init__(self, job, schedule, stages):
        self.job, self.schedule, self.stages = job, schedule, stages
        # Message -> the step at which its rank makes it, and so has used the message that it needs.
        self.step_of = {
            message_of(action): step
            for order in schedule.orders
            for step, action in enumerate(order)
            if action.kind in "FBI"
        }
        # Computed in advance, because computing it between two actions would delay a message.
        self.routes_after = {a: schedule.routes_after(a) for a in schedule.orders[job.rank]}

    def run_step(self, inputs, targets):
        """Run the whole schedule once: forward and backward of every micro-batch.

        `inputs` and `targets` have the tokens of each micro-batch, (b, length) each: lists, or
        dictionaries where this rank takes only some of them. Gradients add up in the parameters;
        the caller zeroes them before and updates after. Returns the loss of the batch on the rank
        of the last stage, None elsewhere.
        """
        self.inputs, self.targets = inputs, targets
        self.losses = {}  # micro-batch -> its share of the loss, on the rank of the last stage
        self.results = {}  # Message -> tensor, until this rank's next actions take it
        self.sent = []  # (rank, the step at which it uses the message, Transfer)
        self.receives = self.ordered_receives()
        for action in self.schedule.orders[self.job.rank]:
            self.receives.post_before(action)
            self.perform(action)
        self.end_step()
        return sum(self.losses.values()) if self.losses else None

    def ordered_receives(self):
        return OrderedReceives(self.job, self.schedule)

    def end_step(self):
        self.job.complete_sends()

    def perform(self, action):
        if action.kind == "F":
            self.forward(action)
        elif action.kind in "BI":
            self.backward(action)
        elif action.kind == "W":
            self.stages[action.stage].backward_weight(action.microbatch)
        else:
            self.stages[action.stage].update(action.microbatch)

    def forward(self, action):
        stage, microbatch = self.stages[action.stage], action.microbatch
        if stage.is_first:
            activation = self.inputs[microbatch]
        else:
            activation = self.take("activation", action.stage - 1, microbatch)
        output = stage.forward(microbatch, activation, self.targets[microbatch])
        if stage.is_last:
            self.losses[microbatch] = output
        else:
            self.give(action, output)

    def backward(self, action):
        stage, microbatch = self.stages[action.stage], action.microbatch
        gradient = None
        if not stage.is_last:
            gradient = self.take("gradient", action.stage + 1, microbatch)
        backward = stage.backward if action.kind == "B" else stage.backward_input
        gradient = backward(microbatch, gradient)
        if not stage.is_first:
            self.give(action, gradient)

    def give(self, action, tensor):
        """Pass the result of `action` to the stage that needs it, here or on another rank."""
        routes = self.routes_after[action]
        if not routes:
            self.results[message_of(action)] = tensor
        for route in routes:
            self.send(action, tensor, route)

    def send(self, action, tensor, route):
        sending = self.job.send(tensor, route.destination, route.message)
        user = message_of(action._replace(stage=route.consumer_stage))
        self.sent.append((route.destination, self.step_of[user], sending))

    def take(self, what, stage, microbatch):
        """Return the result of a neighbouring stage; wait for it if it has not arrived."""
        message = Message(what, stage, microbatch)
        if message in self.results:
            return self.results.pop(message)
        tensor = self.receives.take(message)
        self.release_sent(self.schedule.actions_before[message])
        return tensor

    def release_sent(self, taken):
        """Release what was sent for the first `taken[rank]` actions of each rank."""
        used = [sent for sent in self.sent if sent[1] < taken[sent[0]]]
        for sent in used:
            sent[2].wait()
            self.sent.remove(sent)
