"""The description of a machine on a page of measurements, as far as the system provides it."""

import contextlib
import os
import platform
import socket
import subprocess
from datetime import date
from pathlib import Path

import psutil
import torch
from own_git import ask_git

ROOT = Path(__file__).resolve().parents[1]


def processor():
    """The name of the processor's model."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit():
    """The repository's commit, with a + after it if files have been changed since."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        head = ask_git(ROOT, "rev-parse", "--short=12", "HEAD").decode().strip()
        return head + "+" * bool(ask_git(ROOT, "diff", "--name-only", "HEAD"))
    return "unknown"


def gpus():
    """The names of this node's GPUs, one per GPU."""
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def nccl():
    """The version of NCCL, or None if torch is built without it."""
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def describe():
    """All fields of the description, as data for JSON."""
    return {
        "host": socket.gethostname(),
        "processor": processor(),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpus_per_node": gpus(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": nccl(),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
        "commit": commit(),
        "date": date.today().isoformat(),
    }
