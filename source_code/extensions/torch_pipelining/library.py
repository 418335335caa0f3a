# SPDX-License-Identifier: Apache-2.0
"""Connects torch.distributed.pipelining to the course's tools.

The library performs a schedule by itself. This module says on which rank a schedule expects which
stage, which sizes it supports, and returns its schedules as data for the simulator.
"""

from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.pipelining import _utils as described
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from files.unpickling import allow
from pipeline.collectives import connect_group
from pipeline.command_line import ranks_from_environment
from pipeline.job import join_job
from pipeline.schedule import Action, Schedule
from pipeline.schedules import gpipe, one_f_one_b
from pipeline.schedules.legal import check_legal

# What the library's ranks exchange to infer shapes, where its version has these descriptions.
NAMES = ("_StageForwardMeta", "_StageBackwardMeta", "_StageMeta", "_TensorMeta")
allow(torch.Size, *(getattr(described, name) for name in NAMES if hasattr(described, name)))
allow(torch._utils._rebuild_meta_tensor_no_storage)  # in torch 2.11: shapes without numbers
allow(
    *(
        ("torch", str(one).split(".")[1], one)
        for one in vars(torch).values()
        if isinstance(one, torch.dtype)
    )
)

ONE_STAGE = ("GPipe", "1F1B")  # a rank has one stage
LOOPS = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
LIBRARY_SCHEDULES = ONE_STAGE + LOOPS + V_SHAPED


def stages_of_rank(name, rank, num_ranks, chunks):
    """The stages that schedule `name` expects on `rank`. The library does not check it.

    A loop deals the stages out round after round; a V comes back, so that rank 0 has the first
    and the last stage.
    """
    if name in V_SHAPED:
        return [rank, 2 * num_ranks - 1 - rank]
    return [rank + chunk * num_ranks for chunk in range(chunks)]


def complaint_about(name, num_ranks, num_microbatches, chunks):
    """Return why the library would reject these numbers, as a sentence with the fix, or None."""
    flags = f"--schedule {name}"
    if name in ONE_STAGE and chunks != 1:
        return f"{flags} has one stage per rank; use --chunks 1"
    if name in LOOPS and chunks < 2:
        return f"{flags} needs several stages per rank; use --chunks 2 or more"
    if name in V_SHAPED and chunks != 2:
        return f"{flags} has exactly two stages per rank; use --chunks 2"
    least = {"1F1B": num_ranks, "DualPipeV": 2 * num_ranks}.get(name, 0)
    if num_microbatches < least:
        return (
            f"{flags}: --microbatches {num_microbatches} is less than the {least} stages; "
            f"use {least} or more"
        )
    rounds = max(1, num_microbatches // num_ranks)
    if name in ("Interleaved1F1B", "InterleavedZeroBubble") and num_microbatches % rounds:
        return (
            f"{flags}: --microbatches {num_microbatches} is not a multiple of its {rounds} rounds "
            f"on {num_ranks} ranks; use a multiple of {num_ranks}"
        )
    return None


def device_without_sharing(wanted):
    """Return the device for `join_job` instead of `wanted`: ranks without own GPUs use the CPU.

    The course's worker sends the messages of ranks that share a GPU through host memory; the
    library cannot. Rejects "cuda" if there are fewer GPUs than ranks.
    """
    local_ranks = ranks_from_environment()[3]
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or not 0 < gpus < local_ranks:
        return wanted
    if wanted == "cuda":
        raise SystemExit(
            f"--device cuda: {local_ranks} ranks would share {gpus} GPUs, and the library cannot "
            "send between them; use --device cpu, or one rank for each GPU"
        )
    return "cpu"


def join_library_job(arguments):
    """Meet the other ranks. The messages are the library's, in the default group."""
    device = device_without_sharing(arguments.device)
    job = join_job(device, arguments.timeout, pairs=[])
    connect_group(job, dist.group.WORLD, range(job.num_ranks))
    return job


def schedule_as_data(name, num_ranks, num_microbatches, chunks):
    """Return the actions that the library performs, as a Schedule to simulate and draw.

    They are the library's own list, except for 1F1B. Its list has a fault on the last rank (without
    F0, and with one forward too many at the end). The library performs another order, that of the
    course's `one_f_one_b`. An overlapped pair counts as two actions.
    """
    if name in ONE_STAGE:
        ours = {"GPipe": gpipe, "1F1B": one_f_one_b}[name](num_ranks, num_microbatches)
        return replace(ours, name=name)
    orders = []
    for row in get_schedule_ops(name, num_ranks, num_microbatches, chunks):
        actions = [action for entry in row if entry for action in entry.sub_actions or [entry]]
        orders.append(
            tuple(
                Action(action.stage_index, action.computation_type.value, action.microbatch_index)
                for action in actions
            )
        )
    return check_legal(Schedule(name, tuple(orders)))


def without_messages_to_itself(stage):
    """Make a stage's warm-up skip the neighbours on its own rank; returns the stage.

    Before the first step a stage exchanges an empty message with each neighbour, so that NCCL
    opens its connections. In a V a neighbour may be on the same rank, and gloo cannot send to its
    own rank. Traced stages do this, and in torch 2.11 all stages. In torch 2.15 no stage does: the
    method no longer exists, and the stage is returned unchanged.
    """
    exchanges = getattr(stage, "_get_init_p2p_neighbors_ops", None)
    if exchanges is None:
        return stage

    def with_other_ranks():
        return [message for message in exchanges() if message.peer != dist.get_rank()]

    stage._get_init_p2p_neighbors_ops = with_other_ranks
    return stage


@contextmanager
def forwards_only(schedule):
    """Return a context in which `schedule.eval()` also works for V-shaped schedules.

    The library's eval() also iterates over the backwards, without computing them. If two
    neighbouring stages are on one rank, it fails on a gradient that does not exist. So this context
    removes the backwards from the library's private list of actions.
    """
    orders = schedule.pipeline_order_with_comms
    schedule.pipeline_order_with_comms = {
        rank: [part for action in order for part in action.sub_actions or [action]
               if part.computation_type.name in ("FORWARD", "SEND_F", "WAIT_SEND_F", "RECV_F")]
        for rank, order in orders.items()
    }  # fmt: skip
    try:
        yield
    finally:
        schedule.pipeline_order_with_comms = orders


def mean_of(losses):
    """Return the loss of a batch from the list that `schedule.step(losses=...)` has filled."""
    return torch.stack(losses).mean().detach() if losses else None
