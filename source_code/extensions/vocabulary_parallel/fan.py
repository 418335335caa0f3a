# SPDX-License-Identifier: Apache-2.0
"""The schedule of a pipeline with the vocabulary spread over all ranks: a line, a fan at each end.

Rank r of p ranks has its layers, and its rows of the embedding and of the head. Each of these is a
stage with forwards and backwards, which simulator, worker and figures already support:

    stage r             the layers
    stage p + r         the scores of this rank's rows: its forward is S of the paper, its backward T
    stage 2p            the loss, on the last rank: it combines the results of S of all ranks
    stage 2p + 1 + r    the embedding of this rank's rows, zeros for all other tokens

The embeddings of all ranks go to stage 0; the output of stage p - 1 goes to all scores. This
is Algorithm 1 of Yeung et al. 2024, 2411.05288, section 4: all T come after all S, and the last
layers' backward comes after all T. It holds p + 2 micro-batches on rank 0, and 1F1B holds p.
"""

import dataclasses

from pipeline.message import Message
from pipeline.schedule import Action, Route, Schedule, ScheduleError, message_of

AHEAD = 2  # micro-batches held beyond those of 1F1B: one for all S, one for all T


@dataclasses.dataclass(frozen=True)
class FanSchedule(Schedule):
    """A Schedule of the stages above."""

    def inputs_of(self, stage):
        """Return the stages whose output `stage` takes, in order."""
        return inputs_of(stage, self.num_ranks)

    def outputs_of(self, stage):
        """Return the stages that take the output of `stage`, in order."""
        return outputs_of(stage, self.num_ranks)

    def needs_of(self, action):
        return needs_in_fan(action, self.num_ranks)

    def takers_of(self, action):
        """Return the stages that take an action's result: its output or its input's gradient."""
        return (self.outputs_of if action.kind == "F" else self.inputs_of)(action.stage)

    def routes_after(self, action):
        """Return the Routes of the messages that `action` sends to other ranks."""
        source = self.rank_of(action.stage, action.microbatch)
        ends = [(self.rank_of(stage, action.microbatch), stage) for stage in self.takers_of(action)]
        message = message_of(action)
        return [Route(message, source, rank, stage) for rank, stage in ends if rank != source]

    def explains(self, timeline):
        """Return `timeline` with the messages that each action needs, for a figure."""
        needs = {event.action: self.needs_of(event.action) for event in timeline.events}
        return dataclasses.replace(timeline, needs=needs)


def inputs_of(stage, p):
    """The stages whose output `stage` takes, on p ranks."""
    if 0 < stage < p:
        return (stage - 1,)
    if p <= stage < 2 * p:
        return (p - 1,)
    if stage == 2 * p:
        return tuple(range(p, 2 * p))
    return tuple(range(2 * p + 1, 3 * p + 1)) if stage == 0 else ()


def outputs_of(stage, p):
    """Return the stages that take the output of `stage`, on p ranks."""
    return tuple(other for other in range(3 * p + 1) if stage in inputs_of(other, p))


def needs_in_fan(action, p):
    """Return the Messages that must exist before `action` can start, as a list."""
    stage, kind, microbatch = action
    if kind == "F":
        return [Message("activation", other, microbatch) for other in inputs_of(stage, p)]
    gradients = [Message("gradient", other, microbatch) for other in outputs_of(stage, p)]
    return [Message("activation", stage, microbatch), *gradients]


def vocabulary_parallel(num_ranks, num_microbatches, ahead=AHEAD):
    """1F1B with the vocabulary spread over all ranks, as a FanSchedule.

    The order follows from a simulation with forwards of 1, backwards of 2, S and T of 1/2: a free
    rank takes a backward, else a forward, else an S or T, and rank i holds at most p - i + `ahead`
    micro-batches. With 4 ranks, 8 micro-batches and the `ahead` of Algorithm 1, 2, it takes 41
    units, and no order takes less.
    """
    if num_ranks < 1 or num_microbatches < 1 or ahead < 0:
        raise ScheduleError("a schedule needs at least one rank and one micro-batch")
    playing = Playing(num_ranks, num_microbatches, ahead)
    while playing.left:
        taken = [playing.take_next(rank) for rank in reversed(range(num_ranks))]
        if not any(taken):
            playing.wait()
    return FanSchedule("vocabulary-parallel", tuple(map(tuple, playing.orders)))


class Playing:
    """The state of a schedule that is being simulated; times are in quarters of a backward."""

    def __init__(self, num_ranks, num_microbatches, ahead):
        p = num_ranks
        self.num_ranks, self.num_microbatches, self.ahead = p, num_microbatches, ahead
        self.orders = [[] for _ in range(p)]
        self.now, self.free = 0, [0] * p
        self.made = {}  # Message -> when
        self.taken = {}  # (stage, kind) -> micro-batches so far
        self.left = num_microbatches * 2 * (3 * p + 1)

    def choices(self, rank):
        """Return (stage, kind, duration) of a rank's possible next actions, preferred first."""
        p = self.num_ranks
        loss = [(2 * p, "F", 0), (2 * p, "B", 0)] if rank == p - 1 else []
        embedding, scores = 2 * p + 1 + rank, p + rank
        return [*loss, (embedding, "F", 0), (rank, "B", 4), (embedding, "B", 0), (rank, "F", 2),
                (scores, "F", 1), (scores, "B", 1)]  # fmt: skip

    def take_next(self, rank):
        """Perform a rank's first choice that is possible now; return whether there was one."""
        if self.free[rank] > self.now:
            return False
        for stage, kind, duration in self.choices(rank):
            action = Action(stage, kind, self.taken.get((stage, kind), 0))
            if self.is_possible(action, rank):
                self.taken[stage, kind] = action.microbatch + 1
                self.free[rank] = self.made[message_of(action)] = self.now + duration
                self.orders[rank].append(action)
                self.left -= 1
                return True
        return False

    def is_possible(self, action, rank):
        """Return whether an action's inputs exist and the rank may hold its micro-batch."""
        stage, kind, microbatch = action
        if microbatch == self.num_microbatches:
            return False
        if stage == rank and kind == "F":
            held = microbatch - self.taken.get((rank, "B"), 0)
            if held == self.num_ranks - rank + self.ahead:
                return False
        if stage > 2 * self.num_ranks and kind == "F":  # an embedding is looked up when it is used
            if microbatch > self.taken.get((0, "F"), 0) + 1:
                return False
        needs = needs_in_fan(action, self.num_ranks)
        return all(self.made.get(need, self.now + 1) <= self.now for need in needs)

    def wait(self):
        """Advance the time to the end of the next action that ends."""
        self.now = min(time for time in self.free if time > self.now)
