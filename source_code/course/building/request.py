"""What a rank of an exercise is asked for, and how it answers (lessons 06, 07, 08 and 10)."""

import json
import os
import signal
import sys
import threading
import traceback
from contextlib import contextmanager
from pathlib import Path

from course.building import ANSWER, RAISED, my_pipeline

COMPUTING = 2  # seconds of the processor after which a rank is taken for caught in a loop
YOURS = "<your "  # how the file names of the reader's functions begin


def read_request(path):
    """(the whole request, the reader's functions) of a JSON file that reader_on_ranks.py wrote.

    The functions find the names of my_pipeline.py, and what the reader has defined or imported.
    """
    request = json.loads(Path(path).read_text())
    names = dict(vars(my_pipeline), __name__="yours")
    exec("\n".join(request["imports"]), names)
    for name, text in request["sources"]:
        exec(compile(text, f"{YOURS}{name}>", "exec"), names)  # the reader's own program
    return request, [names[name] for name in request["functions"]]


def report(value):
    """Print what the check reads."""
    print(ANSWER + json.dumps(value), flush=True)


@contextmanager
def endless_loops_ended(seconds=None):
    """Around code of the reader's: a loop that never ends becomes an error at its own line.

    What counts is the processor's time, so a busy machine and a wait for other ranks do not.
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
    """Around all that a rank does: an error is told with the reader's line at which it came."""
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
