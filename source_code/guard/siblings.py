# SPDX-License-Identifier: Apache-2.0
"""The processes around a rank: its launcher, and the other ranks on the same machine."""

import multiprocessing
import os
import threading
from contextlib import suppress

import psutil

from guard.launcher import LauncherError, whole_number

LAUNCHER_VARIABLE = "PIPELINE_LAUNCHER"  # process id of a launcher on this machine


def launcher_lives(parent):
    """Whether `parent`, which started this process, and the launcher in LAUNCHER_VARIABLE run."""
    if os.getppid() != parent:
        return False
    try:
        launcher = whole_number(LAUNCHER_VARIABLE, 0)
    except LauncherError:  # set by another program
        return True
    return not launcher or psutil.pid_exists(launcher)


def end_with_launcher():
    """Make this forked rank end when the process that requested it is gone.

    The fork server gives no sign of that: it runs as long as any of its ranks.
    """

    def wait():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def end_siblings(process_ids):
    """Kill processes of the same parent: a stopped one ignores the launcher's request to end."""
    for process_id in process_ids:
        with suppress(psutil.Error):
            process = psutil.Process(process_id)
            if process.ppid() == os.getppid():  # the id has not been reused by another program
                process.kill()


def stopped_siblings():
    """{process id: rank or None} of the stopped processes that this process's parent has started.

    The rank is None if the environment at the start of the process does not have it.
    """
    stopped = {}
    with suppress(psutil.Error):
        for process in psutil.Process(os.getppid()).children():
            with suppress(psutil.Error):
                if process.status() == psutil.STATUS_STOPPED:
                    variables = process.environ()
                    rank = variables.get("RANK", variables.get("SLURM_PROCID"))
                    stopped[process.pid] = int(rank) if rank and rank.isdecimal() else None
    return stopped


def stopped_among(missing):
    """(text, process ids to end) of `missing` ranks that were stopped before they joined.

    ("", []) if there are none. A process of unknown rank is in the text, but its launcher ends it.
    """
    found = {pid: rank for pid, rank in stopped_siblings().items() if rank in [None, *missing]}
    text = ", ".join(f"process {process_id} is stopped" for process_id in found)
    return text, [process_id for process_id, rank in found.items() if rank is not None]
