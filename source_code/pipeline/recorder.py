"""Records when a rank's actions start and end, and paces them.

Pacing makes every action last at least a given time while the real work is done. Waiting needs no
core, so eight ranks on two cores show the timeline that eight devices would.
"""

import time
from contextlib import contextmanager

import torch

from pipeline.distributed import gather, host_name
from pipeline.held import HeldMeter
from pipeline.timeline import Event, Timeline


class Recorder:
    """Times the actions of one rank, in milliseconds from a start that all ranks share.

    `pace` is a `Costs` in milliseconds, or None for full speed. On a GPU without pacing, actions
    are timed by events on the device, so that recording does not hold the host up.
    """

    def __init__(self, job, pace=None):
        self.job = job
        self.pace = pace
        self.on_device = job.device.type == "cuda" and pace is None
        self.records = []  # (action, start, end); device events until `take_events` resolves them
        self.free_at = None  # when the last action of this step ended
        self.pace_from = 0.0  # when the last action with a pace ended
        self.meter = HeldMeter()
        self.origin = shared_origin(job)
        if job.device.type == "cuda":
            torch.cuda.synchronize()
            self.origin_mark = torch.cuda.Event(enable_timing=True)
            self.origin_mark.record()
            self.origin_mark_at = self._now()

    def _now(self):
        return (time.perf_counter() - self.origin) * 1000

    @contextmanager
    def record(self, action):
        """Around the work of one action.

        It starts when the action before it has ended and the message it needs has arrived; what
        the host does in between, such as handing over the last result, counts as its work. An
        update has no pace: it is part of the time that the action after it may take.
        """
        if self.on_device:
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
        else:
            start = pace_from = self._now()
            if self.free_at is not None:
                arrived = (self.job.message_arrived_at - self.origin) * 1000
                start, pace_from = max(self.free_at, arrived), max(self.pace_from, arrived)
            yield
            if self.pace is not None:
                if self.job.device.type == "cuda":
                    torch.cuda.synchronize()
                self.sleep_until(pace_from + self.pace.of(action))
            end = self.free_at = self._now()
            if action.kind != "U":
                self.pace_from = end
        self.records.append((action, start, end))

    def sleep_until(self, moment):
        # A sleep ends 0.1 to 0.2 ms late, and a step has dozens of them: stay awake at the end.
        time.sleep(max(0.0, moment - self._now() - 0.3) / 1000)
        while self._now() < moment:
            pass

    def take_events(self):
        """The events since the last call, in the order in which they ran."""
        if self.on_device:
            torch.cuda.synchronize()
            mark, at = self.origin_mark, self.origin_mark_at
            self.records = [
                (action, at + mark.elapsed_time(start), at + mark.elapsed_time(end))
                for action, start, end in self.records
            ]
        events = [Event(self.job.rank, *record) for record in self.records]
        self.records = []
        self.free_at = None
        self.meter.active = False  # counting takes time, and every step holds the same
        return events


def shared_origin(job):
    """A zero for the clocks of all ranks, in this rank's time.perf_counter seconds.

    Ranks on one machine share its clock. A rank on another machine takes the moment at which it
    left a common barrier, which is as exact as the barrier: about a millisecond.
    """
    if job.num_ranks == 1:
        return time.perf_counter()
    torch.distributed.barrier()
    mine = (host_name(), time.perf_counter())
    first = [mine if job.rank == 0 else None]
    torch.distributed.broadcast_object_list(first)
    host, origin = first[0]
    return origin if host == mine[0] else mine[1]


def gather_timelines(job, name, events_per_step):
    """One Timeline a step on rank 0, from each rank's list of events a step; None elsewhere."""
    ranks = gather(job, events_per_step)
    if ranks is None:
        return None
    return [Timeline(name, tuple(event for rank in step for event in rank)) for step in zip(*ranks)]
