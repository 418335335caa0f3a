# SPDX-License-Identifier: Apache-2.0
"""Reads the request of an exercise on a rank and prints the report (lessons 06 to 12c)."""

import json
import os
import signal
import sys
import threading
import traceback
import types
from contextlib import contextmanager
from pathlib import Path

from course.building import ANSWER, RAISED
from small import pipeline as my_pipeline

COMPUTING = 2  # seconds of processor time after which a loop counts as endless
YOURS = "<your "  # starts the file names of the reader's functions


def read_request(path):
    """(the whole request, the reader's functions) from a JSON file that reader_on_ranks.py wrote.

    The functions can use the names of small/pipeline.py and those that the reader defined or imported.
    """
    request = json.loads(Path(path).read_text())
    names = names_of(request["imports"], request["sources"])
    return request, [names[name] for name in request["functions"]]


def names_of(imports, sources):
    """A module's names: those of small/pipeline.py, and what the reader's imports and texts define."""
    module = sys.modules["yours"] = types.ModuleType("yours")  # where a dataclass looks for itself
    names = vars(module)
    names.update(vars(my_pipeline), __name__="yours")
    exec("\n".join(imports), names)
    for name, text in sources:
        exec(compile(text, f"{YOURS}{name}>", "exec"), names)  # the reader's own program
    return names


def report(value):
    """Print `value` as JSON, in the line that the check reads, whatever was printed before it."""
    print(f"\n{ANSWER}{json.dumps(value, default=repr)}\n", end="", flush=True)


@contextmanager
def endless_loops_ended(seconds=None):
    """A context for the reader's code: an endless loop becomes an error at its own line.

    The limit is in seconds of processor time, so a busy machine or a wait for other ranks does not
    count.
    """
    seconds = seconds or COMPUTING
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or not hasattr(signal, "setitimer"):  # which Windows does not have
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


@contextmanager
def errors_told(seconds=None):
    """A context for the whole program of a rank: an error is reported with the reader's line."""
    try:
        with endless_loops_ended(seconds):
            yield
    except Exception as error:
        frames = traceback.walk_tb(error.__traceback__)
        places = [(frame.f_code.co_filename, line) for frame, line in frames]
        own = [(file[len(YOURS) : -1], line) for file, line in places if file.startswith(YOURS)]
        if own:
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            line = RAISED + json.dumps([os.environ["RANK"], *own[-1], said])
            print(line, file=sys.stderr, flush=True)
        raise
