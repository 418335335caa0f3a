"""Checks of lesson 11: who sits next to whom, which rank to look at, how many GPUs to ask for."""

import math

from course.checks.answer import WrongAnswer, call, call_for_number, checked
from extensions.planning.closed_forms import SECONDS_PER_DAY, training_days

GPUS_PER_NODE = 8


@checked("in blocks a pipeline crosses the network once for each further node, and no more.")
def crossings(count):
    """`count(num_nodes, ranks_per_node, distribution)`: neighbouring pairs on different nodes.

    `distribution` is "block" or "cyclic".
    """
    for num_nodes, ranks_per_node in [(2, 2), (2, 4), (4, 8), (1, 4)]:
        num_ranks = num_nodes * ranks_per_node
        for distribution in ("block", "cyclic"):
            if distribution == "block":
                nodes = [rank // ranks_per_node for rank in range(num_ranks)]
            else:
                nodes = [rank % num_nodes for rank in range(num_ranks)]
            right = sum(a != b for a, b in zip(nodes, nodes[1:]))
            answer = call_for_number(count, num_nodes, ranks_per_node, distribution)
            if answer == right:
                continue
            case = (
                f"{distribution}, {num_nodes} nodes of {ranks_per_node} ranks: you say {answer:g}"
            )
            if answer == num_nodes and distribution == "block":
                return f"{case}, one for each node; but after the last node there is no boundary"
            if answer == num_ranks - 1 and num_nodes == 1:
                return f"{case}, but with one node nothing leaves it"
            if answer == num_ranks - 1:
                return f"{case}, every pair; in blocks most neighbours share a node"
            if answer == num_ranks:
                return f"{case}, one for each rank; {num_ranks} ranks have one pair less"
            if answer == num_nodes - 1:
                return f"{case}, which is right for blocks; here rank r is on node r modulo nodes"
            return f"{case}; for {num_ranks} ranks on nodes {nodes} it is {right}"


class RoundAndRound(Exception):
    """A chain of waits that was followed for ever."""


class Waits(dict):
    """Who waits for whom; gives up when it is asked again and again."""

    asked = 0

    def __getitem__(self, rank):
        self.asked += 1
        if self.asked > 1000:
            raise RoundAndRound("asked 1000 times who waits for whom; a ring of waits has no end")
        return super().__getitem__(rank)

    def get(self, rank, default=None):
        """As a dictionary's, counted."""
        return self[rank] if rank in self else default


DEADLOCK = "deadlock"
HANGS = [
    ({0: 1, 1: 2, 2: None, 3: 2}, 2),
    ({0: 1, 1: 3, 2: 1, 3: None, 4: 1}, 3),
    ({0: 1, 1: 0}, DEADLOCK),
    ({0: 1, 1: 2, 2: 3, 3: 2}, DEADLOCK),
]


@checked("the rank that waits for nobody holds all the others up; without one it is a deadlock.")
def to_blame(blame):
    """`blame(waits)`: the rank to look at, or "deadlock".

    `waits` says for each rank for which other rank it waits, None for a rank that waits for none.
    """
    for waits, right in HANGS:
        answer = call(blame, Waits(waits))
        if answer == right:
            continue
        case = f"{waits}: you say {answer!r}"
        if answer not in [*waits, DEADLOCK]:
            return f"{case}, which is none of the ranks"
        if right == DEADLOCK:
            return f"{case}, but every rank waits here: none of them can go on first"
        if answer == DEADLOCK:
            return f"{case}, but rank {right} waits for nobody: it is doing something else"
        waited_for = list(waits.values())
        if waited_for.count(answer) == max(map(waited_for.count, waits)):
            return f"{case}, for whom most wait; but rank {answer} itself waits for {waits[answer]}"
        return f"{case}, which waits for rank {waits[answer]}: follow the chain to its end"


@checked("8 T P / (n X), turned round, and rounded up to nodes that can be rented whole.")
def gpus_needed(needed):
    """`needed(parameters, tokens, days, flops)`: GPUs in whole nodes of 8, by Megatron equation 4."""
    for parameters, tokens, days, flops in [
        (175e9, 300e9, 34, 140e12),
        (175e9, 300e9, 10, 140e12),
        (7e9, 1e12, 30, 200e12),
    ]:
        exact = training_days(parameters, tokens, 1, flops) / days
        right = GPUS_PER_NODE * math.ceil(exact / GPUS_PER_NODE)
        answer = call_for_number(needed, parameters, tokens, days, flops)
        if answer == right:
            continue
        case = f"{parameters:g} parameters, {tokens:g} tokens, {days} days: you say {answer:g}"
        if answer == right - GPUS_PER_NODE:
            return f"{case}, a node too few: that takes longer than {days} days"
        if abs(answer - exact) < 1:
            return f"{case} GPUs, which are no whole nodes of {GPUS_PER_NODE}; round up"
        without = GPUS_PER_NODE * math.ceil(exact * 6 / 8 / GPUS_PER_NODE)
        if answer == without:
            return f"{case}: that is 6 T P, without the second forward of recomputed activations"
        if answer > 1000 * right:
            raise WrongAnswer(f"{case}; a day has {SECONDS_PER_DAY} seconds")
        return f"{case}; 8 x {tokens:g} x {parameters:g} operations are to be done in {days} days"
