"""Runs a script of the course with the set-up rule of NCCL's channels, over gloo.

    python tests/lazy_channels.py [--cold] SCRIPT.py FLAGS

Up to torch 2.14 NCCL connects two ranks of a process group when they first use it, and blocks the
host until both do; a collective does so for all ranks of its group. Gloo has connected them by
then, so a program that deadlocks under this rule passes on a CPU. Here the first use of a group
waits, through the store of the job, for the first use by the other side. `--cold` plants the fault
that the rule finds: channels and groups that no rank uses before the first step.
"""

import functools
import runpy
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch.distributed as dist

from extensions.data_parallel import replicas
from pipeline import collectives, job

SCRIPTS = Path(job.__file__).resolve().parents[1]
connected = set()  # what this rank has waited for: (name of the group, its ranks)


def connect(group, ranks):
    """Block until all of `ranks` have called this for `group`, the first time on this rank."""
    group = group or dist.group.WORLD
    key = group.group_name, tuple(sorted(ranks))
    if key in connected:
        return
    # A client of its own: the watch ends a rank that waits here for too long.
    store = dist.PrefixStore("lazy", dist.distributed_c10d._get_default_store().clone())
    store.set(f"{key} {dist.get_rank()}", "here")
    while not store.check([f"{key} {rank}" for rank in ranks]):
        time.sleep(0.002)
    connected.add(key)


def point_to_point(call):
    """`call`, one of isend, irecv, send and recv, after the pair of ranks is connected."""

    @functools.wraps(call)
    def connected_first(tensor, peer, group=None):
        connect(group, (dist.get_rank(), peer))
        return call(tensor, peer, group=group)

    return connected_first


def collective(call):
    """`call`, an all_reduce, after all ranks of the group are connected."""

    @functools.wraps(call)
    def connected_first(tensor, *arguments, group=None, **keywords):
        connect(group, dist.get_process_group_ranks(group))
        return call(tensor, *arguments, group=group, **keywords)

    return connected_first


def become_lazy():
    for name in ("isend", "irecv", "send", "recv"):
        setattr(dist, name, point_to_point(getattr(dist, name)))
    dist.all_reduce = collective(dist.all_reduce)


def become_cold():
    job.join_job = without_messages(job.join_job)
    collectives.connect_group = replicas.connect_group = lambda job, group, ranks: None


def without_messages(join_job):
    """`join_job`, which then opens channels but sends nothing through them."""

    def transfer_nothing(*arguments):
        return SimpleNamespace(wait=lambda: None)

    def join_cold(*arguments, **options):
        with (
            mock.patch.object(job.Job, "send", transfer_nothing),
            mock.patch.object(job.Job, "receive", transfer_nothing),
        ):
            return join_job(*arguments, **options)

    return join_cold


if __name__ == "__main__":
    become_lazy()
    if sys.argv[1] == "--cold":
        del sys.argv[1]
        become_cold()
    del sys.argv[0]
    sys.path[0] = str(SCRIPTS)
    runpy.run_path(str(SCRIPTS / sys.argv[0]), run_name="__main__")
