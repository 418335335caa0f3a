# SPDX-License-Identifier: Apache-2.0
"""The summary of a run: a predicted and a performed step, idle time, memory, and files of both."""

import statistics
import sys
from textwrap import wrap

import torch
import torch.distributed as dist

from files.outputs import write_output
from files.unpickling import allow
from lab.simulator import Costs, simulate
from lab.timeline import Event, Timeline, to_chrome_trace
from pipeline.collectives import gather
from pipeline.schedule import Action

allow(Event, Action)  # ranks gather what they performed


class Report:
    """Prints how a job runs when it starts, and a summary when it ends. All ranks make one.

    `what` is the name of one pass through `schedule`. `counts_activations` is false if no stage is
    observed.
    """

    def __init__(self, job, schedule, clock, memory, network, what):
        self.job, self.schedule, self.what = job, schedule, what
        self.clock, self.memory, self.network = clock, memory, network
        self.counts_activations = True
        if job.rank == 0:
            print(f"{schedule.name}: {self.describe()}", flush=True)

    def describe(self):
        """One line on how the job runs."""
        job, nodes = self.job, self.network.nodes
        how = f"{job.num_ranks} rank{'s' if job.num_ranks > 1 else ''} on {job.device.type}"
        if len(set(nodes)) > 1:
            how += f" of nodes {' '.join(nodes)}"
        if job.wire != job.device:
            return f"{how}, sharing GPUs, gloo messages staged through host memory"
        mode = getattr(dist.group.WORLD, "mode", None)
        return f"{how}, {job.backend} messages" + (f", rehearsing NCCL ({mode})" if mode else "")

    def finish(self, timeline_file=None):
        """Print the summary on rank 0, and write the last timeline. All ranks call it."""
        passes = gather(self.job, self.clock.passes)
        memory = gather(self.job, (peak_memory(self.job.device), self.memory.peak))
        if self.job.rank == 0 and passes[0]:
            timelines = timelines_of(self.schedule.name, passes)
            print(in_lines(self.summary(timelines, memory)), flush=True)
            if timeline_file:
                write_output("--timeline", timeline_file, to_chrome_trace(timelines[-1]))

    def summary(self, timelines, memory):
        """The summary: medians over the passes, without the first if there are several."""
        timelines = timelines[1:] or timelines
        step = statistics.median(timeline.makespan for timeline in timelines)
        idle = statistics.median(timeline.idle_fraction for timeline in timelines)
        costs = self.clock.pace or measured_costs(timelines)
        predicted = simulate(self.schedule, self.network.slow_down(costs))
        peaks = " ".join(f"{peak / 2**20:.0f}" for peak, _ in memory)
        held = " ".join(f"{held / 2**20:.2f}" for _, held in memory)
        held = f", of it held for backwards {held} MiB" if self.counts_activations else ""
        return (
            f"{self.what} {step:.1f} ms (predicted {predicted.makespan:.1f} ms)  "
            f"idle {idle:.1%} (predicted {predicted.idle_fraction:.1%})  "
            f"peak memory {peaks} MiB{held}"
        )


def in_lines(summary):
    """The summary in lines that fit a terminal; a file or a notebook gets one line to search."""
    if not sys.stdout.isatty():
        return summary
    parts = summary.replace("  peak", "\n  peak").replace(", of it", ",\n  of it").splitlines()
    return "\n".join(line for part in parts for line in wrap(part, 78, subsequent_indent="    "))


def timelines_of(name, passes_of_ranks):
    """One Timeline per pass, from each rank's list of passes, each a list of Events."""
    return [
        Timeline(name, tuple(event for rank in one for event in rank))
        for one in zip(*passes_of_ranks)
    ]


def measured_costs(timelines):
    """The median times of each stage's actions, as Costs of the simulator in milliseconds."""
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

    # A stage's backwards are full or in two halves; a schedule may have both.
    weight = [typical("W", stage) for stage in stages]
    full = [typical("B", stage) or typical("I", stage) + weight[stage] for stage in stages]
    forward = [typical("F", stage) for stage in stages]
    return Costs(forward, full, weight, recompute=[typical("again", stage) for stage in stages])


def peak_memory(device):
    """The peak memory in bytes: the allocator's on a GPU, the whole process's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        return psutil.Process().memory_info().peak_wset
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
