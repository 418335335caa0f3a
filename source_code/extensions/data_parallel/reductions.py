# SPDX-License-Identifier: Apache-2.0
"""The flags that choose how replicas sum their gradients, and a report of when the sums end."""

import socket
import statistics

from extensions.data_parallel.replica_arguments import pipeline_ranks
from extensions.data_parallel.replicas import AllReduce, replicate
from pipeline.collectives import gather


def add_reduction_flags(parser):
    add = parser.add_argument
    add("--reduce", choices=["all-reduce", "ddp", "fsdp2"], default="all-reduce",
        help="who sums the gradients of the replicas")  # fmt: skip
    add("--library", action="store_true", help="let torch.distributed.pipelining do the work")


def check_reduction(arguments, schedule):
    """Reject unsupported combinations of flags. Returns the schedule that will be performed."""
    if arguments.reduce == "ddp" and "I" in schedule.kinds:
        raise SystemExit(
            f"--reduce ddp with --schedule {arguments.schedule}: a backward in two halves never calls "
            "DDP's hooks, so DDP would sum nothing and raise no error; use all-reduce or fsdp2"
        )
    if arguments.reduce == "fsdp2" and getattr(arguments, "record", None):
        raise SystemExit(
            "--record with --reduce fsdp2: no rank has a whole weight or gradient to take a "
            "fingerprint of; use --reduce all-reduce or ddp"
        )
    if not arguments.library:
        return schedule
    # These imports take seconds, and only --library needs them.
    from extensions.torch_pipelining.library import (
        complaint_about,
        device_without_sharing,
        schedule_as_data,
    )
    from extensions.torch_pipelining.library_worker import LIBRARY_NAMES

    if arguments.schedule not in LIBRARY_NAMES:
        raise SystemExit(
            f"--library has no --schedule {arguments.schedule}; use one of "
            f"{', '.join(LIBRARY_NAMES)}"
        )
    if arguments.option:
        raise SystemExit("--library has an order of its own for each schedule; leave out --option")
    name = LIBRARY_NAMES[arguments.schedule]
    ranks = pipeline_ranks(arguments)
    sizes = name, ranks, arguments.microbatches, schedule.num_stages // ranks
    if complaint := complaint_about(*sizes):
        raise SystemExit(complaint)
    arguments.device = device_without_sharing(arguments.device)
    return replicate(schedule_as_data(*sizes), arguments.replicas)


def build_reduction(arguments, replicas, schedule):
    """Return the object that sums the gradients as --reduce says."""
    if arguments.reduce == "all-reduce":
        return AllReduce(replicas, schedule)
    # The import takes half a second, and all-reduce does not need it.
    from extensions.data_parallel.wrappers import WithDDP, WithFSDP2

    if arguments.reduce == "ddp":
        return WithDDP(replicas, schedule)
    return WithFSDP2(replicas, schedule)


def describe_sums(arguments, job, schedule, reduction):
    """Print on rank 0 the layout of the replicas and when each rank has its sums.

    The time is the median over the steps, in milliseconds after the last action of all ranks. It is
    left out on GPUs, which sum after the call has returned, and on several machines, whose clocks
    do not agree.
    """
    stages = schedule.num_stages
    text = f"replicas {arguments.replicas} x stages {stages}, sums by {arguments.reduce}"
    if arguments.reduce == "all-reduce" and arguments.replicas > 1 and reduction.done_at:
        late = gather(job, (reduction.last_ended_at, reduction.done_at))
        machines = gather(job, socket.gethostname())
        if job.rank == 0 and len(set(machines)) == 1 and job.device.type == "cpu":
            text += f", there {late_of_ranks(late)} ms after the last action of all"
    if job.rank == 0 and arguments.steps:
        print(text, flush=True)


def late_of_ranks(late):
    """Return each rank's median over the steps, in ms, as text.

    `late` has, for each rank, its (ends of last actions, ends of sums) in seconds.
    """
    last = [max(ends) for ends in zip(*(ends for ends, _ in late))]
    medians = [statistics.median(map(float.__sub__, done, last)) for _, done in late]
    return " ".join(f"{1000 * median:+.1f}" for median in medians)
