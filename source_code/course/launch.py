# SPDX-License-Identifier: Apache-2.0
"""How a notebook starts a script on several ranks.

`run("gpipe.py --steps 3", ranks=4)` prints the command that does the same in a terminal, starts it,
shows its output and returns a `Run`. The command is torchrun; in a SLURM allocation it is srun with
torchrun. With `warm=True` the ranks are forked from a server that has imported torch once, so that
a start takes a tenth of the time. Where forking is unsafe or missing (macOS, Windows, a server in
which CUDA is initialised), torchrun is used instead. The output is the same.

No rank outlives its cell: an interrupt or a failure ends all ranks.
"""

import argparse
import multiprocessing
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import threading
import types
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from course.failed_run import RunFailed, how_it_ended
from course.followed_run import follow
from files.inputs import is_number
from guard.free_port import hold_free_port
from guard.siblings import LAUNCHER_VARIABLE, end_with_launcher
from lab.timeline import Timeline, from_chrome_trace

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "source_code"
OURS = "PIPELINE_"  # prefix of the variables that ranks inherit
# torch asks a name server even for the name of 127.0.0.1. glibc repeats a lost question only after
# five seconds, and with this option after one.
NAMES_VARIABLE, SOON = "RES_OPTIONS", "timeout:1"
WARM_VARIABLE = "PIPELINE_WARM_RUNS"  # 1: runs with a number of ranks are warm by default
# The imports of the scripts, and those of torch in the first backward of a process.
PRELOAD = [
    "torch.distributed",
    "torch.fx.experimental.symbolic_shapes",
    "pipeline.training",
    "lab.attach",
    "pipeline.schedules",
    "pipeline.stage",
    "pipeline.worker",
]
_fork_server_is_ready = None  # True or False once its imports are done


@dataclass(frozen=True)
class Run:
    """The output of a run, the losses in it, and its Timeline if one was requested."""

    output: str
    losses: list
    timeline: Timeline | None


def warm_up(*modules):
    """Let the fork server import torch in the background. Returns at once.

    `modules` are the names of other slow imports of a lesson's scripts.
    """
    PRELOAD.extend(module for module in modules if module not in PRELOAD)
    if can_fork():
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["course.paused_collector", *PRELOAD, "course.frozen_imports"]
        )
        from multiprocessing import forkserver

        with _without_main(), _importable():
            forkserver.ensure_running()


def can_fork():
    return sys.platform == "linux"


def run(command, ranks=4, warm=None, show=True, limit=300, send=None):
    """Run a script of the course on several ranks and return a `Run`.

    `command` is the script's name with its flags, as in a terminal; `--timeline FILE` also
    loads the timeline. With `ranks=None` the script is started with plain python, as one
    process, which can be warm, too. `limit` is in seconds. `send=("SIGKILL", 2, "step 7")`
    sends that signal to rank 2 as soon as a printed line starts with "step 7". Raises RunFailed
    for a failed run, and KeyboardInterrupt for an interrupt, both after all ranks have ended.
    """
    script, *flags = checked_words(command, ranks, limit)
    if warm is None:
        warm = os.environ.get(WARM_VARIABLE) == "1" and ranks is not None
    timeline_file = _value_of("--timeline", flags)
    if timeline_file:
        (ROOT / timeline_file).parent.mkdir(parents=True, exist_ok=True)
    words = launch_words(script, flags, ranks)
    if show:
        print("$ " + shlex.join(words), flush=True)
    with started_ranks(script, flags, ranks, warm) as started:
        output = follow(started, show, limit, send)
    losses = [float(loss) for loss in re.findall(r"^step \d+  loss (\S+)$", output, re.MULTILINE)]
    timeline = None
    if timeline_file:
        timeline = from_chrome_trace((ROOT / timeline_file).read_text(encoding="utf-8"))
    return Run(output, losses, timeline)


def checked_words(command, ranks, limit):
    """The words of a command for `run`. Raises RunFailed for arguments that start no rank."""
    try:
        script, *flags = shlex.split(command or "") or [""]
    except ValueError as error:
        raise RunFailed(f"{command} is not a command ({error})") from None
    if not place_of(script).is_file():
        raise RunFailed(f"there is no script '{script}' in source_code; name one that is there")
    if ranks is not None and not (type(ranks) is int and ranks > 0):
        raise RunFailed(f"ranks is a whole number of at least 1, or None; not {ranks!r}")
    if not is_number(limit, 0):
        raise RunFailed(f"limit is a number of seconds, not {limit!r}")
    return script, *flags


def place_of(script):
    """The path of a script: in `build` if a lesson wrote it, otherwise in `source_code`."""
    return (ROOT if script.startswith("build/") else SCRIPTS) / script


@contextmanager
def started_ranks(script, flags, ranks, warm=True):
    """A context with the ranks of a script, see `run`. After the block all ranks have ended."""
    warm = warm and can_fork() and not _is_away() and _wait_for_fork_server()
    started = None
    try:
        with _interrupts_held():
            words = launch_words(script, flags, ranks)
            started = WarmRanks(place_of(script), flags, ranks) if warm else LaunchedRanks(words)
        yield started
    finally:
        if started:
            with _interrupts_held():
                started.end()


def launch_words(script, flags, ranks):
    """The command that does the same in a terminal, from the repository's root."""
    # A lesson may have written the script to build.
    words = [script if script.startswith("build/") else f"source_code/{script}", *flags]
    if ranks is None:
        return ["python", *words]
    return srun_words() + ["torchrun", "--standalone", "--nproc-per-node", str(ranks), *words]


def srun_words():
    """The words of srun with all cores of the job on its node; [] outside a SLURM allocation."""
    if "SLURM_JOB_ID" not in os.environ:
        return []
    # The notebook is part of the same job and keeps its share: the ranks overlap with it.
    words = ["srun", "--overlap", "--nodes=1", "--ntasks=1"]
    cores = os.environ.get("SLURM_CPUS_ON_NODE")
    return words + [f"--cpus-per-task={cores}"] if cores else words


def _is_away():
    """Whether this process is outside the nodes of its allocation, as after salloc."""
    return "SLURM_JOB_ID" in os.environ and "SLURMD_NODENAME" not in os.environ


def _value_of(flag, flags):
    """Return a flag's value, written as FLAG VALUE or FLAG=VALUE, or None."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(flag, dest="value", nargs="?")
    return parser.parse_known_args(flags)[0].value


class LaunchedRanks:
    """Ranks behind a launcher command, torchrun or srun."""

    def __init__(self, words):
        environment = dict(os.environ)
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment.setdefault(NAMES_VARIABLE, SOON)
        environment["PYTHONUNBUFFERED"] = "1"
        if words[0] != "srun":  # srun's ranks may run on other machines
            environment[LAUNCHER_VARIABLE] = str(os.getpid())
        # This process's Python, which has torch; the first Python of the PATH may be another.
        programs = {
            "torchrun": [sys.executable, "-m", "torch.distributed.run"],
            "python": [sys.executable],
        }
        at = next(i for i, word in enumerate(words) if word in programs)
        words = words[:at] + programs[words[at]] + words[at + 1 :]
        self.process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # an interrupt reaches only the notebook, which ends the ranks
        )
        self.streams = {"stdout": self.process.stdout, "stderr": self.process.stderr}

    def failure(self, wait=False):
        """A sentence if the launcher has failed, or None."""
        code = self.process.wait(timeout=30) if wait else self.process.poll()
        return f"the launcher ended with exit status {code}" if code else None

    def has_ended_well(self, rank):
        """Whether the launcher has ended with exit status 0, and so this rank, too."""
        return self.process.poll() == 0

    def process_of(self, rank):
        """The process id of a rank on this machine."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            if process.environ().get("RANK") == str(rank):
                return process.pid
        raise LookupError(f"no process of this machine is rank {rank}")

    def end(self):
        _end_tree([self.process.pid])
        self.process.wait()


class WarmRanks:
    """Ranks forked from a process that has imported torch, with the variables that torchrun sets.

    With `num_ranks=None` it is one process without these variables, as with plain python.
    """

    def __init__(self, script, flags, num_ranks):
        warm_up()
        context = multiprocessing.get_context("forkserver")
        out, out_writer = context.Pipe(duplex=False)
        errors, errors_writer = context.Pipe(duplex=False)
        self.holder = hold_free_port()
        self.ranks = []
        for rank in range(num_ranks or 1):
            environment = {
                **{name: value for name, value in os.environ.items() if name.startswith(OURS)},
                "OMP_NUM_THREADS": "1",
                NAMES_VARIABLE: os.environ.get(NAMES_VARIABLE, SOON),
                LAUNCHER_VARIABLE: str(os.getpid()),
            }
            if num_ranks is not None:
                environment |= {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(num_ranks),
                    "LOCAL_WORLD_SIZE": str(num_ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(self.holder.getsockname()[1]),
                }
            process = context.Process(
                target=_be_a_rank, args=(script, flags, environment, out_writer, errors_writer)
            )
            with _without_main():
                process.start()
            self.ranks.append(process)
        out_writer.close()
        errors_writer.close()
        self.streams = {
            "stdout": os.fdopen(os.dup(out.fileno()), errors="replace"),
            "stderr": os.fdopen(os.dup(errors.fileno()), errors="replace"),
        }

    def failure(self, wait=False):
        """A sentence that names the rank that failed, or None."""
        for process in self.ranks if wait else []:
            process.join(timeout=30)
        codes = [process.exitcode or 0 for process in self.ranks]
        if not any(codes):
            return None
        # A signal came from outside: it is the cause of the other ranks' exit statuses.
        code = min(codes) if min(codes) < 0 else next(filter(None, codes))
        return how_it_ended(codes.index(code), code)

    def has_ended_well(self, rank):
        """Whether the process of this rank has ended with exit status 0."""
        return self.ranks[rank].exitcode == 0

    def process_of(self, rank):
        return self.ranks[rank].pid

    def end(self):
        _end_tree([process.pid for process in self.ranks if process.is_alive()])
        for process in self.ranks:
            process.join(timeout=5)
        self.holder.close()


def _wait_for_fork_server():
    """Wait until the fork server has imported torch; an interrupt ends only this wait.

    Returns False if its imports have initialised CUDA: a forked process could not use a GPU.
    """
    global _fork_server_is_ready
    if _fork_server_is_ready is None:
        warm_up()
        probe = multiprocessing.get_context("forkserver").Process(target=_exit_if_cuda_is_there)
        with _without_main():
            probe.start()
        probe.join()
        _fork_server_is_ready = probe.exitcode == 0
    return _fork_server_is_ready


def _exit_if_cuda_is_there():
    """In a forked process: exit with status 1 if CUDA was initialised before the fork."""
    cuda = sys.modules["torch"].cuda
    sys.exit(cuda.is_initialized() or cuda._is_in_bad_fork())


@contextmanager
def _interrupts_held():
    """A context that delays an interrupt, so that a start or an end of ranks is completed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held = []
    usual = signal.signal(signal.SIGINT, lambda *_: held.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if held:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def _importable():
    """A context that lets a started Python find the course's code before its sys.path is set."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SCRIPTS), before]))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@contextmanager
def _without_main():
    """A context in which a started process does not first run the caller's main module."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _be_a_rank(script, flags, environment, out, errors):
    """In the forked process: become a rank of `script`, as if torchrun had started it."""
    end_with_launcher()
    os.dup2(out.fileno(), 1)
    os.dup2(errors.fileno(), 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    for name in [name for name in os.environ if name.startswith(OURS)]:  # the fork server's
        del os.environ[name]
    os.environ.update(environment)
    if "torch" in sys.modules:  # torch read OMP_NUM_THREADS in the fork server
        sys.modules["torch"].set_num_threads(1)
    os.chdir(ROOT)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.argv = [str(script)] + flags
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def _end_tree(process_ids):
    """Ask these processes and all their children to end; kill them after one second."""
    processes = []
    for process_id in process_ids:
        try:
            process = psutil.Process(process_id)
            processes += [process] + process.children(recursive=True)
        except psutil.NoSuchProcess:
            pass
    for stop in (psutil.Process.terminate, psutil.Process.kill):
        for process in processes:
            try:
                stop(process)
            except psutil.NoSuchProcess:
                pass
        _, processes = psutil.wait_procs(processes, timeout=1)
