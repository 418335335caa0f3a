"""What `make check` leaves out: a test is known as one that starts a process before it runs."""

import contextlib
import subprocess
import sys

import pytest
from processes import starts_processes
from ranks import run_on_ranks

from lab.simulator import simulate


@contextlib.contextmanager
def helper():
    yield [subprocess.run for _ in range(1)]


class Helper:
    def start(self):
        return run_on_ranks


class Heir(Helper):
    pass


@pytest.mark.parametrize("thing", [helper, Helper, Heir, run_on_ranks])
def test_what_leads_to_a_process_is_known_without_running_it(thing):
    def through_another_function():
        return thing

    assert starts_processes(thing)
    assert not starts_processes(through_another_function)  # a value, not a name


def test_what_only_computes_starts_none():
    assert not starts_processes(simulate)


def test_a_test_that_starts_a_process_without_the_mark_fails_and_says_what_to_do():
    guard = sys.modules["course_plugin"].guard
    try:
        with pytest.raises(pytest.fail.Exception, match="mark it with @pytest.mark.processes"):
            # The name is looked up at run time, so that this test has no mark.
            sys.modules["subprocess"].run([sys.executable, "--version"], timeout=10)
    finally:
        guard.started = None
