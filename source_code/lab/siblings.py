"""The processes around a rank: its launcher, without which it ends, and other ranks beside it."""

import multiprocessing
import os
import sys
import threading
from contextlib import suppress

import psutil

from lab.variables import LAUNCHER_VARIABLE
from pipeline.command_line import LauncherError, whole_number


def launcher_lives(parent):
    """Whether `parent`, which had started this process, and the launcher that it names still run."""
    if os.getppid() != parent:
        return False
    try:
        launcher = whole_number(LAUNCHER_VARIABLE, 0)
    except LauncherError:  # another program's variable
        return True
    if not launcher or sys.platform == "win32":  # where signal 0 is Ctrl-C
        return True
    try:
        os.kill(launcher, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # another user's process
        return True
    return True


def end_with_launcher():
    """In a forked rank, from its start on: end it when the process that asked for it is gone.

    The fork server does not report it: it lives as long as any rank does.
    """

    def wait():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def end_siblings(process_ids):
    """End processes of the same parent: a stopped one does not heed the launcher's request."""
    for process_id in process_ids:
        with suppress(psutil.Error):
            process = psutil.Process(process_id)
            if process.ppid() == os.getppid():  # the number has not gone to a stranger
                process.kill()


def stopped_siblings():
    """{process id: rank or None} of the stopped processes that this one's parent has started.

    The rank is None where it does not stand in the environment with which the process started.
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
    """(what is said of it, process ids to end) of `missing` ranks that are stopped before they come.

    ("", []) where none is. A process of unknown rank is left to its launcher.
    """
    found = {pid: rank for pid, rank in stopped_siblings().items() if rank in [None, *missing]}
    text = ", ".join(f"process {process_id} is stopped" for process_id in found)
    return text, [process_id for process_id, rank in found.items() if rank is not None]
