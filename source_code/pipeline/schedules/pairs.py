# SPDX-License-Identifier: Apache-2.0
"""Forwards and backwards in pairs: each computes while the other waits for an all-to-all.

A layer of experts waits for other ranks in the middle of an action (expert_group.py). If a rank has
a forward and a backward that do not need each other, it can run both at the same time. DeepSeek's
DualPipe is a schedule of such pairs (DeepSeek-AI 2024, 2412.19437, section 3.2.1). Interleaved 1F1B
becomes one if every rank runs one more forward in the warm-up: then a backward of the steady phase
does not need the forward before it, on any rank.
"""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from pipeline.schedule import DURATIONS, Schedule, message_of


@dataclass(frozen=True)
class PairedSchedule(Schedule):
    """A Schedule with `partners`: {forward: the backward after it on its rank, run together}.

    A pair starts when both have their messages, and sends the results of both when both have ended.
    So a schedule that is legal action by action can deadlock in pairs; `playable_order` then raises
    ScheduleError.
    """

    partners: dict = field(default_factory=dict, hash=False)

    def needs_of(self, action):
        """The messages that must exist before `action` can start, for a pair those of both."""
        needs = super().needs_of(action)
        if action in self.partners:
            needs = needs + super().needs_of(self.partners[action])
        return needs

    @cached_property
    def places(self):
        """As those of a Schedule; both actions of a pair have the place of its end."""
        forward_of = {backward: forward for forward, backward in self.partners.items()}
        free, made, places = [0] * self.num_ranks, {}, {}
        for rank, action, needs in self.playable_order:
            start = max(free[rank], *(made[need] for need in needs), 0)
            for ended in (forward_of.get(action), action):
                free[rank] = start + DURATIONS[action.kind]
                if ended:
                    made[message_of(ended)], places[ended] = free[rank], (free[rank], rank)
        return places


def in_pairs(schedule):
    """The same orders, in which a forward and the backward right after it run together.

    A backward of the same micro-batch and stage needs its forward, so these two stay apart. Raises
    ScheduleError if the pairs wait for one another, as in 1F1B without one more forward.
    """
    partners = {
        forward: backward
        for order in schedule.orders
        for forward, backward in pairwise(order)
        if forward.kind == "F" and backward.kind == "B"
        if (forward.stage, forward.microbatch) != (backward.stage, backward.microbatch)
    }
    paired = PairedSchedule(schedule.name, schedule.orders, partners)
    paired.playable_order  # noqa: B018 - raises ScheduleError for a deadlock
    return paired
