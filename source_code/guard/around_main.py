# SPDX-License-Identifier: Apache-2.0
"""Surrounds a program's main(): ranks agree before the first message, and a lost one is named.

`@guarded` above `def main()` and its import are all that attaches it. Without these two lines a
program computes the same digits, and ends by torch's own means.
"""

import argparse
import functools
from contextlib import contextmanager

import guard.unpickling  # noqa: F401 - objects from other ranks run no code
from guard.agreement import settings_of
from guard.files import not_written, write_whole
from guard.launcher import ranks_set
from guard.one_sentence import in_one_sentence, tell_launcher
from guard.paths import attributes_of, check_paths
from guard.presence import guarded_meeting
from guard.printing import end_quietly_when_interrupted, keep_running_unheard
from guard.sizes import check_duration, check_memory
from pipeline.job import joining, told
from pipeline.training import checks, writing


def guarded(main):
    """The decorator of a program's main()."""

    @functools.wraps(main)
    def surrounded():
        keep_running_unheard()
        end_quietly_when_interrupted()
        not_written.clear()
        with in_one_sentence(), ranks_set(), attached():
            return main() or int(bool(not_written))

    return surrounded


@contextmanager
def attached():
    """A context in which jobs are joined guarded, and the flags that a program parses are checked."""
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
    before, checks[:] = list(checks), [*checks, check_memory, check_duration]
    try:
        yield
    finally:
        argparse.ArgumentParser.parse_args = parse_args
        joining.remove(meeting)
        told.remove(tell_launcher)
        writing.remove(write_whole)
        checks[:] = before
