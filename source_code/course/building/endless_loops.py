# SPDX-License-Identifier: Apache-2.0
"""Ends an endless loop in a reader's code: it becomes an error at its own line."""

import signal
import sys
import threading
from contextlib import contextmanager

COMPUTING = 2  # seconds of processor time after which a loop counts as endless


@contextmanager
def endless_loops_ended(seconds=None):
    """A context for the reader's code, which may compute for `seconds` of processor time.

    A busy machine or a wait for other ranks takes no processor time, so neither counts. Inside
    another such context, the outer limit applies.
    """
    seconds = seconds or COMPUTING
    in_main = threading.current_thread() is threading.main_thread()
    # Windows has no such timer, and in a web page it would not interrupt Python.
    if not in_main or not hasattr(signal, "setitimer") or sys.platform == "emscripten":
        yield
        return
    if any(signal.getitimer(signal.ITIMER_VIRTUAL)):
        yield
        return

    def stop(*_):
        raise TimeoutError(f"computed for {seconds} s; does this loop end?")

    usual = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, usual)
