# SPDX-License-Identifier: Apache-2.0
"""Keeps a run alive when what it prints cannot be written: its reader has ended or a disk is full.

Without this, Python would end a training run of hours with a traceback at the next printed line. An
interrupt ends a run with one word instead of a traceback from every rank.
"""

import io
import os
import sys
from contextlib import contextmanager

from files.outputs import say_not_written


class Output(io.TextIOWrapper):
    """Text output to a file descriptor, written in whole lines, because several ranks may write to
    one pipe.

    If it cannot be written, it is dropped, and one line on standard error says so. Standard error
    is dropped in silence, except that a pipe without a reader ends the run. Characters that the
    encoding lacks are written as escapes.
    """

    def __init__(self, stream):
        descriptor = os.dup(stream.fileno())
        super().__init__(
            open(descriptor, "wb", buffering=0, closefd=False),  # without a warning at the end
            encoding=stream.encoding,
            errors="backslashreplace",
        )

    def write(self, text):
        with self.dropped_if_refused():
            super().write(text)
            if text.endswith("\n"):
                super().flush()
        return len(text)

    def flush(self):
        with self.dropped_if_refused():
            super().flush()

    @contextmanager
    def dropped_if_refused(self):
        try:
            yield
        except OSError as error:
            if self is sys.stderr and isinstance(error, BrokenPipeError):
                raise  # the process that started this run is gone, such as a kernel: end, too
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            if self is not sys.stderr:
                say_not_written("standard", "output", error)


def keep_running_unheard():
    """Make standard output and error Outputs, unless a notebook or a test has replaced them.

    A stream that the parent process has closed is opened on /dev/null. Otherwise `print` would put
    sentences for standard error into standard output, between lines that a program may read there.
    An interrupt ends the program with one word.
    """
    take_standard_numbers()
    end_quietly_when_interrupted()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif stream is getattr(sys, f"__{name}__") and not isinstance(stream, Output):
            setattr(sys, name, Output(stream))


def take_standard_numbers():
    """Open descriptors 0 to 2 if closed: a file that got one would also get what torch prints."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)


def end_quietly_when_interrupted():
    """Make Ctrl-C print one line, unless the process has its own way to show exceptions."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = show_exception


def show_exception(kind, error, trace):
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr, flush=True)
    else:
        sys.__excepthook__(kind, error, trace)
