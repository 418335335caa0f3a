# SPDX-License-Identifier: Apache-2.0
"""Shared by the generators: a builder for the order of one rank, and the checks of sizes."""

from collections import Counter, deque

from pipeline.schedule import Action, ScheduleError


class Order:
    """The order of one rank, built action by action.

    A generator gives the next kind and stage. Micro-batches pass a stage in turn, so the number of
    the micro-batch follows.
    """

    def __init__(self):
        self.actions = []
        self.taken = Counter()  # (stage, kind) -> micro-batches so far
        self.delayed = deque()  # the W still to run for each I, oldest first

    def forward(self, stage):
        self.actions.append(Action(stage, "F", self._next(stage, "F")))

    def backward(self, stage):
        self.actions.append(Action(stage, "B", self._next(stage, "I")))

    def backward_for_input(self, stage):
        microbatch = self._next(stage, "I")
        self.actions.append(Action(stage, "I", microbatch))
        self.delayed.append(Action(stage, "W", microbatch))

    def backward_for_weights(self, stage=None):
        """Append the oldest W still to run, of any stage or of the given one."""
        action = next(action for action in self.delayed if stage in (None, action.stage))
        self.delayed.remove(action)
        self.actions.append(action)

    def remaining_backwards_for_weights(self):
        while self.delayed:
            self.backward_for_weights()

    def _next(self, stage, kind):
        microbatch = self.taken[stage, kind]
        self.taken[stage, kind] += 1
        return microbatch


def require_positive(num_ranks, num_microbatches):
    if num_ranks < 1 or num_microbatches < 1:
        raise ScheduleError(
            f"a schedule needs at least one rank and one micro-batch, not {num_ranks} and "
            f"{num_microbatches}"
        )


def require_several_chunks(name, num_chunks, without):
    if num_chunks < 2:
        raise ScheduleError(
            f"{name} has at least 2 chunks per rank, not {num_chunks}; with one it is {without}"
        )
