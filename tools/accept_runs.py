"""How accept.py starts a run of a script, and what it reads from the output of the run.

On one machine launch.py starts the ranks. In a SLURM job of several nodes srun starts them, one
process per rank.
"""

import os
import re
import shlex
import shutil
import time
from contextlib import contextmanager, suppress
from typing import NamedTuple

import psutil

from course import launch
from course.failed_run import RunFailed
from course.followed_run import follow

SUMMARY = re.compile(
    r"^.* ([\d.]+) ms \(predicted ([\d.]+) ms\)  idle ([\d.]+)% \(predicted [\d.]+%\)  "
    r"peak memory ([\d. ]+) MiB, of it held for backwards ([\d. ]+) MiB",
    re.MULTILINE,
)
RATE = re.compile(r"^([\d,]+) tokens/s .*MFU ([\d.]+)%", re.MULTILINE)
VERDICT = re.compile(r"^largest difference from one process: (\S+?),? (.*)$", re.MULTILINE)


LONGEST = 150  # seconds per run, so that a run that hangs does not use up its part


class OutOfTime(Exception):
    """A part has used up its minutes."""


class Machine(NamedTuple):
    """The machine of the runs. `device` is cpu or cuda; `small` asks for the smallest sizes."""

    ranks: int
    nodes: int
    device: str
    small: bool

    @contextmanager
    def started(self, script, flags, ranks, warm):
        """The ranks of a run; all of them have ended after the block."""
        if self.nodes == 1 or ranks in (None, 1):
            with launch.started_ranks(script, flags, ranks, warm) as started:
                yield started
            return
        nodes = min(self.nodes, ranks)
        words = ["srun", "--overlap", f"--nodes={nodes}", f"--ntasks={ranks}"]
        words += ["--kill-on-bad-exit=1", "--wait=30", "--distribution=block:block"]
        started = StepOfJob([*words, "python", f"source_code/{script}", *flags])
        try:
            yield started
        finally:
            started.end()


class StepOfJob(launch.LaunchedRanks):
    """Ranks that srun has started, on several nodes."""

    def process_of(self, rank):
        """The process id of a rank on this node."""
        wanted = {"SLURM_JOB_ID": os.environ["SLURM_JOB_ID"], "SLURM_PROCID": str(rank)}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                is_python = process.name() != "srun"  # which has the variables of the job's script
                runs_script = "source_code/" in " ".join(process.cmdline())
                if is_python and runs_script and wanted.items() <= process.environ().items():
                    return process.pid
        raise LookupError(f"no process of this node is rank {rank}")


class Part:
    """One part of the acceptance, limited to `seconds`: its table and its failures."""

    def __init__(self, machine, seconds):
        self.machine, self.began = machine, time.monotonic()
        self.ends = self.began + seconds
        self.columns, self.rows, self.failures, self.runs = [], [], [], 0
        self.signalled = None  # when the last signal was sent to a rank

    def run(self, command, ranks="all", warm=True, send=None, fails=False):
        """The output of a run, or None after its failure is noted.

        With `fails` the run is expected to fail, and its error message is returned. Raises
        OutOfTime if the part has no time left.
        """
        began = time.monotonic()
        left = min(self.ends - began, LONGEST)
        if left < 1:
            raise OutOfTime
        script, *flags = shlex.split(command)
        if self.machine.device == "cpu" and script not in ("preflight.py", "convert.py"):
            flags += ["--device", "cpu"]
        ranks, self.runs = self.machine.ranks if ranks == "all" else ranks, self.runs + 1
        try:
            with self.machine.started(script, flags, ranks, warm) as started:
                started.process_of = self.noting_when(started.process_of)
                output = follow(started, False, left, send)
        except RunFailed as failed:
            if fails:
                return str(failed)
            self.fail(command, f"{failed.output[-300:]}{str(failed)[-700:]}")
            return None
        finally:
            print(f"  {time.monotonic() - began:6.1f} s  {command}", flush=True)
        if fails:
            self.fail(command, "it ended as if nothing had happened")
            return None
        return output

    def noting_when(self, process_of):
        def noted(rank):
            process = process_of(rank)
            self.signalled = time.monotonic()
            return process

        return noted

    def fail(self, command, said):
        self.failures.append({"command": command, "said": said})


def summary_of(output):
    """The numbers of a script's summary line in a dict: milliseconds, per cent, lists of MiB."""
    step, predicted, idle, peaks, held = SUMMARY.search(output).groups()
    return {
        "step": float(step),
        "predicted": float(predicted),
        "idle": float(idle),
        "peaks": peaks,
        "held": held,
    }


def find_nodes():
    """The number of nodes of this SLURM job if srun can start ranks on them, otherwise 1."""
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    return int(nodes) if shutil.which("srun") and re.fullmatch("[1-9][0-9]{0,6}", nodes) else 1
