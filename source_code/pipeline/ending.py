"""How a process of a job ends: with one sentence, and together with whoever started it."""

import multiprocessing
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

LAUNCHER_VARIABLE = "PIPELINE_LAUNCHER"  # process id of a launcher on this machine
GRACE = 5.0  # seconds beyond the longest wait, after which the transport ends it
ending = threading.Lock()


def end_process(sentence, before_leaving=lambda: None):
    """Print one sentence and end this process at once, without waiting for any other rank."""
    ending.acquire()  # for good: a second thread has nothing to add
    print(sentence, file=sys.stderr, flush=True)
    sys.stdout.flush()
    before_leaving()
    time.sleep(0.3)  # if the store is here, others are asking it why their peer is gone
    os._exit(1)


def launcher_lives(parent):
    """Whether `parent`, which had started this process, and the launcher that it names still run."""
    if os.getppid() != parent:
        return False
    launcher = int(os.environ.get(LAUNCHER_VARIABLE, "0"))
    if not launcher or sys.platform == "win32":  # where signal 0 is Ctrl-C
        return True
    try:
        os.kill(launcher, 0)
    except ProcessLookupError:
        return False
    return True


def end_with_launcher():
    """In a forked rank, from its start on: end it when the process that asked for it is gone.

    The fork server does not tell: it lives as long as any rank does.
    """

    def wait():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def end_sibling(process_id):
    """End another process of the same parent: a stopped one does not heed the launcher's request.

    Nothing is ended where the system does not tell whose child a process is.
    """
    with suppress(OSError):
        status = Path(f"/proc/{process_id}/stat").read_text()
        parent = int(status.rpartition(")")[2].split()[1])
        if parent == os.getppid():  # the number has not gone to a stranger
            os.kill(process_id, 9)
