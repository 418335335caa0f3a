"""Records when a rank's actions start and end, and paces them.

Pacing makes every action last at least a given time while the real work is done. Waiting needs no
core, so eight ranks on two cores show the timeline that eight devices would.
"""

import time
from contextlib import ExitStack, contextmanager

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
        self.profiler = None  # a StepProfiler, which is told of every pass through the schedule
        self.annotate = False  # name the actions in torch.profiler's trace, too
        # (action, start, end, recompute); device events until `take_events` resolves them
        self.records = []
        self.again = []  # (start, end) of each forward that the action under way has run again
        self.free_at = None  # when the last action of this step ended
        self.pace_from = 0.0  # when the last action with a pace ended
        self.meter = HeldMeter()
        self.origin = shared_origin(job)
        if job.device.type == "cuda":
            torch.cuda.synchronize()
            self.origin_mark = torch.cuda.Event(enable_timing=True)
            self.origin_mark.record()
            self.origin_mark_at = self.now()

    def record(self, action):
        """Around the work of one action; see `_record`."""
        if not self.annotate:
            return self._record(action)
        stack = ExitStack()
        stack.enter_context(self._record(action))
        stack.enter_context(torch.profiler.record_function(str(action)))
        return stack

    @contextmanager
    def _record(self, action):
        """Around the work of one action.

        It starts when the action before it has ended and the message it needs has arrived; what
        the host does in between, such as handing over the last result, counts as its work. An
        update has no pace: it is part of the time that the action after it may take.
        """
        if self.job.recording:
            self.job.recording.flush()
        if self.on_device:
            start = self.mark()
            yield
            end = self.mark()
        else:
            start = pace_from = self.now()
            if self.free_at is not None:
                arrived = (self.job.message_arrived_at - self.origin) * 1000
                start, pace_from = max(self.free_at, arrived), max(self.pace_from, arrived)
            yield
            if self.pace is not None:
                if self.job.device.type == "cuda":
                    torch.cuda.synchronize()
                self.sleep_until(pace_from + self.pace.of(action))
            end = self.free_at = self.now()
            if action.kind != "U":
                self.pace_from = end
        self.records.append((action, start, end, self.again))
        self.again = []

    def note(self, stage, used=None, made=None, version=None):
        """If the run is recorded: what the action of `stage` that has just ended used and made."""
        if self.job.recording:
            self.job.recording.note_action(stage, self.records[-1], used, made, version)

    @contextmanager
    def recomputing(self):
        """Inside `record`, around a forward that the action runs again."""
        start = self.mark()
        try:
            yield
        finally:  # torch.utils.checkpoint leaves by an exception once it has what it needs
            self.again.append((start, self.mark()))

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

    def take_events(self):
        """The events since the last call, in the order in which they ran."""
        if self.on_device:
            torch.cuda.synchronize()
        events = [
            Event(
                self.job.rank,
                action,
                self.in_milliseconds(start),
                self.in_milliseconds(end),
                self.recompute_time(action, again),
            )
            for action, start, end, again in self.records
        ]
        self.records = []
        self.free_at = None
        self.meter.stop()
        if self.job.recording:
            self.job.recording.end_pass()
        if self.profiler:
            self.profiler.pass_ended(events)
        return events

    def in_milliseconds(self, mark):
        """The time of a mark; on a device, of one that it has passed."""
        if self.on_device:
            return self.origin_mark_at + self.origin_mark.elapsed_time(mark)
        return mark

    def recompute_time(self, action, again):
        """Milliseconds of an action that went into forwards run again; paced, at least its pace."""
        took = sum(self.in_milliseconds(end) - self.in_milliseconds(start) for start, end in again)
        return max(took, self.pace.recompute_of(action)) if again and self.pace else took


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
