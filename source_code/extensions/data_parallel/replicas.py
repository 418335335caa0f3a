# SPDX-License-Identifier: Apache-2.0
"""Several equal pipelines side by side: a mesh of replicas x ranks of a pipeline.

Every replica has the whole model, cut over its own ranks, and takes its own rows of each batch.
Rank = replica x pipeline ranks + rank in the pipeline, so that a pipeline's neighbours stay
neighbours in the machine. Replicas sum, between the ranks with the same stages: the gradients after
a stage's last backward, the loss, and the number of tokens of a batch that no rank has whole. All
other messages stay within a pipeline.

`replicate` writes the schedules of all pipelines as one Schedule, in which replica r has the M
micro-batches from r x M on. Worker, simulator and figures need no change for it. A step in a
script is

    inputs, targets = own_microbatches(batch, replicas, arguments.microbatches, job.device)
    loss_function.real_tokens = replicas.sum_number(count_real_tokens(targets.values()))
    loss = replicas.sum_loss(worker.run_step(inputs, targets))  # a DataParallelWorker
    clip_gradients(job, named_parameters, largest_norm)  # as without replicas

where `loss_function`, of every stage, is a ShareOfLoss (see padding.py).
"""

import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipeline.collectives import Summing, connect_group
from pipeline.job import Job
from pipeline.schedule import Schedule
from pipeline.worker import Worker


def replicate(schedule, num_replicas):
    """The schedules of `num_replicas` equal pipelines as one schedule of all their ranks.

    The copies need nothing from each other. Replica r has the micro-batches r x M to (r + 1) x M - 1.
    """
    m = schedule.num_microbatches
    orders = [
        tuple(action._replace(microbatch=replica * m + action.microbatch) for action in order)
        for replica in range(num_replicas)
        for order in schedule.orders
    ]
    return Schedule(schedule.name, tuple(orders))


@dataclass(frozen=True)
class Replicas:
    """The replicas of a job, seen from one of its ranks.

    `mesh` is a DeviceMesh (replicas, ranks of a pipeline) with dimensions "replica" and "stage".
    `peers` are the ranks of all replicas that have this rank's stages.
    """

    job: Job
    mesh: DeviceMesh
    count: int
    replica: int
    peers: tuple

    def sum_number(self, number):
        """Return on every rank the sum of a whole number over the replicas."""
        total = torch.tensor([number], device=self.job.device)
        if self.count > 1:
            Summing(self.job, [total], self.peers, "its number of tokens").wait()
        return total.item()

    def sum_loss(self, loss):
        """Return the loss of the whole batch on the ranks of the last stage, None elsewhere."""
        if loss is None or self.count == 1:
            return loss
        total = loss.detach().reshape(1).clone()
        Summing(self.job, [total], self.peers, "its share of the loss").wait()
        return total[0]


def form_replicas(job, count):
    """Arrange the ranks of `job`, a multiple of `count`, as `count` replicas. All ranks call it."""
    pipeline_ranks = job.num_ranks // count
    shape, names = (count, pipeline_ranks), ("replica", "stage")
    mesh = init_device_mesh(job.device.type, shape, mesh_dim_names=names)
    peers = tuple(range(job.rank % pipeline_ranks, job.num_ranks, pipeline_ranks))
    job.groups[peers] = mesh.get_group("replica")
    if job.num_ranks > 1:  # in one order, so that no rank waits in the other group
        first = job.rank - job.rank % pipeline_ranks
        connect_group(job, mesh.get_group("stage"), range(first, first + pipeline_ranks))
        connect_group(job, mesh.get_group("replica"), peers)
    return Replicas(job, mesh, count, job.rank // pipeline_ranks, peers)


def own_microbatches(batch, replicas, num_microbatches, device):
    """Return this replica's rows of `batch`, by micro-batch.

    `batch` is a pair of inputs and targets, each (batch size, length). Returns two dictionaries
    from micro-batch, numbered as in `replicate`, to its rows.
    """
    first = replicas.replica * num_microbatches
    own = range(first, first + num_microbatches)
    parts = [tokens.chunk(replicas.count * num_microbatches) for tokens in batch]
    return tuple({m: part[m].to(device) for m in own} for part in parts)


def last_backwards(schedule, rank):
    """Return {action: stage}: the actions that complete the gradients of the stages of `rank`."""
    last = {a.stage: a for a in schedule.orders[rank] if a.kind in "BW"}
    return {action: stage for stage, action in last.items()}


class DataParallelWorker(Worker):
    """A Worker that sums gradients over replicas by `reduction`.

    If `sums` is False, a step accumulates gradients only, as one of several passes per update.
    """

    def __init__(self, job, schedule, stages, reduction):
        super().__init__(job, schedule, stages)
        self.reduction, self.sums = reduction, True

    def perform(self, action):
        with self.reduction.around(action) if self.sums else nullcontext():
            super().perform(action)

    def end_step(self):
        if self.sums:
            self.reduction.finish()
        super().end_step()


BUCKET = 25 * 2**20  # bytes of gradients per message, the default of torch's DDP


class SumInBuckets:
    """The sum of a stage's gradients over `ranks`, in several messages of about BUCKET bytes.

    A backward ends with the first layers, so the last layers are summed first. A bucket starts when
    all of its gradients are complete and all earlier buckets have started, so every replica sends
    in the same order.
    """

    def __init__(self, job, parameters, ranks, what):
        self.job, self.ranks, self.what = job, ranks, what
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self.buckets = buckets_of(trained[::-1], BUCKET)
        self.missing = [set(map(id, bucket)) for bucket in self.buckets]
        self.sums = []  # those that have started

    def complete(self, parameter):
        """Note that a gradient is final before the sum."""
        for missing in self.missing:
            missing.discard(id(parameter))
        while len(self.sums) < len(self.buckets) and not self.missing[len(self.sums)]:
            self.start_next()

    def start_next(self):
        gradients = []
        for parameter in self.buckets[len(self.sums)]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        self.sums.append(Summing(self.job, gradients, self.ranks, self.what))

    def start_rest(self):
        while len(self.sums) < len(self.buckets):
            self.start_next()

    def wait(self):
        """Block until every gradient is replaced by the sum."""
        for summing in self.sums:
            summing.wait()


def buckets_of(parameters, size):
    """Return the parameters in order, in lists of at most `size` bytes or of one parameter."""
    buckets, room = [], 0
    for parameter in parameters:
        if not buckets or parameter.nbytes > room:
            buckets.append([])
            room = size
        buckets[-1].append(parameter)
        room -= parameter.nbytes
    return buckets


class AllReduce:
    """Sums the gradients of a rank's stages over the replicas, by plain all-reduce.

    The gradients of a stage are summed in buckets, which start within the stage's last backward,
    while this rank and others still compute; with a split backward they start at its end. Call
    `wrap` on each stage's part before the first step. A DataParallelWorker calls `around` and
    `finish`; then every `.grad` is that of the whole batch. A missing gradient counts as zeros.
    """

    def __init__(self, replicas, schedule):
        self.replicas = replicas
        self.parts = {}  # by the index of their stage
        self.last = last_backwards(schedule, replicas.job.rank)
        self.sums = {}  # on their way, by stage
        self.running = None  # the sum of the stage whose last backward runs now
        # time.perf_counter() of each step at the end of this rank's last action, and at the end
        # of its sums.
        self.last_ended_at, self.done_at = [], []

    def wrap(self, part, index):
        """Return the module that stage `index` runs: here `part` itself."""
        self.parts[index] = part
        self.follow(part, part)
        return part

    def follow(self, computing, part):
        """Note each gradient of `part` that a backward through `computing` completes.

        `computing` is `part` itself or a copy of it in another type.
        """
        if self.replicas.count > 1:
            for weight, updated in zip(computing.parameters(), part.parameters()):
                if weight.requires_grad:
                    weight.register_post_accumulate_grad_hook(partial(self.note, updated))

    def note(self, updated, weight):
        if self.running:
            self.running.complete(updated)

    @contextmanager
    def around(self, action):
        """Return the context of each action of the worker."""
        summed = action in self.last and self.replicas.count > 1
        if summed and action.kind == "B" and not shares_weights(self.parts[action.stage]):
            self.running = self.sum_of(action.stage)
        yield
        if summed:
            self.start(action.stage)

    def sum_of(self, index):
        peers, what = self.replicas.peers, f"its gradients of stage {index}"
        return SumInBuckets(self.replicas.job, self.parts[index].parameters(), peers, what)

    def start(self, index):
        """Start the sum of the gradients of stage `index`, except those already under way."""
        self.sums[index], self.running = self.running or self.sum_of(index), None
        self.sums[index].start_rest()

    def finish(self):
        """Start the sums that no last backward has started, and wait for all sums."""
        self.last_ended_at.append(time.perf_counter())
        for index in self.parts if self.replicas.count > 1 else ():
            if index not in self.sums:
                self.start(index)
        for summing in self.sums.values():
            summing.wait()
        self.sums = {}
        self.done_at.append(time.perf_counter())


def shares_weights(part):
    """Return whether a weight is used twice: its gradient is complete only after the backward."""
    return len(list(part.named_parameters(remove_duplicate=False))) > len(list(part.parameters()))
