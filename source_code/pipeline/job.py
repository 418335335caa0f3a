# SPDX-License-Identifier: Apache-2.0
"""How ranks meet, on which device each computes, and how a message travels from one to another.

Each ordered pair of ranks has a channel, a process group of its own, so that the messages of one
direction keep their order. NCCL does not promise that two channels make progress at the same time:
all ranks use them in one order, which follows from the schedule. All ranks open all channels in one
order and send a number through each: NCCL sets up a communicator at its first message, and blocks
until both sides have arrived.
"""

import atexit
import gc
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported early: its functions bind an existing default group

from pipeline.command_line import ranks_from_environment, restarts_from_environment
from pipeline.message import Message

SLOW_START = 60.0  # least seconds that ranks have to find each other
GRACE = 5.0  # seconds past a wait's timeout, after which the transport fails
joining = []  # contexts in which a job of this process is joined; the last one counts


@dataclass
class Job:
    """A rank's view of its job.

    Activations and gradients have `dtype` and `shape`. `shape` may be a function of the stage:
    then `shape(s)` is the shape of what stage s hands to the next one, and of its gradient.
    """

    rank: int
    num_ranks: int
    device: torch.device
    backend: str
    timeout: float  # seconds that a rank may wait for another
    store: object = None  # the key-value store that all ranks share
    shape: object = None  # a tuple, or a function of the stage
    dtype: torch.dtype | None = None
    channels: dict = field(default_factory=dict)  # the pairs of `join_job` -> process group
    groups: dict = field(default_factory=dict)  # ranks that sum tensors -> process group
    sent: list = field(default_factory=list)  # Transfers that may not have arrived yet

    @property
    def wire(self):
        """The device of messages: the CPU with gloo (no GPU or a shared one), else `device`."""
        return torch.device("cpu") if self.backend == "gloo" else self.device

    def send(self, tensor, destination, message):
        """Send without waiting. Raises ValueError for an activation or gradient of another shape:
        the receiver would take a part of it for the whole tensor, or wait for ever."""
        declared = self.shape and getattr(message, "what", None) in ("activation", "gradient")
        if declared and (tensor.shape, tensor.dtype) != (self.shape_of(message), self.dtype):
            made, wanted = f"{tuple(tensor.shape)} in {tensor.dtype}", self.shape_of(message)
            raise ValueError(f"{message} is {made}, but has to be {wanted} in {self.dtype}")
        buffer = tensor.detach().to(self.wire).contiguous()
        self.sent.append(Transfer(self, dist.isend, buffer, destination, message))
        return self.sent[-1]

    def receive(self, source, message, shape=None, dtype=None):
        """Expect a tensor; its `wait` returns it. `shape` and `dtype` are the job's unless given."""
        shape, dtype = shape or self.shape_of(message), dtype or self.dtype
        buffer = torch.empty(shape, dtype=dtype, device=self.wire)
        return Transfer(self, dist.irecv, buffer, source, message)

    def shape_of(self, message):
        """Return the shape of an activation or a gradient."""
        if not callable(self.shape):
            return self.shape
        # Stage s makes the gradient of the activation that stage s - 1 has sent.
        return tuple(self.shape(message.stage - (message.what == "gradient")))

    def release_sent(self, message):
        """Let go of a sent tensor, once the arrival of another message shows that it was taken.

        Until a transfer has been waited for, torch keeps its tensor. Without this, a rank would keep
        all tensors that it has sent until its step ends. Unknown messages are ignored.
        """
        for number, transfer in enumerate(self.sent):
            if transfer.message == message:
                transfer.wait()
                del self.sent[number]
                return

    def complete_sends(self):
        """End a step: block until every message of this rank has been taken."""
        for transfer in self.sent:
            transfer.wait()
        self.sent.clear()

    def channel(self, source, destination, message):
        pair = source, destination
        return self.channels.get((*pair, getattr(message, "what", None))) or self.channels[pair]

    def start(self, peers, begin):
        """Start a transfer to the ranks `peers`; `begin()` returns torch's work."""
        return begin()

    def starting(self, peer, what):
        """Return the context in which a transfer is started, with rank `peer` at its other end."""
        return nullcontext()

    def waiting(self, peer, what):
        """Return the context of a call that blocks until rank `peer` acts."""
        return nullcontext()

    def waiting_for_all(self, what):
        """Return the context of a call that needs every rank; messages name only the next one."""
        return self.waiting((self.rank + 1) % self.num_ranks, what)

    def leave(self):
        """Leave together, so that no rank closes a connection that another still uses."""
        with self.waiting_for_all("the end of the job"):
            dist.barrier()
        dist.destroy_process_group()
        # A group's threads end with its last reference; one that outlives Python aborts the process.
        # Without freeze(), Python would search all objects again when it ends, which takes 0.4 s.
        atexit.register(lambda: (time.sleep(0.02), gc.collect(), gc.freeze()))


class Transfer:
    """A tensor on its way to or from rank `peer`. It owns its buffer until `wait` has returned."""

    def __init__(self, job, operation, buffer, peer, message):
        self.job, self.buffer, self.peer, self.message = job, buffer, peer, message
        self.sends = operation is dist.isend
        self.awaited = f"the receipt of {message}" if self.sends else message
        ends = (job.rank, peer) if self.sends else (peer, job.rank)
        begin = partial(operation, buffer, peer, group=job.channel(*ends, message))
        with job.starting(peer, self.awaited):
            self.work = job.start([peer], begin) if self.sends else begin()

    def wait(self):
        """Block until it has been sent, or has arrived: then return it, on this rank's device."""
        if self.work is not None:
            with self.job.waiting(self.peer, self.awaited):
                self.work.wait()
        tensor, self.buffer, self.work = self.buffer, None, None  # torch's work has the buffer, too
        return None if self.sends else tensor.to(self.job.device)


def join_job(device="auto", timeout=60.0, pairs=None, shape=None, dtype=None):
    """Meet the other ranks and open the channels. Returns the Job.

    `pairs` are the (source, destination), or (source, destination, what), that exchange messages;
    by default each rank and the next, in both directions. They are equal on all ranks. If `joining`
    has a context, ranks find each other in that context instead of in `meet`.
    """
    rank, num_ranks, local_rank, _ = ranks_from_environment()
    torch.set_num_threads(1)  # the same digits on every machine
    device = choose_device(device, local_rank)
    # The first backward with a given gradient imports half a second of code: here all do it at once.
    torch.ones(1, device=device, requires_grad=True).backward(torch.ones(1, device=device))
    job = Job(rank, num_ranks, device, "gloo", timeout)
    with (joining[-1] if joining else meet)(job):
        open_channels(job, pairs)
    job.shape, job.dtype = shape, dtype
    return job


@contextmanager
def meet(job):
    """Find the other ranks where the launcher says. Within this context the job has its store."""
    if job.num_ranks == 1:
        job.store = store_of_one()
    else:
        limit = timedelta(seconds=max(job.timeout, SLOW_START))
        ranks = {"rank": job.rank, "world_size": job.num_ranks}
        job.store = of_this_attempt(next(dist.rendezvous("env://", **ranks, timeout=limit))[0])
    yield


def of_this_attempt(store):
    """Return `store` without what ranks wrote before torchrun restarted them (--max-restarts)."""
    return dist.PrefixStore(f"attempt {restarts_from_environment()}", store)


def store_of_one():
    """Return the store of a job of one rank; on Windows torch has no HashStore and no libuv."""
    alone = getattr(dist, "HashStore", None)
    return alone() if alone else dist.TCPStore("127.0.0.1", 0, is_master=True, use_libuv=False)


def open_channels(job, pairs):
    """Connect all ranks, then each pair by a channel, and send a first message through it."""
    rank, limit = job.rank, timedelta(seconds=job.timeout + GRACE)
    job.backend = common_backend(job)
    backends, device = "gloo", None
    if job.backend == "nccl":
        backends, device = "cpu:gloo,cuda:nccl", job.device  # torch would guess it
    ranks = {"rank": rank, "world_size": job.num_ranks}
    dist.init_process_group(backends, store=job.store, **ranks, timeout=limit, device_id=device)
    if pairs is None:
        pairs = [(a, b) for a in range(job.num_ranks) for b in (a - 1, a + 1)]
        pairs = [(a, b) for a, b in pairs if 0 <= b < job.num_ranks]
    for pair in sorted(set(pairs)):
        job.channels[pair] = dist.new_group(list(pair[:2]), backend=job.backend, timeout=limit)
    for source, destination, *what in job.channels:
        first = Message(*what or ["first message"], source, 0)
        if rank == source:
            job.send(torch.ones(1), destination, first).wait()
        elif rank == destination:
            job.receive(source, first, (1,), torch.float32).wait()
    job.sent.clear()


def common_backend(job):
    """Return "nccl" if each rank has its own GPU, else "gloo", the same on all ranks; all call it.

    The ranks compare their GPUs' names, because under srun a rank may see only its own GPU.
    """
    on_gpu = job.device.type == "cuda" and dist.is_nccl_available()
    own = str(torch.cuda.get_device_properties(job.device).uuid) if on_gpu else ""
    job.store.set(f"gpu/{job.rank}", own)
    gpus = [job.store.get(f"gpu/{rank}") for rank in range(job.num_ranks)]
    return "nccl" if all(gpus) and len(set(gpus)) == job.num_ranks else "gloo"


def choose_device(wanted, local_rank):
    """Return the device of this rank; `auto` is a GPU if there is one, which ranks may share."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
