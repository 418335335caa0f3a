"""Several equal pipelines side by side: a mesh of replicas x ranks of a pipeline.

Every replica has the whole model, cut over its own ranks, and takes its own rows of each batch.
Rank = replica x pipeline ranks + rank in the pipeline, so that a pipeline's neighbours stay
neighbours in the machine. Two things cross from replica to replica, both between the ranks that
have the same stages: how many tokens the whole batch has, before the first forward, and the sum of
the gradients, after a stage's last backward. Everything else stays within a pipeline.

A schedule is data, so replicas are, too: `replicate` writes the schedules of all pipelines as one,
in which replica r has the micro-batches from r x M on. Worker, simulator and figures take it
as it is. A step in a script is

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

    The copies need nothing of each other. Replica r has the micro-batches r x M to (r + 1) x M - 1.
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

    `mesh` is torch's own description, (replicas, ranks of a pipeline), with the dimensions named
    "replica" and "stage"; `peers` are the ranks of all replicas that have this rank's stages.
    """

    job: Job
    mesh: DeviceMesh
    count: int
    replica: int
    peers: tuple

    def sum_number(self, number):
        """The sum of a whole number over the replicas, on every rank."""
        total = torch.tensor([number], device=self.job.device)
        if self.count > 1:
            Summing(self.job, [total], self.peers, "its number of tokens").wait()
        return total.item()

    def sum_loss(self, loss):
        """The loss of the whole batch on the ranks of the last stage, None elsewhere."""
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
    """This replica's rows of `batch`, by micro-batch.

    `batch` is a pair of inputs and targets, each (batch size, length); returns two dictionaries
    from micro-batch, as `replicate` counts them, to its rows.
    """
    first = replicas.replica * num_microbatches
    own = range(first, first + num_microbatches)
    parts = [tokens.chunk(replicas.count * num_microbatches) for tokens in batch]
    return tuple({m: part[m].to(device) for m in own} for part in parts)


def last_backwards(schedule, rank):
    """{action: stage}: after which action a stage of `rank` has all of its gradients."""
    last = {a.stage: a for a in schedule.orders[rank] if a.kind in "BW"}
    return {action: stage for stage, action in last.items()}


def sums_done(timeline, cost, buckets=1):
    """For each rank: when it has its sums, counted from the last action of all ranks.

    A sum takes `cost` on its way and starts when its stage is done; a rank's sums travel one after
    the other. In `buckets` equal parts, as DDP cuts it, a sum starts while the stage's last backward
    still runs: a part is ready when its share of that backward is done. Below zero: hidden behind
    what other ranks still compute. Times as in the timeline.
    """
    done = []
    for events in timeline.by_rank:
        last = {e.action.stage: e for e in events if e.action.kind in "BW"}
        ready = [
            event.end - (event.end - event.start) * (1 - part / buckets)
            for event in last.values()
            for part in range(1, buckets + 1)
        ]
        free = 0.0
        for moment in sorted(ready):
            free = max(free, moment) + cost / buckets
        done.append(free - timeline.start - timeline.makespan)
    return done


class DataParallelWorker(Worker):
    """A Worker whose actions and steps sum gradients over replicas, as `reduction` says.

    With `sums` set to False a step only adds up gradients, for one of several passes of an update.
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


BUCKET = 25 * 2**20  # bytes of gradients that travel together, as torch's DDP has it


class SumInBuckets:
    """The sum of a stage's gradients over `ranks`, in several messages of about BUCKET bytes.

    A backward ends with the first layers, so the last ones go first. A bucket starts once all of its
    gradients are complete and all buckets before it have started: every replica sends in one order.
    """

    def __init__(self, job, parameters, ranks, what):
        self.job, self.ranks, self.what = job, ranks, what
        self.buckets = buckets_of(list(parameters)[::-1], BUCKET)
        self.missing = [set(map(id, bucket)) for bucket in self.buckets]
        self.sums = []  # those that have started

    def complete(self, parameter):
        """Note that a gradient will not change any more before the sum."""
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
        """Block until every gradient is the sum."""
        for summing in self.sums:
            summing.wait()


def buckets_of(parameters, size):
    """The parameters in their order, in lists of at most `size` bytes, or of one parameter."""
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

    The gradients of a stage travel in buckets, which start within the stage's last backward, while
    this rank and others still compute; a backward in halves has them at its end. `wrap` each stage's
    part before the stage is built; a DataParallelWorker calls `around` and `finish`: then every
    `.grad` is that of the whole batch. A parameter without a gradient counts as one of zeros.
    """

    def __init__(self, replicas, schedule):
        self.replicas = replicas
        self.parts = {}  # by the index of their stage
        self.last = last_backwards(schedule, replicas.job.rank)
        self.sums = {}  # on their way, by stage
        self.running = None  # the sum of the stage whose last backward runs now
        # time.perf_counter() at which, in each step, this rank had ended its last action, and at
        # which its sums were there.
        self.last_ended_at, self.done_at = [], []

    def wrap(self, part, index):
        """What stage `index` is to run: `part`, as it is."""
        self.parts[index] = part
        self.follow(part, part)
        return part

    def follow(self, computing, part):
        """Note each gradient of `part` that a backward through `computing`, it or a copy, completes."""
        if self.replicas.count > 1:
            for weight, updated in zip(computing.parameters(), part.parameters()):
                weight.register_post_accumulate_grad_hook(partial(self.note, updated))

    def note(self, updated, weight):
        if self.running:
            self.running.complete(updated)

    @contextmanager
    def around(self, action):
        """Around each action of the worker."""
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
        """Send what has not left yet of the gradients of stage `index` on its way."""
        self.sums[index], self.running = self.running or self.sum_of(index), None
        self.sums[index].start_rest()

    def collect(self, part):
        """Nothing to do: every rank has the whole weights."""

    def finish(self):
        """Start the sums that no last backward has started, and wait for all."""
        self.last_ended_at.append(time.perf_counter())
        for index in self.parts if self.replicas.count > 1 else ():
            if index not in self.sums:
                self.start(index)
        for summing in self.sums.values():
            summing.wait()
        self.sums = {}
        self.done_at.append(time.perf_counter())


def shares_weights(part):
    """Whether a weight stands in several places: then its gradient is complete at the end only."""
    return len(list(part.named_parameters(remove_duplicate=False))) > len(list(part.parameters()))
