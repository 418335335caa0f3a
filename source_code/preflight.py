# SPDX-License-Identifier: Apache-2.0
"""Check this machine before a course or a job: software, hardware, messages between ranks.

    python source_code/preflight.py
    torchrun --standalone --nproc-per-node 4 source_code/preflight.py

With python it starts two ranks of itself on this machine and measures the messages between them;
under torchrun or srun it measures between all neighbouring ranks of the job. Each line that fails
or warns is followed by a sentence on what to do. The exit status is 1 if any line fails.
"""
# ruff: noqa: E402  What the imports below need is checked before them.

import sys

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 11)
NEWEST_TORCH = (2, 15)  # with which the lessons' programs were run

try:
    if sys.version_info[:2] < OLDEST_PYTHON:
        raise ImportError(f"Python {sys.version.split()[0]} is older than 3.10")
    import torch
except (ImportError, OSError) as problem:  # OSError: a library that torch needs cannot be loaded
    sys.exit(f"{problem}; install Python 3.10 or newer, then: pip install -r requirements.txt")

import importlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import tempfile
import textwrap
import time
from collections import Counter
from pathlib import Path

import torch.distributed as dist

from files.outputs import not_written, sentence_of
from guard.free_port import free_port
from guard.launcher import ranks_set, read_ranks
from guard.meeting import check_limits, ended_after
from guard.one_sentence import WAIT, in_one_sentence
from lab.message_checks import Check, check_two_ranks, checks_of_job
from pipeline.command_line import Parser, positive_number
from pipeline.data import DEFAULT_SHA256, DEFAULT_TEXT, DataError, load_text

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK_PACKAGES = ["jupyterlab", "matplotlib", "ipywidgets", "nbval"]
IMPORTED = {"matplotlib", "ipywidgets"}  # by lessons; hosted notebooks are not in JupyterLab
TORCHRUN_PORT = 29500  # torchrun's default without --standalone
MOST_SECONDS = 1_000_000  # of --timeout, as in training scripts
RANK_MEMORY = 2**28  # bytes of a small rank on a CPU, torch included
INSTALL = "install the course's versions: pip install -r requirements.txt"


@in_one_sentence()
@ranks_set()
def main():
    arguments = parse_arguments()
    check_limits()
    prints = read_ranks()[0] == 0
    as_text = as_json if arguments.json else as_row
    if prints and not arguments.json:
        print(HEADER, flush=True)
    statuses = []
    # Within the margin of 2 s the ranks' watch can name the rank that does not answer.
    with ended_after(arguments.timeout + 2, give_up, arguments.timeout, prints, as_text):
        for check in run_checks(arguments.timeout, arguments.messages_only):
            statuses.append(check.status)
            if prints:
                print(as_text(check), flush=True)
    if prints and not arguments.json:
        print(verdict(statuses), flush=True)
    return int("FAIL" in statuses or bool(not_written))


def verdict(statuses):
    """The last line of the table: whether this machine is ready, from the status of each check."""
    failed, warned = statuses.count("FAIL"), statuses.count("warn")
    if failed:
        return (
            f"Not ready: {failed} of {len(statuses)} checks failed; do what the lines with > say."
        )
    if warned:
        return f"Ready, with {warned} warning{'s' * (warned > 1)}: see the lines with >."
    return f"Ready: all {len(statuses)} checks are ok."


def parse_arguments():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--timeout", type=positive_number, default=60.0, metavar="S", help="longest wait")
    add("--messages-only", action="store_true", help="only measure messages between ranks")
    add("--json", action="store_true", help="print each line of the table as a JSON object")
    arguments = parser.parse_args()
    if arguments.timeout > MOST_SECONDS:
        raise SystemExit(f"--timeout {arguments.timeout:g}: {MOST_SECONDS:,} seconds are the most")
    return arguments


def give_up(timeout, prints, as_text):
    """Print a last line and end this rank; other ranks than 0 print it if no launcher ends them."""
    advice = "look for a disk, a driver or a rank that does not answer, or raise --timeout"
    if not prints:
        time.sleep(WAIT)  # a launcher ends all ranks when rank 0 ends
    last = Check("(next)", f"no answer within {timeout:g} s", "FAIL", advice)
    print(as_text(last), flush=True)
    os._exit(1)


def run_checks(timeout=60.0, messages_only=False):
    """All checks, one after the other, so that each line can be shown as soon as it is known.

    `timeout` in seconds. In a job every rank must call it; only rank 0 gets the lines of all.
    """
    deadline = time.monotonic() + timeout
    _, num_ranks, local_rank, local_ranks = read_ranks()
    of_this_node = []
    if local_rank == 0 and not messages_only:
        for check in checks_of_this_node(in_job=num_ranks > 1, num_ranks=local_ranks):
            of_this_node.append(check)
            yield check
    if num_ranks > 1:
        yield from checks_of_job(timeout, of_this_node)
    else:
        # At least a second, so that a result can be reported.
        yield from check_two_ranks(max(1.0, deadline - time.monotonic()))


def checks_of_this_node(in_job=False, num_ranks=1):
    """Return the checks of a machine that need no messages."""
    if platform.system() == "Windows":
        advice = "torchrun cannot start ranks here: torch's build lacks libuv; use Linux or WSL2"
        yield Check("system", "Windows", "warn", advice)
    yield check_python()
    yield check_torch()
    yield check_backend(in_job, num_ranks)
    yield check_gpus()
    yield check_cores()
    yield check_memory(num_ranks)
    yield check_port(None if in_job else TORCHRUN_PORT)
    yield check_folder()
    yield check_text()
    for name in NOTEBOOK_PACKAGES:
        yield check_package(name, needed=not in_job and name in IMPORTED)


def check_python(version=None):
    version = version or platform.python_version()
    if numbers_of(version) < OLDEST_PYTHON:
        return Check("python", version, "FAIL", "install Python 3.10 or newer")
    return Check("python", version)


def numbers_of(version):
    """Return the first two numbers of a version, such as (2, 13) for 2.13.0+cpu."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def check_torch():
    """Check that torch's version is between the oldest and newest with which the course was run.

    A newer one may work too, except for lesson 08, which depends on private parts of torch.
    """
    if numbers_of(torch.__version__) < OLDEST_TORCH:
        return Check("torch", torch.__version__, "FAIL", f"torch is older than 2.11; {INSTALL}")
    if numbers_of(torch.__version__) > NEWEST_TORCH:
        newest = ".".join(map(str, NEWEST_TORCH))
        advice = f"the course was not run with a torch newer than {newest}; {INSTALL}"
        return Check("torch", torch.__version__, "warn", advice)
    return Check("torch", torch.__version__)


def check_backend(in_job=False, num_ranks=1):
    """Check which backend sends the messages of `num_ranks` ranks of this node, or of any job."""
    if not (dist.is_available() and dist.is_gloo_available()):
        advice = f"this build of torch cannot send messages; {INSTALL}"
        return Check("backend", "no gloo", "FAIL", advice)
    if not torch.cuda.is_available():
        return Check("backend", "gloo, between CPUs")
    gpus, nccl = torch.cuda.device_count(), dist.is_nccl_available()
    if nccl and not in_job:
        return Check("backend", f"NCCL up to {gpus} ranks per node, gloo for more")
    if nccl and (num_ranks <= gpus or "SLURM_GPUS_PER_TASK" in os.environ):
        return Check("backend", "NCCL, a GPU for each rank")
    return Check("backend", "gloo, through host memory (ranks share GPUs)")


def check_gpus():
    """Check the GPUs of this node, their memory in GiB, and whether torch sees the job's GPUs."""
    given, seen = gpus_given(), torch.cuda.device_count() if torch.cuda.is_available() else 0
    if seen < given:
        return Check("GPUs", f"{seen} of {given} seen by torch", "warn", unseen_advice(given))
    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi") and torch.version.cuda is None:
            advice = "there may be a GPU that this CPU-only build of torch cannot use; see README"
            return Check("GPUs", "none that torch can use, the CPU will be used", "warn", advice)
        return Check("GPUs", "none, the CPU will be used")
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    kinds = Counter(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in found)
    return Check("GPUs", "; ".join(f"{count} x {kind}" for kind, count in kinds.items()))


def gpus_given():
    """Return how many GPUs of this node SLURM has given to this process."""
    if "SLURM_JOB_ID" not in os.environ:
        return 0
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return len(re.findall(r"(?:^|,)(?:\d|GPU-|MIG-)", os.environ["CUDA_VISIBLE_DEVICES"]))
    given = os.environ.get("SLURM_GPUS_ON_NODE", "")
    return int(given) if re.fullmatch("[0-9]{1,9}", given) else 0


def unseen_advice(given):
    why = "look at nvidia-smi, the driver and the container; of MIG slices a process sees one"
    if torch.version.cuda is None:
        why = "this build of torch is for CPUs only; install the one for CUDA (README)"
    return (
        f"SLURM gave this process {given} GPUs, and its ranks will not use all of them: {why}. "
        "The pretend GPUs of slurm/local_cluster.sh are never seen"
    )


def check_cores():
    try:
        cores = len(os.sched_getaffinity(0))  # those that this job may use
    except AttributeError:  # macOS, Windows
        cores = os.cpu_count()
    if cores < 2:
        advice = "all lessons run, but without --pace one core shows no speed-up; use two or more"
        return Check("cores", "1", "warn", advice)
    return Check("cores", str(cores))


def check_memory(num_ranks=1):
    """Check that eight small ranks, or those of this job, fit into the free memory (GiB)."""
    try:
        import psutil
    except ImportError:
        return Check("memory", "unknown, psutil is missing", "warn", INSTALL)
    try:
        memory = psutil.virtual_memory()
    except OSError as error:  # a container without /proc
        advice = "run the container with /proc, or make sure of the memory yourself"
        return Check("memory", f"unknown, {sentence_of(error)}", "warn", advice)
    result = f"{memory.available / 2**30:.1f} GiB free of {memory.total / 2**30:.1f}"
    needed = max(num_ranks, 8) * RANK_MEMORY
    if memory.available < needed:
        advice = f"close other programs: {max(num_ranks, 8)} ranks need {needed / 2**30:.0f} GiB"
        return Check("memory", result, "warn", advice)
    return Check("memory", result)


def check_port(wanted=TORCHRUN_PORT):
    """Check that ranks of this machine can meet at a port, and that port `wanted` is usable."""
    try:
        port = free_port()
    except OSError as error:
        advice = "let this user open ports on 127.0.0.1 (a firewall or a limit forbids it)"
        return Check("port", f"none is free ({error.strerror or error})", "FAIL", advice)
    if wanted is None:
        return Check("port", f"{port} is free")
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", wanted))
            return Check("port", f"{wanted} is free")
    except OSError:
        advice = "start torchrun with --standalone, or on several nodes with another --master-port"
        return Check("port", f"{wanted} is taken, {port} is free", "warn", advice)


def check_folder(folder=None):
    """Check that the notebooks' results can be written, and report the free space in GiB."""
    folder = Path(folder or ROOT / "build")
    name = f"{folder.name}/"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"written")
        free = shutil.disk_usage(folder).free
    except OSError as error:
        advice = f"copy the course into a folder of yours, or let yourself write to {folder}"
        return Check(name, f"cannot be written ({error.strerror})", "FAIL", advice)
    result = f"can be written, {free / 2**30:.1f} GiB free"
    if free < 2**30:
        return Check(name, result, "warn", "make room on this disk: checkpoints take up to 1 GiB")
    return Check(name, result)


def check_text():
    """Check that the course's text is the one with which the printed losses were made."""
    try:
        text = load_text()
    except DataError as error:
        return Check("text", "not the course's own", "FAIL", str(error))
    length = len(text.training) + len(text.held_out)
    return Check("text", f"{DEFAULT_TEXT.name}, {length} bytes, SHA-256 {DEFAULT_SHA256[:8]}...")


def check_package(name, needed=True):
    """Check that a package of the notebooks can be imported in the version of requirements.txt."""
    try:
        importlib.import_module(name)
        version = importlib.metadata.version(name)
    except Exception as error:  # a broken package may raise any exception
        status = "FAIL" if needed else "warn"
        return Check(name, f"cannot be imported ({type(error).__name__})", status, INSTALL)
    wanted = wanted_versions(name)
    if wanted and version not in wanted:
        advice = f"the course was tried with {' or '.join(wanted)}; {INSTALL}"
        return Check(name, version, "warn", advice)
    return Check(name, version)


def wanted_versions(name):
    """Return the versions of `name` in requirements.txt; several if they depend on Python's."""
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    return re.findall(rf"^{name}==([^;\s]+)", text, re.MULTILINE)


def as_row(check):
    """Return one line of the table, followed by the advice if there is any, within 80 columns."""
    row = f"{check.name:<12} | {check.result:<50} | {check.status}"
    if not check.advice:
        return row
    said = textwrap.fill(
        check.advice,
        80,
        initial_indent=f"{'':12} > ",
        subsequent_indent=" " * 15,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return f"{row}\n{said}"


HEADER = as_row(Check("check", "result", "ok/warn/FAIL"))


def as_json(check):
    return json.dumps(check._asdict())


if __name__ == "__main__":
    sys.exit(main())
