"""What every training script prints and writes: losses, progress, a summary, files."""

import dataclasses
import math
import statistics
import sys

import torch

from pipeline.distributed import gather
from pipeline.files import json_line, write_whole
from pipeline.profiler import StepProfiler
from pipeline.recorder import gather_timelines
from pipeline.recording import RecordingWriter
from pipeline.reference import train_one_process
from pipeline.simulator import Costs, simulate
from pipeline.timeline import to_chrome_trace

# Largest difference from one process that is promised: absolute in the first ten steps, relative
# to the loss after that. Narrow types promise a tolerance and no digits.
PROMISED = {"float64": (1e-12, 1e-9), "float32": (1e-4, 1e-3), "bfloat16": (5e-2, 5e-2)}


KEPT_PASSES = 200  # the newest, whose events stay in memory: a training may be long


class Report:
    """Follows one training run on one rank. `schedule` predicts the summary's idle fraction.

    `loss_rank` is the rank that has the losses and prints them: by default that of the last stage.
    `first_step` is the first that is still to be trained, above 0 when a run is continued.
    """

    def __init__(
        self, arguments, job, schedule, recorder, what="step", loss_rank=None, first_step=0
    ):
        self.arguments, self.job, self.schedule = arguments, job, schedule
        self.recorder = recorder
        self.first_step = first_step
        self.what = what  # what one pass through the schedule is
        if loss_rank is None:
            loss_rank = schedule.rank_of(schedule.num_stages - 1, 0)
        self.has_loss = job.rank == loss_rank
        self.losses = []
        self.events_per_step = []
        self.profiler = None
        if arguments.profile:
            # The first step of several pays for what is done once; leave it out.
            several = what == "step" and arguments.steps - first_step > 1
            self.profiler = recorder.profiler = StepProfiler(job, recorder, int(several))
        self.recording = None
        if arguments.record:
            self.recording = RecordingWriter(arguments.record, job, schedule, recorder, first_step)
        if job.rank == 0:
            self.say(f"{schedule.name}: {job.describe()}")

    def say(self, text):
        print(text, flush=True)

    def steps(self):
        """The numbers of the steps, behind a progress bar where a terminal watches."""
        steps = range(self.first_step, self.arguments.steps)
        if not (self.has_loss and sys.stderr.isatty()):
            return steps
        from tqdm import tqdm  # only a terminal needs it

        return tqdm(steps, unit="step")

    def record_step(self, step, loss):
        """Note the end of one step; `loss` is None on ranks without the last stage."""
        self.record_pass()
        if self.has_loss:
            self.record_loss(step, loss)

    def record_pass(self):
        """Note the end of a pass through the schedule; a step may need several."""
        self.events_per_step.append(self.recorder.take_events())
        del self.events_per_step[:-KEPT_PASSES]

    def record_loss(self, step, loss):
        self.losses.append(loss.item())
        self.say(f"step {step}  loss {self.losses[-1]:.6f}")

    def finish(self):
        """Gather, write the files and print the summary. All ranks call it."""
        if self.recording:
            self.recording.close()
        timelines = gather_timelines(self.job, self.schedule.name, self.events_per_step)
        memory = gather(self.job, (peak_memory(self.job.device), self.recorder.meter.peak))
        if self.job.rank == 0:
            self.say(self.summary(timelines, memory))
            if self.arguments.timeline:
                write_whole(self.arguments.timeline, to_chrome_trace(timelines[-1]))
        if self.profiler:
            trace = self.profiler.trace()
            if trace:
                write_whole(self.arguments.profile, trace)
        if self.has_loss:
            write_losses(self.arguments, self.losses, self.first_step)

    def summary(self, timelines, memory):
        """Medians over the steps, the first left out where there are others."""
        timelines = timelines[1:] or timelines
        step = statistics.median(timeline.makespan for timeline in timelines)
        idle = statistics.median(timeline.idle_fraction for timeline in timelines)
        costs = self.arguments.paced or measured_costs(timelines)
        costs = dataclasses.replace(costs, transfer=self.job.latencies())
        predicted = simulate(self.schedule, costs)
        peaks = " ".join(f"{peak / 2**20:.0f}" for peak, _ in memory)
        held = " ".join(f"{held / 2**20:.2f}" for _, held in memory)
        return (
            f"{self.what} {step:.1f} ms (predicted {predicted.makespan:.1f})  "
            f"idle {idle:.1%} (predicted {predicted.idle_fraction:.1%})  "
            f"peak memory {peaks} MiB, of it held for backwards {held} MiB"
        )

    def verify(self, reference=train_one_process):
        """Whether the losses are all finite and, with --verify, those of one process.

        It looks on the rank that has the losses. Call it after leaving.
        """
        if not self.has_loss:
            return True
        device, first_step = self.job.device, self.first_step
        finite = are_finite(self.losses, first_step)
        return keeps_promise(self.arguments, self.losses, device, reference, first_step) and finite


def are_finite(losses, first_step=0):
    """Whether all losses are finite; if not, a sentence on standard error names the first step."""
    for step, loss in enumerate(losses, first_step):
        if not math.isfinite(loss):
            print(
                f"the loss of step {step} is {loss}: the training diverged; use a smaller "
                "--learning-rate",
                file=sys.stderr,
                flush=True,
            )
            return False
    return True


def keeps_promise(arguments, losses, device, reference=train_one_process, first_step=0):
    """With --verify: train in one process, print both, and say whether they agree as promised.

    `reference(arguments, device)` returns the losses of one process, from step 0 on; `losses` start
    at `first_step`.
    """
    if not arguments.verify:
        return True
    print("step  pipeline  one process  difference")
    kept, largest = True, 0.0
    early, late = PROMISED[arguments.dtype]
    expected = reference(arguments, device)[first_step:]
    for step, (ours, theirs) in enumerate(zip(losses, expected), first_step):
        difference = abs(ours - theirs)
        print(f"{step:4}  {ours:.6f}  {theirs:11.6f}  {difference:.1e}")
        largest = max(largest, difference)
        # Written so that a loss that is no number counts as broken.
        kept &= difference <= (early if step < 10 else late * abs(theirs))
    verdict = "as promised" if kept else "MORE THAN PROMISED"
    print(f"largest difference from one process: {largest:.1e}, {verdict}", flush=True)
    return kept


def write_losses(arguments, losses, first_step=0):
    """With --losses FILE: one JSON object a line, in full precision."""
    if arguments.losses:
        rows = ({"step": step, "loss": loss} for step, loss in enumerate(losses, first_step))
        write_whole(arguments.losses, "".join(map(json_line, rows)))


def measured_costs(timelines):
    """What each stage's actions took in the median step, as the simulator's costs."""
    durations = {}  # (kind, stage) -> milliseconds
    for timeline in timelines:
        for event in timeline.events:
            kind, stage = event.action.kind, event.action.stage
            durations.setdefault((kind, stage), []).append(
                event.end - event.start - event.recompute
            )
            if kind in "BI":
                durations.setdefault(("again", stage), []).append(event.recompute)
    stages = range(timelines[0].num_stages)

    def typical(kind, stage):
        return statistics.median(durations.get((kind, stage), [0.0]))

    # A stage's backwards are whole or in two halves; a schedule may have both.
    weight = [typical("W", stage) for stage in stages]
    full = [typical("B", stage) or typical("I", stage) + weight[stage] for stage in stages]
    forward = [typical("F", stage) for stage in stages]
    return Costs(forward, full, weight, recompute=[typical("again", stage) for stage in stages])


def peak_memory(device):
    """Bytes: the allocator's peak on a GPU, the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        return psutil.Process().memory_info().peak_wset
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
