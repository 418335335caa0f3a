# SPDX-License-Identifier: Apache-2.0
"""Replicas x stages x tensor-parallel ranks: each rank's position in the mesh, and its actions.

Rank = (replica x stages + stage) x t + index in its tensor group. The ranks of a tensor group are
neighbours, because they communicate most: several times per layer, and a pipeline once per stage.
"""

from torch.distributed.device_mesh import init_device_mesh

from pipeline.command_line import positive_integer
from pipeline.job import join_job
from pipeline.schedule import Schedule

NAMES = "replica", "stage", "tensor"


def add_mesh_flags(parser):
    """Add --tensor and --sequence; --replicas is in replica_arguments.py."""
    add = parser.add_argument
    add("--tensor", type=positive_integer, metavar="T",
        help="ranks that share a layer, by default 2, or 1 if the number of ranks is odd")  # fmt: skip
    add("--sequence", choices=["split", "whole"], default="split",
        help="what each of these ranks keeps of the sequence between layers")  # fmt: skip


def stage_ranks(arguments):
    """Return the number of ranks per pipeline, which has one rank of each tensor group.

    Rejects a mesh that does not fit the ranks or the model. Sets the default of --tensor.
    """
    a = arguments
    if a.tensor is None:
        a.tensor = 1 if a.num_ranks // a.replicas % 2 else 2
    t = a.tensor
    if a.num_ranks % (a.replicas * t):
        raise SystemExit(
            f"--replicas {a.replicas} times --tensor {t} does not divide the {a.num_ranks} ranks of "
            "this job; use numbers whose product does"
        )
    parts = {"--heads": a.heads, "--kv-heads": a.kv_heads, "the vocabulary": a.vocabulary}
    parts["the feed-forward width"] = a.config.hidden_dim
    if a.sequence == "split":
        parts["--seq-len"] = a.seq_len
    for name, size in parts.items():
        if size % t:
            raise SystemExit(f"--tensor {t} does not divide {name} ({size}); use a divisor of it")
    return a.num_ranks // (a.replicas * t)


def start_sharded_job(arguments, schedule):
    """Meet the other ranks. If the sequence is split, a message has a part of the sequence."""
    a = arguments
    length = a.seq_len // (a.tensor if a.sequence == "split" else 1)
    shape = a.microbatch_size, length, a.dim
    return join_job(a.device, a.timeout, schedule.pairs, shape, a.torch_dtype)


def build_mesh(arguments, job):
    """Return the DeviceMesh, with a process group for each row. All ranks call it."""
    sizes = arguments.replicas, job.num_ranks // (arguments.replicas * arguments.tensor)
    return init_device_mesh(job.device.type, (*sizes, arguments.tensor), mesh_dim_names=NAMES)


def spread(schedule, replicas, tensor):
    """The schedule of one pipeline on all ranks of the mesh, as one Schedule.

    The ranks of the same replica and place in their tensor groups are a lane, a pipeline with
    channels of its own. Lane n = replica x t + place has the micro-batches n x M to (n + 1) x M - 1:
    a micro-batch goes through all lanes of its replica at the same time, a part in each.
    """
    m = schedule.num_microbatches
    orders = [
        tuple(a._replace(microbatch=(replica * tensor + place) * m + a.microbatch) for a in order)
        for replica in range(replicas)
        for order in schedule.orders
        for place in range(tensor)
    ]
    return Schedule(schedule.name, tuple(orders))


def own_rows(batch, arguments, replica, place, device):
    """Return a lane's inputs and targets, each {micro-batch: (micro-batch size, length)}."""
    a, first = arguments, (replica * arguments.tensor + place) * arguments.microbatches
    parts = [tokens.chunk(a.replicas * a.microbatches) for tokens in batch]
    numbers = range(a.microbatches)
    return tuple(
        {first + k: part[replica * a.microbatches + k].to(device) for k in numbers}
        for part in parts
    )
