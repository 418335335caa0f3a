"""Standard output that ends no run: one that no process reads, or that lies on a full disk.

Python would end with a traceback at the next line that it prints, hours of training or not. An
interrupt ends a run with one word in place of a traceback of every rank.
"""

import io
import os
import sys

from pipeline.files import say_not_written


class Output(io.TextIOWrapper):
    """Text for a file descriptor. What cannot be written is given up, and said once.

    Characters that the terminal's encoding lacks are written as escapes.
    """

    def __init__(self, stream):
        descriptor = os.dup(stream.fileno())
        super().__init__(
            open(descriptor, "wb", buffering=0),
            encoding=stream.encoding,
            errors="backslashreplace",
            write_through=True,
        )

    def write(self, text):
        try:
            return super().write(text)
        except OSError as error:
            say_not_written("standard", "output", error)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(text)


def keep_running_unheard():
    """Let this process print wherever its output leads; the one of a notebook or a test stays."""
    if sys.stdout is None:  # closed by the process that started it
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    elif sys.stdout is sys.__stdout__ and not isinstance(sys.stdout, Output):
        sys.stdout = Output(sys.stdout)


def end_quietly_when_interrupted():
    """Let Ctrl-C print one line. A process that shows exceptions in its own way keeps it."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = show_exception


def show_exception(kind, error, trace):
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr, flush=True)
    else:
        sys.__excepthook__(kind, error, trace)
