# SPDX-License-Identifier: Apache-2.0
"""Sums and gathers over several ranks."""

from datetime import timedelta

import torch
import torch.distributed as dist

from pipeline.job import GRACE


def gather(job, value):
    """Collect one Python object from every rank: a list on rank 0, None elsewhere."""
    if job.num_ranks == 1:
        return [value]
    values = [None] * job.num_ranks if job.rank == 0 else None
    with job.waiting_for_all("its results"):
        dist.gather_object(value, values)
    return values


def share(job, value):
    """Return rank 0's Python object on every rank."""
    if job.num_ranks == 1:
        return value
    values = [value]
    with job.waiting_for_all("what rank 0 has found"):
        dist.broadcast_object_list(values, src=0)
    return values[0]


def open_groups(job, groups):
    """Open a process group for each tuple of ranks. Every rank calls it with the same `groups`."""
    limit = timedelta(seconds=job.timeout + GRACE)
    for ranks in groups:
        job.groups[ranks] = dist.new_group(list(ranks), backend=job.backend, timeout=limit)
        connect_group(job, job.groups[ranks], ranks)


def connect_group(job, group, ranks):
    """Sum one number over `ranks`, those of `group`, so that its connections are open before use.

    A collective connects all ranks of the group. With NCCL up to torch 2.14 a batch of sends and
    receives between two of them would otherwise wait for all other ranks of the group as well.
    """
    if job.rank in ranks and len(ranks) > 1:
        number = torch.zeros(1, device=job.wire)
        following = ranks[(ranks.index(job.rank) + 1) % len(ranks)]
        with job.waiting(following, "its first sum"):
            dist.all_reduce(number, group=group)


class Summing:
    """An asynchronous sum of tensors over `ranks`, one of the job's groups, as one flat message.

    All ranks of the group must start it, and start several sums in the same order. The tensors may
    not be used before `wait`, which replaces them by their sums; error messages contain `what`.
    """

    def __init__(self, job, tensors, ranks, what):
        self.job, self.tensors, self.what = job, tensors, what
        self.following = ranks[(ranks.index(job.rank) + 1) % len(ranks)]
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        self.flat = flat.to(job.wire)
        group = job.groups[ranks]
        with job.starting(self.following, what):
            self.work = job.start(
                ranks, lambda: dist.all_reduce(self.flat, group=group, async_op=True)
            )

    def wait(self):
        """Block until the tensors have been replaced by their sums."""
        with self.job.waiting(self.following, self.what):
            self.work.wait()
        sums = self.flat.to(self.job.device).split([tensor.numel() for tensor in self.tensors])
        for tensor, total in zip(self.tensors, sums):
            tensor.copy_(total.view_as(tensor))
