# SPDX-License-Identifier: Apache-2.0
"""Measures when a rank's actions start and end, and paces them.

Pacing makes every action last at least a given time, in which the real work is done. A waiting rank
needs no core, so eight paced ranks on two cores show the timeline of eight devices.
"""

import time
from contextlib import contextmanager
from dataclasses import replace

import torch

from lab.timeline import Event
from lab.work import Work

AT_ONCE = 0.0002  # seconds: a shorter wait counts as none
KEPT_PASSES = 200  # the newest passes, whose events stay in memory: a training run may be long


class Clock:
    """Times the actions of one rank, in milliseconds from a start that all ranks share.

    `origin` is that start in this rank's time.perf_counter seconds. `pace` is a `Costs` in
    milliseconds, or None for full speed. On a GPU without pacing, events on the device measure the
    actions, so that timing does not delay the host.
    """

    def __init__(self, rank, device, origin, pace=None):
        self.rank, self.device, self.origin, self.pace = rank, device, origin, pace
        self.on_device = device.type == "cuda" and pace is None
        self.works = []  # the actions of this pass; if `on_device`, with device events as times
        self.work = None  # the action under way
        self.ended, self.events = [], []  # passes that have ended: as works, and as Events
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
        """A context for one action; it measures the action's start and end.

        An action starts when the previous action has ended and its message has arrived. Work of the
        host in between, such as sending the previous result, counts as part of the action. Updates
        have no pace of their own: their time is part of the pace of the following action.
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
        # The tensors are left out: they would otherwise stay alive until the end of the pass.
        self.works.append(replace(work, used=None, made=None))
        self.work = None

    def add(self, stage, action, start, end):
        """Add an action of this pass that the caller has timed, in milliseconds of `now`."""
        self.works.append(Work(stage, action, start=start, end=end))

    @contextmanager
    def waiting(self, peer, what):
        """A context for a wait: after a wait that took time, the next action starts at its end."""
        asked_at = time.perf_counter()
        yield
        if self.pace is not None and self.device.type == "cuda":
            torch.cuda.synchronize()  # with NCCL only the device waits
        ended_at = time.perf_counter()
        if ended_at - asked_at > AT_ONCE:
            self.arrived = (ended_at - self.origin) * 1000

    @contextmanager
    def running_again(self, stage, function, inputs):
        """A context inside `acting`, for a forward that the action runs again."""
        start = self.mark()
        try:
            yield
        finally:  # torch.utils.checkpoint ends its forward early by an exception
            self.work.again.append((start, self.mark()))

    def now(self):
        """Milliseconds since the common start."""
        return (time.perf_counter() - self.origin) * 1000

    def mark(self):
        """The present moment: milliseconds, or an event on the device."""
        if not self.on_device:
            return self.now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def sleep_until(self, moment):
        # A sleep ends 0.1 to 0.2 ms late, and a step has dozens of sleeps: the last 0.3 ms spin.
        time.sleep(max(0.0, moment - self.now() - 0.3) / 1000)
        while self.now() < moment:
            pass

    def pass_ended(self):
        """Keep the actions of the pass, in the order in which they ran."""
        self.ended.append(self.works)
        del self.ended[:-KEPT_PASSES]
        self.works, self.free_at = [], None

    @property
    def passes(self):
        """The Events of each pass that has ended. On a GPU, reading them waits for the device."""
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
        """The time of a mark in milliseconds; the device must have passed the mark."""
        if self.on_device:
            return self.origin_mark_at + self.origin_mark.elapsed_time(mark)
        return mark

    def recompute_time(self, work):
        """The milliseconds of an action's recomputed forwards; with a pace, at least the pace's."""
        took = sum(
            self.in_milliseconds(end) - self.in_milliseconds(start) for start, end in work.again
        )
        if work.again and self.pace:
            return max(took, self.pace.recompute_of(work.action))
        return took


def shared_origin(job, host):
    """The common start of the clocks of all ranks, in this rank's time.perf_counter seconds.

    Ranks on one machine share its clock. A rank on another machine takes the moment at which it
    left a common barrier, with an error of about a millisecond.
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
