# SPDX-License-Identifier: Apache-2.0
"""The ranks that share the experts of a layer, and the all-to-all between them.

With E experts on g ranks, rank i of the group has experts i x E / g to (i + 1) x E / g - 1. Each
rank has tokens of its own, as a replica of data parallelism has. Per layer, two all-to-alls go
forward and two backward (Lepikhin et al. 2020, GShard, 2006.16668, section 3.2):

                 forward                                  backward
    dispatch     a token's row to the ranks of its        the gradients of these rows back
                 experts
    combine      the experts' results back                the gradients of these results to the
                                                          ranks of the experts

Every row has `dim` numbers, so both directions of dispatch and of combine move the same bytes, with
the roles of sender and receiver exchanged.
"""

import math
from collections import Counter
from functools import partial

import torch
import torch.distributed as dist

from pipeline.collectives import open_groups


class ExpertGroup:
    """The expert-parallel group of a rank: `ranks` in order. A group of one rank needs no `job`.

    `sent` counts the bytes that this rank has sent to other ranks, of "rows" and of "counts".
    """

    def __init__(self, job=None, ranks=(0,)):
        self.job, self.ranks = job, ranks
        self.size = len(ranks)
        self.index = ranks.index(job.rank) if job else 0
        self.sent = Counter()
        self.turns, self.pace = None, None  # set by a PairWorker

    def own(self, experts):
        """The numbers of the experts that this rank has, of `experts` in all."""
        each = experts // self.size
        return range(self.index * each, (self.index + 1) * each)

    def exchange_counts(self, counts):
        """Return how many rows arrive for each own expert from each rank: (g, experts / g).

        `counts` has the number of rows that this rank sends to each of all experts. Without this
        exchange no rank would know how many rows to receive.
        """
        each = [len(counts) // self.size] * self.size
        arrived = self.all_to_all(counts, each, each, "counts")
        return arrived.view(self.size, -1)

    def exchange(self, rows, sent, received):
        """Send `sent[i]` rows to rank i of the group; return the rows that arrive, rank by rank.

        `received[i]` rows arrive from rank i. The gradients take the opposite way.
        """
        return Exchange.apply(rows, self, sent, received)

    def all_to_all(self, rows, sent, received, what="rows"):
        """Perform an all-to-all; in a pair of actions the other one computes meanwhile."""
        paced = self.pace is not None and what == "rows"
        if paced:
            self.pace.end_part()
        wait = self.start(rows, sent, received, what)
        if paced:
            self.turns.change()
        arrived = wait()
        if paced:
            self.pace.arrive()
        return arrived

    def start(self, rows, sent, received, what):
        """Start an all-to-all; return the function that waits for it and returns what arrives."""
        if self.size == 1:
            return rows.clone
        own = rows.detach().to(self.job.wire).contiguous()
        arrived = own.new_empty((sum(received), *own.shape[1:]))
        self.sent[what] += math.prod(own.shape[1:]) * own.itemsize * (len(own) - sent[self.index])
        begin = partial(
            dist.all_to_all_single, arrived, own, received, sent,
            group=self.job.groups[self.ranks], async_op=True,
        )  # fmt: skip
        following = self.ranks[(self.index + 1) % self.size]
        with self.job.starting(following, f"its {what} of an all-to-all"):
            work = self.job.start(self.ranks, begin)

        def wait():
            with self.job.waiting(following, f"its {what} of an all-to-all"):
                work.wait()
            return arrived.to(rows.device)

        return wait


class Exchange(torch.autograd.Function):
    """An all-to-all of rows; in the backward their gradients return to the senders."""

    @staticmethod
    def forward(context, rows, group, sent, received):
        context.way_back = group, received, sent
        return group.all_to_all(rows, sent, received)

    @staticmethod
    def backward(context, gradient):
        group, sent, received = context.way_back
        return group.all_to_all(gradient, sent, received), None, None, None


def form_expert_groups(job, replicas, size):
    """Return this rank's ExpertGroup of `size` ranks, and the ranks with the same experts.

    The ranks with the same stages, one per replica, are cut into groups of `size` neighbours, and
    each group has all experts once. Ranks with the same place in their groups have copies of the
    same experts, whose gradients are summed. All ranks call it.
    """
    own = None
    for stage in range(job.num_ranks // replicas.count):
        peers = range(stage, job.num_ranks, job.num_ranks // replicas.count)
        groups = [tuple(peers[first : first + size]) for first in range(0, len(peers), size)]
        copies = list(zip(*groups))
        new = [ranks for ranks in groups + copies if len(ranks) > 1 and ranks not in job.groups]
        open_groups(job, new)
        if job.rank in peers:
            place = peers.index(job.rank)
            own = ExpertGroup(job, groups[place // size]), copies[place % size]
    return own


def bytes_per_rank(routed, expert_ranks, dim, bytes_per_number=8):
    """The bytes that one rank sends for a layer, if every expert gets the same number of rows.

    `routed` is the number of rows that the rank dispatches: its tokens times the experts of each.
    A row goes four ways, forward and backward of dispatch and combine, and (g - 1) / g of the rows
    belong to experts on another rank.
    """
    return 4 * routed * dim * bytes_per_number * (expert_ranks - 1) / expert_ranks
