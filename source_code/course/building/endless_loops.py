# SPDX-License-Identifier: Apache-2.0
"""Ends an endless loop in a reader's code: it becomes an error at its own line."""

import signal
import sys
import threading
from contextlib import contextmanager

COMPUTING = 2  # seconds of processor time after which a loop counts as endless


class _Endless(BaseException):
    """Passes an `except Exception` in the loop that it ends."""


@contextmanager
def _told():
    try:
        yield
    except _Endless as end:
        raise TimeoutError(*end.args).with_traceback(end.__traceback__) from None


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
        with _told():
            yield
        return

    def stop(*_):
        raise _Endless(f"computed for {seconds} s; does this loop end?")

    usual = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        with _told():
            yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, usual)
