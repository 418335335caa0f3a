"""Measures when a rank's actions start and end, and paces them.

Pacing makes every action last at least a given time while the real work is done. Waiting needs no
core, so eight ranks on two cores show the timeline that eight devices would.
"""

import time
from contextlib import contextmanager
from dataclasses import replace

import torch

from lab.timeline import Event

AT_ONCE = 0.0002  # seconds: a wait that is shorter did not wait for anything
KEPT_PASSES = 200  # the newest, whose events stay in memory: a training may be long


class Clock:
    """Times the actions of one rank, in milliseconds from a start that all ranks share.

    `origin` is that start in this rank's time.perf_counter seconds. `pace` is a `Costs` in
    milliseconds, or None for full speed. On a GPU without pacing, actions are timed by events on
    the device, so that timing does not hold the host up.
    """

    def __init__(self, rank, device, origin, pace=None):
        self.rank, self.device, self.origin, self.pace = rank, device, origin, pace
        self.on_device = device.type == "cuda" and pace is None
        self.works = []  # of this pass; their times are device events until `pass_ended`
        self.work = None  # the one under way
        self.ended, self.events = [], []  # of passes that have ended: works, and Events
        self.free_at = None  # when the last action of this pass ended
        self.pace_from = 0.0  # when the last action with a pace ended
        self.arrived = 0.0  # when the last wait for another rank ended
        if device.type == "cuda":
            torch.cuda.synchronize()
            self.origin_mark = torch.cuda.Event(enable_timing=True)
            self.origin_mark.record()
            self.origin_mark_at = self.now()

    @contextmanager
    def acting(self, work):
        """Around the work of one action.

        It starts when the action before it has ended and the message it needs has arrived; what
        the host does in between, such as handing over the last result, counts as its work. An
        update has no pace: it is part of the time that the action after it may take.
        """
        self.work = work
        if self.on_device:
            work.start = self.mark()
            yield
            work.end = self.mark()
        else:
            work.start = pace_from = self.now()
            if work.starts_now:
                self.arrived = work.start
            if self.free_at is not None:
                work.start = max(self.free_at, self.arrived)
                pace_from = max(self.pace_from, self.arrived)
            yield
            if self.pace is not None:
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
                self.sleep_until(pace_from + self.pace.of(work.action))
            work.end = self.free_at = self.now()
            if work.action.kind != "U":
                self.pace_from = work.end
        # Without its tensors, which would otherwise stay until the end of the pass.
        self.works.append(replace(work, used=None, made=None))
        self.work = None

    @contextmanager
    def waiting(self, peer, what):
        """Around a wait: if it took time, the next action cannot have started before its end."""
        asked_at = time.perf_counter()
        yield
        if self.pace is not None and self.device.type == "cuda":
            torch.cuda.synchronize()  # with NCCL only the device has waited
        ended_at = time.perf_counter()
        if ended_at - asked_at > AT_ONCE:
            self.arrived = (ended_at - self.origin) * 1000

    @contextmanager
    def running_again(self, stage, function, inputs):
        """Inside `acting`, around a forward that the action runs again."""
        start = self.mark()
        try:
            yield
        finally:  # torch.utils.checkpoint leaves by an exception once it has what it needs
            self.work.again.append((start, self.mark()))

    def now(self):
        """Milliseconds since the common start."""
        return (time.perf_counter() - self.origin) * 1000

    def mark(self):
        """This moment: milliseconds, or an event on the device."""
        if not self.on_device:
            return self.now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def sleep_until(self, moment):
        # A sleep ends 0.1 to 0.2 ms late, and a step has dozens of them: stay awake at the end.
        time.sleep(max(0.0, moment - self.now() - 0.3) / 1000)
        while self.now() < moment:
            pass

    def pass_ended(self):
        """Keep the works of the pass, in the order in which they ran."""
        self.ended.append(self.works)
        del self.ended[:-KEPT_PASSES]
        self.works, self.free_at = [], None

    @property
    def passes(self):
        """The Events of each pass that has ended; only a caller of this waits for a device."""
        if self.on_device and self.ended:
            torch.cuda.synchronize()
        self.events += [[self.event_of(work) for work in works] for works in self.ended]
        del self.events[:-KEPT_PASSES]
        self.ended.clear()
        return self.events

    def event_of(self, work):
        start, end = self.in_milliseconds(work.start), self.in_milliseconds(work.end)
        return Event(self.rank, work.action, start, end, self.recompute_time(work))

    def in_milliseconds(self, mark):
        """The time of a mark; on a device, of one that it has passed."""
        if self.on_device:
            return self.origin_mark_at + self.origin_mark.elapsed_time(mark)
        return mark

    def recompute_time(self, work):
        """Milliseconds of an action that went into forwards run again; paced, at least its pace."""
        took = sum(
            self.in_milliseconds(end) - self.in_milliseconds(start) for start, end in work.again
        )
        if work.again and self.pace:
            return max(took, self.pace.recompute_of(work.action))
        return took


def shared_origin(job, host):
    """A zero for the clocks of all ranks, in this rank's time.perf_counter seconds.

    Ranks on one machine share its clock. A rank on another machine takes the moment at which it
    left a common barrier, which is as exact as the barrier: about a millisecond.
    """
    if job.num_ranks == 1:
        return time.perf_counter()
    with job.waiting_for_all("the start of the clocks"):
        torch.distributed.barrier()
        mine = (host, time.perf_counter())
        first = [mine if job.rank == 0 else None]
        torch.distributed.broadcast_object_list(first)
    host_of_first, origin = first[0]
    return origin if host_of_first == mine[0] else mine[1]
