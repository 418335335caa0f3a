"""The process group, the device of a rank, and the channels between ranks."""

import os
import sys
from collections import namedtuple
from datetime import timedelta

import torch
import torch.distributed as dist

# What a rank knows of the job it is part of. `transport` is the device on which messages lie: the
# host if ranks share a GPU. `channels` has a process group for each kind of message.
Job = namedtuple("Job", "rank num_ranks device transport channels")


def ranks_from_environment():
    """(rank, number of ranks, rank on this node, ranks on this node), as torchrun says."""
    names = ("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)
    return tuple(int(os.environ.get(name, alone)) for name, alone in names)


def join_job(wanted="auto", timeout=60.0):
    """Join the process group, take a device, open the channels."""
    from torch.distributed.nn import functional  # noqa: F401 - loaded later, it keeps the group

    rank, num_ranks, local_rank, local_ranks = ranks_from_environment()
    torch.set_num_threads(1)  # the same digits on every machine
    device, backend = torch.device("cpu"), "gloo"
    if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()):
        gpus = torch.cuda.device_count()
        device = torch.device("cuda", local_rank % gpus)
        torch.cuda.set_device(device)
        backend = "nccl" if local_ranks <= gpus else "gloo"
    limit = timedelta(seconds=timeout)
    store = dist.HashStore() if num_ranks == 1 else None
    both = "gloo" if backend == "gloo" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(both, store=store, rank=rank, world_size=num_ranks, timeout=limit)
    kinds = ("activation", "gradient")
    channels = {kind: dist.new_group(backend=backend, timeout=limit) for kind in kinds}
    if rank == 0:
        print(f"{num_ranks} ranks on {device.type}, {backend} messages", flush=True)
    return Job(rank, num_ranks, device, device if backend == "nccl" else "cpu", channels)


def leave_job(job):
    """Leave together, so that no rank takes a connection down that another still uses."""
    dist.barrier()
    dist.destroy_process_group()


def fitting(stage, output, shape, dtype):
    """The `output` of a stage, if it is what the next one has made room for; else the job ends."""
    if (output.shape, output.dtype) != (shape, dtype):
        own = f"{tuple(output.shape)} in {output.dtype}"
        sys.exit(f"stage {stage.index} gives {own}; an activation has to be {shape} in {dtype}")
    return output


class Message:
    """A message on its way, in a buffer of its own; `what` is e.g. "activation 3"."""

    def wait(self):
        """Block until it is through and return it. A rank that is lost or silent ends this one."""
        try:
            self.work.wait()
        except RuntimeError as error:
            reason = str(error).splitlines()[0].split(". ")[0]
            print(f"{self.what} got lost: {reason}", file=sys.stderr, flush=True)
            os._exit(1)
        return self.buffer.to(self.job.device)


class Sending(Message):
    def __init__(self, job, tensor, destination, what):
        self.job, self.what = job, f"{what} from rank {job.rank} to rank {destination}"
        self.buffer = tensor.detach().to(job.transport).contiguous()
        self.work = dist.isend(self.buffer, destination, group=job.channels[what.split()[0]])


class Receiving(Message):
    def __init__(self, job, shape, dtype, source, what):
        self.job, self.what = job, f"{what} from rank {source} to rank {job.rank}"
        self.buffer = torch.empty(shape, dtype=dtype, device=job.transport)
        self.work = dist.irecv(self.buffer, source, group=job.channels[what.split()[0]])


def gather(job, value):
    """Collect one Python object from every rank: a list on rank 0, None elsewhere."""
    values = [None] * job.num_ranks if job.rank == 0 else None
    dist.gather_object(value, values)
    return values
