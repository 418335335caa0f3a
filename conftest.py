"""What holds for every test. It stands at the root so that it holds for the notebooks, too."""

import faulthandler
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import nbval.kernel
import pytest
from kernels import Kernel

LIMIT = 3600  # seconds, after which everything ends, also what hangs
NO_SKIPS = "COURSE_NO_SKIPS"  # set to 1, a test that would be skipped fails

# For every process that a test starts.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PIPELINE_WARM_RUNS"] = "1"

nbval.kernel.KernelManager = Kernel


@pytest.fixture
def chromium():
    """The path of a Chromium; a test that asks for it is skipped where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("no Chromium on this machine; .ci/run installs it on Debian")
    return path


@pytest.fixture
def short_path():
    """A folder whose name is short enough for the sockets of a SLURM cluster in it."""
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


class LastResort:
    """Ends the whole run at its limit, with a traceback of every thread.

    pytest-timeout ends a test that hangs in Python. This is for what it cannot reach.
    """

    def __init__(self, limit):
        self.deadline = time.monotonic() + limit
        self.stderr = os.dup(2)  # the tests' own is captured
        self.arm()

    def arm(self):
        left = max(1.0, self.deadline - time.monotonic())
        faulthandler.dump_traceback_later(left, exit=True, file=self.stderr)

    def pytest_exception_interact(self):
        self.arm()  # pytest has just cancelled it, as it does whenever a test fails


def pytest_configure(config):
    sys.stderr.flush()
    config.pluginmanager.register(LastResort(LIMIT), "last-resort")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    return fail_if_skipped((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    return fail_if_skipped((yield))


def fail_if_skipped(report):
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get(NO_SKIPS) == "1":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{NO_SKIPS}=1 lets no test be skipped. {reason}"
    return report


def pytest_terminal_summary(terminalreporter):
    """How many tests each file and each notebook has, and how long they took."""
    suites = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                tests, failed, seconds = suites.setdefault(
                    report.nodeid.split("::")[0], [set(), set(), []]
                )
                tests.add(report.nodeid)
                seconds.append(report.duration)
                if report.failed:
                    failed.add(report.nodeid)
    if not suites:
        return
    terminalreporter.section("suites")
    for name, (tests, failed, seconds) in sorted(suites.items()):
        note = f"  {len(failed)} FAILED" if failed else ""
        terminalreporter.line(f"{len(tests):5} tests {sum(seconds):7.1f} s  {name}{note}")
