# SPDX-License-Identifier: Apache-2.0
"""Follows a run until its ranks have ended: shows and keeps what they print, and ends it if it fails."""

import os
import queue
import signal
import threading
import time
from collections import deque

from course.failed_run import RunFailed, failed_rank, readable_errors

MOST_LINES = 100_000  # of a stream that are kept, its last ones: a rank may print without end


def follow(started, show, limit, send=None):
    """Show what the ranks print until they end; return the last MOST_LINES of it.

    `started` is a WarmRanks or LaunchedRanks. The other arguments and the errors are those of
    `launch.run`.
    """
    lines = queue.Queue()
    for name, stream in started.streams.items():
        threading.Thread(target=read_stream, args=(name, stream, lines), daemon=True).start()
    output, errors = deque(maxlen=MOST_LINES), deque(maxlen=MOST_LINES)
    open_streams = len(started.streams)
    deadline = time.monotonic() + limit
    failure = None
    while open_streams:
        try:
            name, line = lines.get(timeout=0.1)
        except queue.Empty:
            name = None
        if name == "end":
            open_streams -= 1
        elif name == "stdout":
            output.append(line)
            if show:
                print(line, end="", flush=True)
            if send and line.startswith(send[2]):
                os.kill(started.process_of(send[1]), signal.Signals[send[0]])
                send = None
        elif name == "stderr":
            errors.append(line)
        if failure is None:
            failure = started.failure()
            if failure is None and time.monotonic() > deadline:
                failure = f"the run took longer than {limit} s"
            if failure is not None:
                started.end()
                deadline = time.monotonic() + 5  # for the last output of the ranks
        elif time.monotonic() > deadline:
            break
    failure = failure or started.failure(wait=True)
    if failure:
        failed = RunFailed(f"{readable_errors(errors)}({failed_rank(errors) or failure})")
        failed.output = "".join(output)
        raise failed
    return "".join(output)


def read_stream(name, stream, lines):
    """Put (name, line) into a queue for each line, and ("end", "") at the end."""
    try:
        for line in stream:
            lines.put((name, line))
    finally:
        lines.put(("end", ""))
