# SPDX-License-Identifier: Apache-2.0
"""Surrounds a program's main(): ranks agree before the first message, and a lost one is named.

`@guarded` above `def main()` and its import are all that attaches it. Without these two lines a
program computes the same digits, and ends by torch's own means.
"""

import argparse
import functools
from contextlib import contextmanager

from files.inputs import InputError
from files.outputs import no_links, not_written, write_whole
from files.unpickling import restrict_ranks
from guard.agreement import settings_of
from guard.ending import end_process, lack_of_kernels, lack_of_memory, told
from guard.launcher import ranks_set, read_ranks
from guard.one_sentence import in_one_sentence, tell_launcher
from guard.paths import attributes_of, check_paths
from guard.presence import guarded_meeting
from guard.sizes import check_duration, check_memory, check_rate
from pipeline.job import joining
from pipeline.training import checks, writing


def guarded(main):
    """The decorator of a program's main()."""

    @functools.wraps(main)
    def surrounded():
        not_written.clear()
        no_links.clear()
        restrict_ranks()  # objects from other ranks run no code
        with in_one_sentence(), ranks_set(), attached(), naming_what_fails():
            return main() or int(bool(not_written))

    return surrounded


@contextmanager
def naming_what_fails():
    """A context in which a lack of memory ends this rank with one sentence.

    So do a missing folder for temporary files, which torch's optimizers need, or for compiled
    kernels, and a file that has changed or become unreadable since the flags were checked.
    """
    try:
        yield
    except InputError as error:
        end_process(f"rank {read_ranks()[0]}: {error}")
    except (OSError, MemoryError, RuntimeError) as error:
        if not (what := what_lacks(error)):
            raise
        end_process(f"rank {read_ranks()[0]} {what}")


def what_lacks(error):
    """Return in words what the machine does not give this rank; None for another error."""
    if reason := lack_of_memory(error):
        return (
            f"has too little memory ({reason}); use smaller sizes or more ranks, or raise a limit "
            "(ulimit -v; for threads, ulimit -u)"
        )
    if reason := lack_of_kernels(error):
        return (
            f"cannot use torch's folder of compiled kernels ({reason}); set TORCHINDUCTOR_CACHE_DIR "
            "to a folder of yours that has room"
        )
    if isinstance(error, FileNotFoundError) and "No usable temporary directory" in str(error):
        return "finds no folder for temporary files; set TMPDIR to one that can be written, and has room"
    return None


@contextmanager
def attached():
    """A context in which the guard joins jobs, and checks the flags that a program parses."""
    parsed = []  # (arguments, {flag: attribute} of what is read); the ranks compare the last ones
    parse_args = argparse.ArgumentParser.parse_args

    def noted(parser, *words):
        arguments, read = parse_args(parser, *words), {}
        if hasattr(parser, "reads"):
            check_paths(parser, arguments)
            read = attributes_of(parser, parser.reads)
        parsed.append((arguments, read))
        return arguments

    def meeting(job):
        return guarded_meeting(job, settings_of(*parsed[-1]) if parsed else {})

    argparse.ArgumentParser.parse_args = noted
    joining.append(meeting)
    told.append(tell_launcher)
    writing.append(write_whole)
    before, checks[:] = list(checks), [*checks, check_rate, check_memory, check_duration]
    try:
        yield
    finally:
        argparse.ArgumentParser.parse_args = parse_args
        joining.remove(meeting)
        told.remove(tell_launcher)
        writing.remove(write_whole)
        checks[:] = before
