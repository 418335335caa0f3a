# SPDX-License-Identifier: Apache-2.0
"""The one order of messages, in which all ranks issue their sends, receives and sums.

Every rank has the whole schedule. A simulation with messages that take no time gives the end of
each action. The pair (end, rank) is the action's place, and a message has the place of the action
that makes it. Before an action a rank posts every receive with an earlier place, and after the
action it sends. A sum of replicas within or right after an action has that action's place, too.

NCCL is the reason. Each channel has a communicator, and NCCL does not promise that two communicators
make progress at once on one GPU: its guide requires their operations in one order on all GPUs
("Using multiple NCCL communicators concurrently"; github.com/NVIDIA/nccl, issues 783 and 784).
With one order, a rank needs no more than one operation under way. Proof: take the message with the
earliest place of those that have not arrived. Its sender reaches the send, and its receiver reaches
the receive, because both wait only for messages with earlier places, which have arrived. No other
operation is under way before it at either end. So it arrives, and then so does the next one.

On every transport, if a message is made while its receiver computes, the receive has been posted
before, so the message travels during the computation. No receive is posted earlier than that, so a
rank has buffers only for messages that exist by then in the simulation: at most 2 for GPipe and
1F1B, 3 for zero bubble, 4 for interleaved 1F1B with a multiple of p micro-batches, and with looped
BFS more the more micro-batches there are.
"""

from collections import deque


class OrderedReceives:
    """The receives of this rank in one run of `schedule`."""

    def __init__(self, job, schedule):
        self.job, self.places = job, schedule.places
        self.expected = deque(
            (place, route)
            for place, route in schedule.placed_messages
            if route.destination == job.rank
        )
        self.posted = {}  # Message -> Transfer

    def post_before(self, action):
        """Post all receives with an earlier place than `action`, one of this rank's."""
        while self.expected and self.expected[0][0] < self.places[action]:
            self.post_next()

    def post_next(self):
        _, route = self.expected.popleft()
        self.posted[route.message] = self.job.receive(route.source, route.message)

    def take(self, message):
        """Return the tensor of `message`; wait for it if it has not arrived."""
        while message not in self.posted:  # only where a caller takes messages in another order
            self.post_next()
        return self.posted.pop(message).wait()
