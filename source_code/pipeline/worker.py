"""Performs a rank's list of actions, with real tensors and real messages.

Every rank knows the whole schedule, so nobody has to ask. A receiver posts the receives of a
channel in the order in which the sender sends, and no further ahead than one message beyond the
one it needs: one, so that a message travels while the rank computes; not more, so that the memory
bound of the schedule holds. A sent message keeps its buffer until the receiver is known to have
used it: a message that comes back and was made later than that is the proof.
"""

from collections import deque
from contextlib import nullcontext

from pipeline.distributed import Receiving, Sending
from pipeline.message import Message
from pipeline.schedule import message_of


class Worker:
    """Performs `schedule` on one rank.

    `stages` are this rank's, by index. `shape` and `dtype` are those of one activation, which are
    those of its gradient: (micro-batch size, length, dim); a stage that gives another one ends the
    run with a ValueError. `around(action)` is a context manager that every action is taken in; data
    parallelism adds gradients up there (see replicas.py).
    """

    def __init__(self, job, schedule, stages, shape, dtype, around=lambda action: nullcontext()):
        self.job = job
        self.schedule = schedule
        self.stages = stages
        self.shape, self.dtype = shape, dtype
        self.around = around
        self.perform = {
            "F": self.forward,
            "B": self.backward,
            "I": self.backward,
            "W": self.backward_weight,
            "U": self.update,
        }
        for index in {action.stage for action in schedule.orders[job.rank] if action.kind == "I"}:
            stages[index].allow_split_backward()
        # The step at which its rank makes each message: it says when one that was sent has been used.
        self.step_of = {
            message_of(action): step
            for order in schedule.orders
            for step, action in enumerate(order)
        }
        # Looked up rather than worked out between two actions, where it would delay a message.
        self.route_after = {
            action: schedule.route_after(action) for action in schedule.orders[job.rank]
        }

    def run_step(self, inputs, targets):
        """Run the whole schedule once: forward and backward of every micro-batch.

        `inputs` and `targets` have the tokens of each micro-batch, (b, length) each: lists, or
        dictionaries where this rank takes only some of them.
        Gradients add up in the parameters; the caller zeroes them before and updates after.
        Returns the loss of the batch on the rank of the last stage, None elsewhere.
        """
        ranks = range(self.job.num_ranks)
        self.inputs, self.targets = inputs, targets
        self.losses = {}  # micro-batch -> its loss, on the rank of the last stage
        self.results = {}  # what this rank's next actions need, until they take it
        self.sent = {rank: [] for rank in ranks}  # (step of the action that uses it, Sending)
        self.expected = {rank: deque() for rank in ranks}  # messages, in the order they are sent
        self.posted = {rank: deque() for rank in ranks}  # (message, Receiving)
        for route in self.schedule.messages:
            if route.destination == self.job.rank:
                self.expected[route.source].append(route.message)
        for rank in ranks:
            self.post_receive(rank)
        for action in self.schedule.orders[self.job.rank]:
            with self.around(action):
                self.perform[action.kind](action)
        for sent in self.sent.values():
            for _, sending in sent:
                sending.wait()
        if self.job.recording:
            self.job.recording.flush()  # before the caller changes the gradients
        return sum(self.losses.values()) if self.losses else None

    def forward(self, action):
        stage, microbatch = self.stages[action.stage], action.microbatch
        if stage.is_first:
            activation = self.inputs[microbatch]
        else:
            activation = self.take(Message("activation", action.stage - 1, microbatch))
        output = stage.forward(microbatch, activation, self.targets[microbatch])
        if stage.is_last:
            self.losses[microbatch] = output
        else:
            self.give(action, output)

    def backward(self, action):
        stage, microbatch = self.stages[action.stage], action.microbatch
        gradient = None
        if not stage.is_last:
            gradient = self.take(Message("gradient", action.stage + 1, microbatch))
        backward = stage.backward if action.kind == "B" else stage.backward_input
        gradient = backward(microbatch, gradient)
        if not stage.is_first:
            self.give(action, gradient)

    def backward_weight(self, action):
        self.stages[action.stage].backward_weight(action.microbatch)

    def update(self, action):
        self.stages[action.stage].update(action.microbatch)

    def give(self, action, tensor):
        """Hand what `action` made to the stage that needs it, here or on another rank."""
        route = self.route_after[action]
        if route is None:
            self.results[message_of(action)] = tensor
            return
        if (tensor.shape, tensor.dtype) != (self.shape, self.dtype):
            # The receiver would wait for ever, or take half a message for a whole one.
            made = f"{tuple(tensor.shape)} in {tensor.dtype}"
            raise ValueError(f"{route} is {made}, but has to be {self.shape} in {self.dtype}")
        sending = Sending(self.job, tensor, route.destination, route.message)
        used_for = route.message._replace(stage=route.consumer_stage)
        self.sent[route.destination].append((self.step_of[used_for], sending))

    def take(self, wanted):
        """What a neighbouring stage made, waiting for it if it has not arrived."""
        source = self.schedule.rank_of(wanted.stage, wanted.microbatch)
        while wanted not in self.results:
            message, receiving = self.posted[source].popleft()
            self.results[message] = receiving.wait()
            self.release_sent(source, message)
            self.post_receive(source)
        return self.results.pop(wanted)

    def post_receive(self, source):
        """Expect the next message from `source`, if there is one."""
        if self.expected[source]:
            message = self.expected[source].popleft()
            receiving = Receiving(self.job, self.shape, self.dtype, source, message)
            self.posted[source].append((message, receiving))

    def release_sent(self, source, message):
        """Let go of what rank `source` must have used before it made `message`."""
        made = self.step_of[message]
        used = [pair for pair in self.sent[source] if pair[0] <= made]
        for pair in used:
            pair[1].wait()
            self.sent[source].remove(pair)
