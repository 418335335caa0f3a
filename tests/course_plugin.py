"""The settings of every test and notebook: pyproject.toml loads this file as a plugin of pytest."""

import faulthandler
import gc
import multiprocessing.process
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.modules.setdefault("rfc3987_syntax", None)  # 1.5 s of grammars: see tools/exercises.py

import nbval.kernel  # noqa: E402
import pytest  # noqa: E402
from kernels import Kernel  # noqa: E402
from processes import starts_processes  # noqa: E402

LIMIT = 3600  # seconds, or a longer --session-timeout, after which everything ends, also what hangs
NO_SKIPS = "COURSE_NO_SKIPS"  # set to 1, a test that would be skipped fails
SOAK = "COURSE_SOAK"  # set to 1, tests that take minutes run, too
FURTHER = "COURSE_FURTHER"  # set to 1, cells of lessons with the tag further run, too

# With these left behind by one test, the next test in the same process would be a rank.
OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# Python's audit events of a new process, beside multiprocessing's own way.
STARTS = {"os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"}

# For every process that a test starts.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PIPELINE_WARM_RUNS"] = "1"
os.environ["COURSE_PROGRESS"] = "off"
# torch looks up the name of each address that it connects to, 127.0.0.1 too, and a name server that
# loses one question in ten costs a test 5 s. So nothing is asked, and torch does not warn of that.
os.environ["RES_OPTIONS"] = "attempts:0"
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
# malloc gets large pages, so that a rank of a run of one step has a quarter fewer page faults.
os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"

# Many ranks share few cores here. A rank that is interrupted may hold a lock for which one of gloo's
# threads spins. With this policy, a process that wakes up interrupts no other process.
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

nbval.kernel.KernelManager = Kernel


@pytest.fixture
def chromium():
    """The path of a Chromium; a test that asks for it is skipped where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("no Chromium on this machine; .ci/run installs it on Debian")
    return path


@pytest.fixture(autouse=True)
def no_rank_is_left_behind():
    before = {name: os.environ.get(name) for name in OF_A_RANK}
    yield
    assert {name: os.environ.get(name) for name in OF_A_RANK} == before


@pytest.fixture
def short_path():
    """A folder whose name is short enough for the sockets of a SLURM cluster in it."""
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


class LastResort:
    """Ends the whole run at its limit, with a traceback of every thread.

    pytest-timeout ends a test that hangs in Python. This class ends what pytest-timeout cannot.
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


class OnlyMarkedTestsStartProcesses:
    """Fails a test that starts a process without the mark by which `make check` leaves it out.

    It fails in `make test`, too, so that a missing mark shows in both. Fixtures of the test count.
    The end of a test does not: it may end a file's fixture, which other tests have used.
    """

    def __init__(self):
        self.watched = False  # whether a test without the mark is running
        self.started = None  # what it started
        sys.addaudithook(lambda event, _: event in STARTS and self.reject(event))
        start = multiprocessing.process.BaseProcess.start

        def refuse_or_start(process):
            self.reject("multiprocessing")
            start(process)

        multiprocessing.process.BaseProcess.start = refuse_or_start

    def reject(self, what):
        if self.watched:
            self.started = what
            self.fail()

    def fail(self):
        pytest.fail(
            f"this test starts a process ({self.started}); mark it with @pytest.mark.processes, "
            "so that `make check` leaves it out",
            pytrace=False,
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item):
        return (yield from self.watch(item))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        return (yield from self.watch(item))

    def watch(self, item):
        self.watched, self.started = item.get_closest_marker("processes") is None, None
        try:
            result = yield
        finally:
            self.watched = False
        if self.started:  # in a thread, or where the failure was caught
            self.fail()
        return result


guard = OnlyMarkedTestsStartProcesses()


def pytest_configure(config):
    gc.disable()  # until all tests are collected: what is imported until then stays
    sys.stderr.flush()
    limit = max(LIMIT, config.option.session_timeout or 0)
    config.pluginmanager.register(LastResort(limit), "last-resort")
    config.pluginmanager.register(guard, "only-marked-tests-start-processes")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config, items):
    left_out = {item for item in items if is_left_out(item)}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        if not isinstance(item, pytest.Function) or any(map(starts_processes, code_of(item))):
            item.add_marker("processes")  # a cell of a notebook has a kernel
        if "chromium" in getattr(item, "fixturenames", ()):  # `make test` needs no browser
            item.add_marker("further")
            item.add_marker("processes")
        if item.path.parent.name == "solutions":  # test_builds*.py and test_checks*.py try the same
            item.add_marker("further")


def is_left_out(item):
    """Whether an item needs a variable that is not set.

    A cell alone can have no mark: `make test-all` has to run the cells before it in the same kernel.
    """
    cell = getattr(item, "cell", None)
    further = cell is not None and "further" in cell.metadata.get("tags", [])
    soak = item.get_closest_marker("soak")
    return any(
        needed and os.environ.get(name) != "1"
        for needed, name in ((soak, SOAK), (further, FURTHER))
    )


def code_of(item):
    """The functions that run for a test: its own and its fixtures'."""
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    return [item.function, *(definition.func for each in fixtures for definition in each)]


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


def pytest_report_teststatus(report):
    """Name a failed test at once: the list at the end may be half an hour away."""
    if report.failed:
        category = "failed" if report.when == "call" else "error"
        return category, f"\n{category.upper()} {report.nodeid}\n", category.upper()


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


def pytest_collection_finish():
    """Spare the garbage collector thousands of tests, which all stay until the end."""
    gc.freeze()
    gc.enable()
