# SPDX-License-Identifier: Apache-2.0
"""The ranks that share every layer of a stage, and the collectives between them.

Each rank has a part of every matrix. A layer needs four collectives, two in the forward and two in
the backward (Shoeybi et al. 2019, 1909.08053, section 3):

                     forward              backward
    enter a layer    -                    all-reduce
    leave a layer    all-reduce           -

If the sequence is split as well (Korthikanti et al. 2022, 2205.05198, section 4.2), each rank keeps
only its part of the sequence between layers, and each all-reduce is divided into its two halves:

    enter a layer    all-gather           reduce-scatter
    leave a layer    reduce-scatter       all-gather

A ring moves the same bytes either way: an all-reduce of n bytes over t ranks sends 2 (t - 1) / t n
per rank, each half of it (t - 1) / t n.
"""

from collections import Counter
from functools import partial

import torch
import torch.distributed as dist

# The names since torch 2.13; the older functions do the same.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

SEQUENCE = 1  # the dimension of (batch, length, dim) that is split


class TensorGroup:
    """The tensor-parallel group of a rank: `ranks` in order, and their process group `group`.

    `sent` counts the bytes that this rank has sent, by collective, for a ring algorithm.
    """

    def __init__(self, job, ranks, group, splits_sequence):
        self.job, self.ranks, self.group = job, ranks, group
        self.size, self.index = len(ranks), ranks.index(job.rank)
        self.splits_sequence = splits_sequence and self.size > 1
        self.sent = Counter()

    def enter(self, x):
        """What a layer computes with: the whole sequence, on every rank."""
        if self.splits_sequence:
            return Collective.apply(x, self.all_gather, self.reduce_scatter)
        return Collective.apply(x, None, self.all_reduce)

    def leave(self, x):
        """The sum of all ranks' shares of a layer's output, or this rank's part of its sequence."""
        if self.splits_sequence:
            return Collective.apply(x, self.reduce_scatter, self.all_gather)
        return Collective.apply(x, self.all_reduce, None)

    def sum(self, x):
        """Return the sum over the ranks; each rank's input gets the gradient of the sum."""
        return Collective.apply(x, self.all_reduce, None)

    def all_reduce(self, x, operation=dist.ReduceOp.SUM):
        total = x.to(self.job.wire, copy=True).contiguous()
        self.perform("all-reduce", 2 * total.nbytes // self.size, dist.all_reduce, total, operation)
        return total.to(x.device)

    def all_gather(self, x):
        """Return the whole sequence, concatenated from the parts of all ranks."""
        own = x.to(self.job.wire).contiguous()
        parts = own.new_empty((self.size * len(own), *own.shape[1:]))
        self.perform("all-gather", own.nbytes, all_gather_single, parts, own)
        return torch.cat(parts.chunk(self.size), SEQUENCE).to(x.device)

    def reduce_scatter(self, x):
        """Return this rank's part of the sequence, summed over the ranks."""
        parts = torch.cat(x.to(self.job.wire).chunk(self.size, SEQUENCE))
        own = torch.empty_like(parts[: len(x)])
        self.perform("reduce-scatter", own.nbytes, reduce_scatter_single, own, parts)
        return own.to(x.device)

    def perform(self, name, bytes_per_step, collective, *arguments):
        """Call a collective, and count `bytes_per_step` sent in each of the ring's t - 1 steps."""
        if self.size == 1:
            return
        self.sent[name] += bytes_per_step * (self.size - 1)
        following = self.ranks[(self.index + 1) % self.size]
        begin = partial(collective, *arguments, group=self.group, async_op=True)
        with self.job.waiting(following, f"its part of a layer ({name})"):
            self.job.start(self.ranks, begin).wait()


class Collective(torch.autograd.Function):
    """Does `forward` to a tensor and `backward` to its gradient; None leaves it as it is."""

    @staticmethod
    def forward(context, x, forward, backward):
        context.do = backward
        return x.view_as(x) if forward is None else forward(x)

    @staticmethod
    def backward(context, gradient):
        return gradient if context.do is None else context.do(gradient), None, None


def tensor_group_of(job, mesh, splits_sequence):
    """Return this rank's TensorGroup from the mesh (replica, stage, tensor). All ranks call it."""
    ranks = tuple(mesh["tensor"].mesh.tolist())
    return TensorGroup(job, ranks, mesh.get_group("tensor"), splits_sequence)


def describe(arguments, job, schedule, group):
    """Print the layout of the mesh, and the bytes that rank 0 has sent in its tensor group."""
    if job.rank == 0 and arguments.steps:
        sizes = f"{arguments.replicas} replicas x {schedule.num_stages} stages x {group.size} ranks"
        own = ", ".join(f"{name} {count:,}" for name, count in sorted(group.sent.items()))
        print(f"{sizes}; bytes sent within a layer by rank 0: {own or 0}", flush=True)


maximum = partial(TensorGroup.all_reduce, operation=dist.ReduceOp.MAX)
