# SPDX-License-Identifier: Apache-2.0
"""Performs a schedule whose forwards and backwards run in pairs, and paces the all-to-alls."""

import time
from functools import partial

from extensions.experts.turns import Pace, Turns
from pipeline.worker import Worker


class PairWorker(Worker):
    """A Worker for a PairedSchedule, or for any schedule with an all-to-all that takes time.

    `group` is the ExpertGroup of the stages. `costs` are the simulator's, in milliseconds, with
    an `exchange`. What was performed is added to `job.clock`, the Clock of the lab.
    """

    def __init__(self, job, schedule, stages, group, costs):
        super().__init__(job, schedule, stages)
        self.costs = costs
        self.partners = getattr(schedule, "partners", {})
        self.forward_of = {backward: forward for forward, backward in self.partners.items()}
        self.turns, self.pace = Turns(), Pace(costs)
        group.turns, group.pace = self.turns, self.pace
        self.results_of_pair = []

    def perform(self, action):
        """Perform an action; the two actions of a pair run together, when the backward is due."""
        if action in self.partners:
            return  # it runs with the backward, which is next
        forward = self.forward_of.get(action)
        actions = [forward, action] if forward else [action]
        self.fetch(actions[0])
        start = self.job.clock.now()
        self.pace.restart()
        if forward:
            self.turns.run_both(*(partial(self.perform_paced, each) for each in actions))
        else:
            self.perform_paced(action)
        self.note(actions, start, self.job.clock.now())
        for each, tensor in sorted(self.results_of_pair, key=lambda result: result[0] == action):
            super().give(each, tensor)
        self.results_of_pair = []

    def fetch(self, action):
        """Wait for the messages of an action, or of both of its pair, before it starts."""
        own = self.job.rank
        for message in self.schedule.needs_of(action):
            what, stage, microbatch = message
            if self.schedule.rank_of(stage, microbatch) != own and message not in self.results:
                self.results[message] = self.take(what, stage, microbatch)

    def perform_paced(self, action):
        self.pace.begin(action)
        super().perform(action)
        if action.kind == "W":
            time.sleep(self.costs.of(action) / 1000)
        else:
            self.pace.end_part()

    def give(self, action, tensor):
        self.results_of_pair.append((action, tensor))

    def note(self, actions, start, end):
        """Add the actions to the timeline; a pair is drawn as one after the other."""
        costs = [self.costs.computing(each) for each in actions]
        for each, cost in zip(actions, costs):
            until = start + (end - start) * cost / sum(costs) if each is not actions[-1] else end
            self.job.clock.add(self.stages[each.stage], each, start, until)
            start = until
