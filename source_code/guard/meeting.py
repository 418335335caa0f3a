# SPDX-License-Identifier: Apache-2.0
"""Finds the store that all ranks of a job share; a loopback address keeps it on this machine."""

import os
import re
import socket
import sys
import threading
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from ipaddress import ip_address

import torch.distributed as dist

try:
    import resource
except ImportError:  # Windows
    resource = None

from guard.ending import end_process
from guard.launcher import LauncherError, meeting_point, whole_number
from guard.siblings import end_siblings, stopped_among
from pipeline.job import GRACE, SLOW_START, of_this_attempt, store_of_one

LEAST = {  # limits for a rank: two ranks open more than 32 files, and torch maps 0.7 GB
    "RLIMIT_NOFILE": (64, "open files", "-n"),
    "RLIMIT_AS": (2**30, "bytes of memory", "-v"),
}


def find_store(job):
    """The store through which ranks find each other. The call does not wait for all ranks to join.

    If rank 0 keeps the store and is stopped on this machine, the wait ends after the job's timeout.
    Otherwise it ends after SLOW_START if that is longer: on a loaded machine, torchrun may need
    that long to answer, too.
    """
    check_limits()
    if job.num_ranks == 1:
        return store_of_one()
    try:
        whole_number("TORCHELASTIC_RESTART_COUNT", 0)  # it names this attempt's part of the store
        address, port = meeting_point()
        check_known(address)
    except LauncherError as error:
        raise SystemExit(str(error)) from None
    os.environ.setdefault("RANK", str(job.rank))
    os.environ.setdefault("WORLD_SIZE", str(job.num_ranks))
    limit = max(job.timeout, SLOW_START)
    of_launcher = launcher_keeps_the_store()
    is_keeper = job.rank == 0 and not of_launcher
    began = time.monotonic()
    keeper = "torchrun" if of_launcher else "rank 0"
    advice = "set MASTER_ADDR to the node of rank 0, and MASTER_PORT to a free port"
    try:
        if not is_keeper:  # torchrun listens before it starts ranks, so it must answer
            wait_for_listener(job, address, port, GRACE if of_launcher else limit)
        elif not is_loopback(address):
            check_reaches_itself(address, port)
        # torch's store waits for ever if another program listens at its port and says nothing.
        asked = f"rank {job.rank} has no answer from {keeper} at {address}:{port}"
        with ended_after(limit + GRACE, end_process, f"{asked}; {advice}"):
            return of_this_attempt(open_store(address, port, is_keeper, limit))
    except (OSError, RuntimeError) as error:
        waited = f"waited {time.monotonic() - began:.0f} s for {keeper} to start"
        reason = str(error).splitlines()[0]
        said = "cannot listen" if is_keeper else waited
        end_process(f"rank {job.rank} {said} at {address}:{port} ({reason}); {advice}")


def check_limits():
    """Reject variables and limits with which torch would fail, abort or hang."""
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):  # the second is older
        size = os.environ.get(name, "")
        if size and not re.fullmatch("[0-9]{1,9}", size):
            raise SystemExit(
                f"{name} is {size}, and has to be a whole number; correct it, or leave it out"
            )
    given = os.environ.get("GLOO_SOCKET_IFNAME")
    known = [name for _, name in socket.if_nameindex()] if given else []
    for name in given.split(",") if given else ():
        if name.partition(":")[0] not in known:
            raise SystemExit(
                f"GLOO_SOCKET_IFNAME is {given}, and this machine has {', '.join(known)}; set it to one "
                "of these, or leave it out"
            )
    for name, (least, what, flag) in LEAST.items() if resource else ():
        limit, _ = resource.getrlimit(getattr(resource, name))
        if limit != resource.RLIM_INFINITY and limit < least:
            raise SystemExit(
                f"a process may have fewer than {least:,} {what} here; raise the limit with ulimit {flag}"
            )


def check_known(address):
    """Raise LauncherError if no name server knows the address; torch's store would ask for ever."""
    deadline = time.monotonic() + GRACE  # a name server may be late
    while True:
        try:
            socket.getaddrinfo(address, None)
            return
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                raise LauncherError(
                    f"MASTER_ADDR is {address[:80]!r}, which cannot be found ({error.strerror}); "
                    "export the name or the address of the node of rank 0"
                ) from None
        time.sleep(0.5)


def wait_for_listener(job, address, port, limit):
    """Wait until a process listens at the address. Raises OSError after `limit` seconds.

    torch's store would also wait, but it prints a C++ stack at each attempt.
    """
    began = looked = time.monotonic()
    while True:
        try:
            return socket.create_connection((address, port), timeout=GRACE).close()
        except OSError:
            now = time.monotonic()
            if now - began > limit:
                raise
            if now - began > job.timeout and now - looked > 1:
                looked = now
                stopped, processes = stopped_among([0])
                if stopped:
                    waited = f"rank {job.rank} waited {job.timeout:g} s for rank 0 to start"
                    end_process(f"{waited}: {stopped}", partial(end_siblings, processes))
            time.sleep(0.02)


def check_reaches_itself(address, port):
    """Raise OSError if the address is another machine's: torch's store would try it for a minute.

    No interface has an address that is translated on the way, and yet connections to it arrive.
    """
    family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as own:
        own.bind((place[0], 0, *place[2:]))
        return
    with socket.create_server(("", port), family=family) as listening:
        listening.settimeout(GRACE)
        with socket.create_connection((address, port), timeout=GRACE):
            listening.accept()[0].close()


@contextmanager
def ended_after(seconds, end, *arguments):
    """A context that calls `end(*arguments)`, which ends this process, if its body takes longer."""
    timer = threading.Timer(seconds, end, arguments)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def launcher_keeps_the_store():
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def open_store(address, port, is_keeper, limit):
    """Create the store or connect to it. At a loopback address no other machine can reach the job.

    By default, torch's store listens on all interfaces and accepts every request.
    """
    options = {"use_libuv": os.environ.get("USE_LIBUV", "1") == "1"}
    if is_loopback(address):
        stay_on_loopback()
        if is_keeper and sys.platform != "win32":
            options["master_listen_fd"], port = listen(address, port)
    limit = timedelta(seconds=limit)
    return dist.TCPStore(
        address, port, is_master=is_keeper, timeout=limit, wait_for_workers=False, **options
    )


def is_loopback(address):
    """Whether all addresses behind the name `address` are loopback addresses."""
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(address, None)}
    except OSError:
        return False
    return all(ip_address(place.partition("%")[0]).is_loopback for place in found)


def stay_on_loopback():
    """Make messages use the loopback interface as well, unless the user has named an interface."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    for name in names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def listen(address, port):
    """(descriptor, port) of a socket that listens at this address only."""
    family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
        listening.listen(1024)
        port = listening.getsockname()[1]
        return listening.detach(), port
