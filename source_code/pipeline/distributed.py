"""The process group, the device of a rank, and the channels between ranks.

A message travels on the channel of its ordered pair of ranks: one process group for each
direction, so that with NCCL a send never waits behind a receive of the other direction. All ranks
create all channels at the start, in one fixed order, and send one number through each.
"""

import atexit
import faulthandler
import gc
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # its functions keep the default group if there is one by now

from pipeline.nodes import (
    NodesError,
    SlowLink,
    node_delay,
    node_name,
    rank_in_node_order,
    set_meeting_point,
)
from pipeline.watch import Watch, end_process

AT_ONCE = 0.0002  # seconds: a wait that is shorter did not wait for anything
LONGEST_START = 60.0  # seconds from the first rank's start to the last one's, at least


@dataclass
class Job:
    """What a rank knows of the job it is part of."""

    rank: int
    num_ranks: int
    device: torch.device
    backend: str
    watch: Watch
    channels: dict = field(default_factory=dict)  # (source, destination) -> process group
    nodes: list = field(default_factory=list)  # the name of each rank's node
    node_delay: float = 0.0  # seconds that messages between nodes are made to take longer
    slow_links: dict = field(default_factory=dict)  # destination -> SlowLink
    groups: dict = field(default_factory=dict)  # ranks that add up tensors -> process group
    message_arrived_at: float = 0.0  # time.perf_counter() at the end of the last wait for a message
    recording: object = None  # a RecordingWriter, which is told of every message

    @property
    def through_host(self):
        """Whether messages are staged through host memory: tensors on a GPU, gloo between them."""
        return self.device.type == "cuda" and self.backend == "gloo"

    def message_has_arrived(self):
        """Note the time: the action that needed the message can start (see recorder.py)."""
        self.message_arrived_at = time.perf_counter()

    def latencies(self):
        """The pretended latency of each pair of ranks on different nodes, in ms, as `Costs` takes."""
        ranks = range(self.num_ranks)
        pairs = [(a, b) for a in ranks for b in ranks if self.nodes[a] != self.nodes[b]]
        return {pair: 1000 * self.node_delay for pair in pairs} if self.node_delay else 0.0

    def describe(self):
        """Which way was taken, in one line."""
        how = f"{self.num_ranks} rank{'s' if self.num_ranks > 1 else ''} on {self.device.type}"
        if len(set(self.nodes)) > 1:
            how += f" of nodes {' '.join(self.nodes)}"
        if self.through_host:
            return f"{how}, sharing GPUs, gloo messages staged through host memory"
        return f"{how}, {self.backend} messages"


def ranks_from_environment():
    """(rank, number of ranks, rank on this node, ranks on this node).

    torchrun sets RANK and its companions, srun sets SLURM_PROCID and its own; without either, the
    process is a job of one rank.
    """
    env = os.environ
    if "RANK" in env:
        local = int(env.get("LOCAL_RANK", env["RANK"])), int(env.get("LOCAL_WORLD_SIZE", 1))
        return rank_in_node_order(int(env["RANK"]), *local), int(env["WORLD_SIZE"]), *local
    if int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        # The most ranks of any node: "4(x2),3" are two nodes of four ranks and one of three.
        counts = [int(n.split("(")[0]) for n in env["SLURM_STEP_TASKS_PER_NODE"].split(",")]
        local = int(env["SLURM_LOCALID"]), max(counts)
        return int(env["SLURM_PROCID"]), int(env["SLURM_STEP_NUM_TASKS"]), *local
    return 0, 1, 0, 1


def choose_device(wanted, local_rank, local_ranks):
    """Device and backend: NCCL where each rank has a GPU of its own, else gloo."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu"), "gloo"
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", local_rank % gpus)
    torch.cuda.set_device(device)
    return device, "nccl" if local_ranks <= gpus and dist.is_nccl_available() else "gloo"


def join_job(device="auto", timeout=60.0, pairs=None, groups=()):
    """Join the process group, open the channels and start the watch.

    `pairs` are the ordered pairs of ranks that will exchange messages; by default each rank with
    the next, in both directions. `groups` are tuples of ranks that will average tensors with each
    other. Every rank must pass the same ones. `timeout` in seconds.
    """
    rank, num_ranks, local_rank, local_ranks = ranks_from_environment()
    torch.set_num_threads(1)  # the same digits on every machine
    _dump_stacks_when_asked()
    device, backend = choose_device(device, local_rank, local_ranks)
    _load_autograd(device)
    store = _meet(rank, num_ranks, max(timeout, LONGEST_START))
    watch = Watch(rank, timeout)
    if num_ranks > 1:
        watch.join_others(dist.PrefixStore("watch", store.clone()), num_ranks)
    watch.start()
    # The watch reports first and by name; the limit of the group itself is the second line.
    limit = timedelta(seconds=2 * timeout + 5)
    collectives = "gloo" if backend == "gloo" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        collectives, store=store, rank=rank, world_size=num_ranks, timeout=limit
    )
    job = Job(rank, num_ranks, device, backend, watch)
    _learn_nodes(job, store)
    if pairs is None:
        pairs = [(i, i + 1) for i in range(num_ranks - 1)]
        pairs += [(i + 1, i) for i in range(num_ranks - 1)]
    for pair in sorted(set(pairs)):
        job.channels[pair] = dist.new_group(list(pair), backend=backend, timeout=limit)
    for ranks in groups:
        job.groups[ranks] = dist.new_group(list(ranks), backend=backend, timeout=limit)
    _connect_channels(job)
    for ranks, group in job.groups.items():
        connect_group(job, group, ranks)
    if num_ranks > 1 and not job.channels:  # the messages are the library's, in the default group
        connect_group(job, dist.group.WORLD, range(num_ranks))
    return job


def _connect_channels(job):
    """Send one number through every channel, one channel after the other in sorted order.

    Up to torch 2.14 NCCL connects a channel when it is first used, and that call blocks until the
    other rank uses the same channel. In a training step the two ranks of a pair may begin with
    different channels; then each waits for the other, and the step never starts. In sorted order
    both ranks of the first unconnected channel arrive at it. Gloo connects a channel when it is
    created, and needs none of this.
    """
    number = torch.zeros(1, device="cpu" if job.through_host else job.device)
    for source, destination in sorted(job.channels):
        channel = job.channels[source, destination]
        what = f"the first message from rank {source} to rank {destination}"
        if job.rank == source:
            with job.watch.waiting_for(destination, f"the receipt of {what}"):
                dist.send(number, destination, group=channel)
        elif job.rank == destination:
            with job.watch.waiting_for(source, what):
                dist.recv(number, source, group=channel)


def connect_group(job, group, ranks):
    """Add up one number over `ranks`, those of `group`, before anything depends on its connection.

    A collective connects all ranks of the group. With NCCL up to torch 2.14 a batch of sends and
    receives between two of them would otherwise wait for all the others as well.
    """
    if job.rank in ranks:
        number = torch.zeros(1, device="cpu" if job.through_host else job.device)
        following = ranks[(ranks.index(job.rank) + 1) % len(ranks)]
        with job.watch.waiting_for(following, "its first sum"):
            dist.all_reduce(number, group=group)


def _load_autograd(device):
    """Run a first backward from a given gradient, which imports half a second of code.

    Here all ranks do it at once; in the first step each would wait for the one behind it. On a GPU
    it also makes the thread that runs backwards known to the driver.
    """
    tensor = torch.ones(1, device=device, requires_grad=True)
    torch.autograd.backward(tensor * 1, torch.ones(1, device=device))


def _dump_stacks_when_asked():
    """On SIGUSR2 a rank prints where each of its threads is, and goes on."""
    if hasattr(signal, "SIGUSR2"):
        # Not sys.stderr, which a notebook or a test may have replaced by something without a file.
        faulthandler.register(signal.SIGUSR2, file=sys.__stderr__, all_threads=True)


def _learn_nodes(job, store):
    """Tell the others on which node this rank is, and slow down messages to other nodes if asked."""
    try:
        mine, delay = node_name(job.rank), node_delay()
    except NodesError as error:
        end_process(str(error))
    store = dist.PrefixStore("node", store)
    store.set(str(job.rank), mine)
    job.nodes = [name.decode() for name in store.multi_get(list(map(str, range(job.num_ranks))))]
    if delay:
        job.node_delay = delay
        others = [rank for rank, name in enumerate(job.nodes) if name != mine]
        job.slow_links = {rank: SlowLink(delay) for rank in others}


def _meet(rank, num_ranks, timeout):
    """The store through which ranks find each other."""
    if num_ranks == 1:
        if hasattr(dist, "HashStore"):
            return dist.HashStore()
        # On Windows torch has none, and is built without libuv.
        return dist.TCPStore("127.0.0.1", 0, is_master=True, use_libuv=False)
    try:
        set_meeting_point()
    except NodesError as error:
        end_process(str(error))
    os.environ.setdefault("RANK", str(rank))
    os.environ.setdefault("WORLD_SIZE", str(num_ranks))
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
    except RuntimeError as error:
        end_process(
            f"rank {rank} waited {timeout:g} s for all {num_ranks} ranks to start "
            f"({str(error).splitlines()[0]})"
        )
    return store


def leave_job(job):
    """Leave together, so that no rank takes a connection down that another still uses."""
    with waiting_for_all(job, "the end of the job"):
        dist.barrier()
    job.watch.stop()
    dist.destroy_process_group()
    atexit.register(_end_threads)


def _end_threads():
    """End the groups' threads: one that frees a tensor while Python shuts down would abort it.

    They end with the last reference to their group, which may be part of a cycle. FSDP2's caches
    keep one: its threads at least get the time to finish what they are at.
    """
    time.sleep(0.02)
    gc.collect()


class Sending:
    """A message on its way. It owns its buffer until the other side has taken it.

    `what` names the message if it gets lost: a text, or anything that str() turns into one.
    """

    def __init__(self, job, tensor, destination, what):
        self.job, self.destination, self.what = job, destination, what
        self.buffer = tensor.detach().to("cpu" if job.through_host else job.device).contiguous()
        with job.watch.waiting_for(destination, what):
            channel = job.channels[job.rank, destination]
            self.work = self._start(channel)
        if job.recording:
            job.recording.note_sent(what, destination, self.buffer)

    def _start(self, channel):
        def start(buffer=self.buffer):
            return dist.isend(buffer, self.destination, group=channel)

        link = self.job.slow_links.get(self.destination)
        return link.send(start) if link else start()

    def wait(self):
        """Block until the message is taken, then let go of the buffer."""
        with self.job.watch.waiting_for(self.destination, f"the receipt of {self.what}"):
            self.work.wait()
        self.buffer = None


class Receiving:
    """A buffer for a message that is expected from `source`; `what` names it."""

    def __init__(self, job, shape, dtype, source, what):
        self.job, self.source, self.what = job, source, what
        device = "cpu" if job.through_host else job.device
        self.buffer = torch.empty(shape, dtype=dtype, device=device)
        with job.watch.waiting_for(source, what):
            channel = job.channels[source, job.rank]
            self.work = dist.irecv(self.buffer, source, group=channel)

    def wait(self):
        """Block until the message is there and return it, on the device of this rank."""
        if self.job.recording:
            self.job.recording.note_wait(self.what, self.source)
        asked_at = time.perf_counter()
        with self.job.watch.waiting_for(self.source, self.what):
            self.work.wait()
        if time.perf_counter() - asked_at > AT_ONCE:  # else it had been there before
            self.job.message_has_arrived()
        received = self.buffer.to(self.job.device)
        if self.job.recording:
            self.job.recording.note_received(self.what, self.source, received)
        return received


class Summing:
    """A sum of tensors over `ranks`, one of the job's groups, on its way as one flat message.

    All of them must start it, and several in the same order. The tensors may not be touched until
    `wait`, which replaces them by their sums; `what` names what the others add.
    """

    def __init__(self, job, tensors, ranks, what):
        self.job, self.tensors, self.ranks, self.what = job, tensors, ranks, what
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        self.flat = flat.to("cpu" if job.through_host else job.device)
        with self.waiting():
            self.work = self._start()

    def _start(self):
        def start():
            return dist.all_reduce(self.flat, group=self.job.groups[self.ranks], async_op=True)

        links = [self.job.slow_links[rank] for rank in self.ranks if rank in self.job.slow_links]
        return links[0].send(start) if links else start()

    def waiting(self):
        following = self.ranks[(self.ranks.index(self.job.rank) + 1) % len(self.ranks)]
        return self.job.watch.waiting_for(following, self.what)

    def wait(self):
        """Block until the sums are there."""
        with self.waiting():
            self.work.wait()
        self.job.message_has_arrived()
        sums = self.flat.to(self.job.device).split([tensor.numel() for tensor in self.tensors])
        for tensor, total in zip(self.tensors, sums):
            tensor.copy_(total.view_as(tensor))


def mean_over_ranks(job, tensors, ranks):
    """Replace each tensor by its mean over `ranks`, one of the job's groups, in one message."""
    Summing(job, tensors, ranks, "its gradients").wait()
    for tensor in tensors:
        tensor /= len(ranks)


def waiting_for_all(job, what):
    """Around a call that needs every rank: each rank answers for the one before it."""
    return job.watch.waiting_for((job.rank + 1) % job.num_ranks, what)


def gather(job, value):
    """Collect one Python object from every rank: a list on rank 0, None elsewhere."""
    if job.num_ranks == 1:
        return [value]
    values = [None] * job.num_ranks if job.rank == 0 else None
    with waiting_for_all(job, "its results"):
        dist.gather_object(value, values)
    return values


def host_name():
    return socket.gethostname()
