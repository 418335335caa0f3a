# SPDX-License-Identifier: Apache-2.0
"""Measures messages between ranks, for the last lines of the table of preflight.py."""

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from guard.around_main import attached
from guard.free_port import free_port
from guard.launcher import LauncherError, meeting_point, read_ranks
from guard.siblings import LAUNCHER_VARIABLE
from pipeline.collectives import gather
from pipeline.job import join_job

PREFLIGHT = Path(__file__).resolve().parents[1] / "preflight.py"
SMALL, LARGE = 2**10, 2**24  # bytes of the two messages that are timed
SIZES = [SMALL] * 21 + [LARGE] * 7  # of the messages, in the order they are sent
WARM_UP = 2  # messages of each size that are not timed
SLOW_SMALL = 2e-3  # seconds; a paced stage of the lessons takes 10 ms
SLOW_LARGE = 1e8  # bytes per second; a network of 1 Gbit/s


class Check(NamedTuple):
    """One line of the table. `advice` says what to do unless the status is ok."""

    name: str
    result: str
    status: str = "ok"  # ok, warn or FAIL
    advice: str = ""


def check_two_ranks(timeout):
    """Start two ranks of preflight.py on this machine and have them measure their messages."""
    try:
        port = free_port()
    except OSError:
        return []  # check_port has reported it
    command = [sys.executable, PREFLIGHT, "--messages-only", "--json", "--timeout", str(timeout)]
    deadline = time.monotonic() + timeout
    ranks, said = [], []
    try:
        for rank in range(2):
            ranks.append(
                subprocess.Popen(
                    command,
                    env=environment_of(rank, port),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        for rank in ranks:
            said.append(rank.communicate(timeout=max(0.0, deadline - time.monotonic())))
    except subprocess.TimeoutExpired:
        advice = "close other programs, or give it longer with --timeout"
        return [Check("messages", f"two ranks took longer than {timeout:.0f} s", "FAIL", advice)]
    finally:
        for rank in ranks:
            rank.kill()  # does nothing to a process that has ended
            rank.communicate()
    if any(rank.returncode for rank in ranks):
        lines = [line for _, errors in said for line in errors.splitlines() if line.strip()]
        return [failed_to_meet(lines[-1] if lines else f"exit status {ranks[0].returncode}")]
    return [Check(**json.loads(line)) for line in said[0][0].splitlines()]


def environment_of(rank, port):
    """The environment that torchrun would give to one of two ranks on this machine."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC_")}
    return kept | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        LAUNCHER_VARIABLE: str(os.getpid()),  # the ranks end when this process does
    }


def failed_to_meet(reason):
    """The line for ranks that could not exchange messages, with advice."""
    advice = f"what went wrong: {reason}; "
    if "MASTER_" in reason:
        advice += "start the ranks with torchrun, which tells them where they meet"
    else:
        advice += (
            "most often a firewall, a host name that does not resolve, or the wrong network, which "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME can set right"
        )
    return Check("messages", "the ranks could not exchange any", "FAIL", advice)


def checks_of_job(timeout, of_this_node):
    """On rank 0, the lines of the other nodes and of the messages between all neighbours."""
    try:
        if read_ranks()[1] > 1:
            meeting_point()
        with attached():
            job = join_job("auto", timeout)
    except (RuntimeError, LauncherError) as error:  # no rank answers, or MASTER_ADDR is not set
        yield failed_to_meet(str(error).splitlines()[0])
        return
    # Plain text: received objects are unpickled, and the unpickler allows no classes.
    own = [tuple(map(str, check)) for check in of_this_node] if job.rank else []
    for host, checks in gather(job, (socket.gethostname(), own)) or []:
        for name, *rest in checks:
            yield Check(f"{name} on {host}", *rest)
    measured = gather(job, measure_neighbours(job)) or []
    for check in sorted(line for lines in measured for line in lines):
        yield Check(*check[1:])
    job.leave()


def measure_neighbours(job):
    """Measure messages from this rank to its neighbours; returns [(order in the table, *Check)].

    The pairs are measured one after the other, so that they do not disturb each other.
    """
    measured = []
    for left in range(job.num_ranks - 1):
        for source, destination in ((left, left + 1), (left + 1, left)):
            if job.rank == source:
                times = measure_messages(job, destination)
                measured.append(((left, source), *check_messages(source, destination, *times)))
            elif job.rank == destination:
                answer_messages(job, source)
    return measured


def measure_messages(job, destination):
    """(seconds of a small message, bytes per second of a large one), as medians, one way.

    Each message is answered by a small one. Half of a small round trip is the time of a small
    message. The time of a large message is its round trip minus the time of a small message.
    """
    times = {SMALL: [], LARGE: []}
    for size in SIZES:
        tensor = torch.zeros(size, dtype=torch.uint8, device=job.device)
        start = time.perf_counter()
        sending = job.send(tensor, destination, "a message to measure")
        receive_bytes(job, SMALL, destination)
        times[size].append(time.perf_counter() - start)
        sending.wait()
    small, large = (statistics.median(times[size][WARM_UP:]) for size in (SMALL, LARGE))
    return small / 2, LARGE / max(large - small / 2, 1e-9)


def answer_messages(job, source):
    """Answer the messages of `measure_messages`, on the receiving rank."""
    answer = torch.zeros(SMALL, dtype=torch.uint8, device=job.device)
    for size in SIZES:
        receive_bytes(job, size, source)
        job.send(answer, source, "an answer").wait()


def receive_bytes(job, size, source):
    """Receive a message of `size` bytes and wait until it is on the device."""
    job.receive(source, "a message to measure", (size,), torch.uint8).wait()
    if job.device.type == "cuda":
        torch.cuda.synchronize()


def check_messages(source, destination, seconds, bytes_per_second):
    """The line of one direction between two ranks."""
    name = f"rank {source} to {destination}"
    result = f"1 KiB {seconds * 1e3:.2f} ms, 16 MiB {bytes_per_second / 1e9:.2f} GB/s"
    if seconds > SLOW_SMALL or bytes_per_second < SLOW_LARGE:
        advice = (
            "slow: close other programs; between nodes, name the fast network with "
            "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"
        )
        return Check(name, result, "warn", advice)
    return Check(name, result)
