"""Measures the tests: spoils a copy of the repository, fault by fault, and says what notices it.

.venv/bin/python tools/spoil_code.py              # all faults of tools/spoilt_code
.venv/bin/python tools/spoil_code.py NAME ...     # some
.venv/bin/python tools/spoil_code.py --list

For each fault it runs only the tests that are named beside it, after it has seen that they pass
without the fault. It ends with status 1 if a fault was not caught.
"""

import itertools
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "source_code"))

from own_git import ask_git  # noqa: E402
from spoilt_code import course, extensions, guard, lab, pipeline, planning, scripts  # noqa: E402
from spoilt_code.fault import StaleFaultError  # noqa: E402

from guard.one_sentence import in_one_sentence  # noqa: E402
from pipeline.command_line import Parser, positive_integer  # noqa: E402

FILES = pipeline, guard, lab, extensions, planning, course, scripts
FAULTS = [fault for file in FILES for fault in file.FAULTS]
MAKE_TEST = "-m", "not further"  # tests that `make test` leaves out do not count
LIMIT = 300  # seconds for the tests of one fault
REPORTED = re.compile(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", re.MULTILINE)
# Python reuses compiled code if its source was written in the same second, and two faults may be
# planted in one second. So each planted file gets another second.
seconds = itertools.count(1)


@in_one_sentence()
def main():
    """Plant the faults that are named, or all; print what caught each."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="faults to plant, else all")
    add("--list", action="store_true", help="only print the faults")
    add(
        "--at-once",
        type=positive_integer,
        default=2,
        choices=range(1, 9),
        metavar="N",
        help="copies to work in",
    )
    arguments = parser.parse_args()
    unknown = set(arguments.names) - {fault.name for fault in FAULTS}
    if unknown:
        parser.error(f"there is no fault {', '.join(sorted(unknown))}; --list names all")
    faults = [f for f in FAULTS if f.name in arguments.names or not arguments.names]
    try:
        for fault in faults:
            fault.plant((ROOT / fault.path).read_text(encoding="utf-8"))
    except StaleFaultError as error:
        sys.exit(f"{error}; correct tools/spoilt_code")
    if arguments.list:
        for fault in faults:
            print(f"{fault.name:28} {fault.place}\n{'':28} {fault.wrong}")
        return 0
    with new_folder() as folder:
        copies = [Path(folder) / f"copy-{number}" for number in range(arguments.at_once)]
        for copy in copies:
            copy_repository(copy)
        check_that_tests_pass(copies[0], faults, arguments.at_once)
        return int(not all(list(plant_in_turn(copies, faults))))


def new_folder():
    """Return a context with a new folder of the system's temporary files, or say what is missing."""
    try:
        return tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    except OSError as error:
        sys.exit(
            f"there is no folder for the copies ({error.strerror}); set TMPDIR to one of yours"
        )


def copy_repository(copy):
    """Copy the working tree, without what git ignores."""
    try:
        listed = ask_git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    except (OSError, subprocess.SubprocessError):
        sys.exit("git does not list the repository's files; install git, and use a clone")
    try:
        for name in set(os.fsdecode(listed).split("\0")) - {""}:
            if (ROOT / name).is_file():  # otherwise it has just been deleted
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, copy / name)
    except OSError as error:
        reason = f"{error.filename} cannot be copied to {copy} ({error.strerror})"
        sys.exit(f"{reason}; set TMPDIR to a folder with room")


def check_that_tests_pass(copy, faults, at_once):
    """End with status 1 if a test fails, or is not there, without any fault."""
    tests = sorted({test for fault in faults for test in fault.node_ids})
    apart = ["--numprocesses", str(at_once), "--dist", "loadfile"]
    status, output = run_tests(copy, [*apart, *tests], limit=3600)
    if status != 0:
        print(output, file=sys.stderr)
        sys.exit("these tests have to pass without a fault first")
    print(f"without a fault, the {len(tests)} tests pass", flush=True)


def plant_in_turn(copies, faults):
    """Yield for each fault whether it was caught, and print by what."""
    free = queue.Queue()
    for copy in copies:
        free.put(copy)

    def in_a_free_copy(fault):
        copy = free.get()
        try:
            return verdict_on(fault, copy)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(copies)) as pool:
        for fault, (caught, sentence) in zip(faults, pool.map(in_a_free_copy, faults)):
            print(f"{fault.name:28} {sentence}", flush=True)
            yield caught


def verdict_on(fault, copy, limit=LIMIT):
    """Plant the fault in the copy, run its tests, restore. Returns (caught, sentence)."""
    path, began = copy / fault.path, time.monotonic()
    text, written = path.read_text(encoding="utf-8"), path.stat().st_mtime
    path.write_text(fault.plant(text), encoding="utf-8")
    planted = written + next(seconds)
    os.utime(path, (planted, planted))
    try:
        status, output = run_tests(copy, ["-x", *fault.node_ids], limit)
    finally:
        path.write_text(text, encoding="utf-8")
        os.utime(path, (written, written))
    took = f"{time.monotonic() - began:.0f} s"
    if failed := REPORTED.search(output):
        return True, f"caught by {failed[1]} ({took})"
    ended = "the tests pass" if status == 0 else f"no test failed, and pytest ended with {status}"
    return False, f"NOT CAUGHT: {ended} ({took})"


def run_tests(copy, arguments, limit):
    """Run pytest in the copy. Returns its exit status, or "no end in time", and what it printed."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "COURSE_SOAK")}
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", *MAKE_TEST, *arguments]
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        started = subprocess.Popen(
            command, cwd=copy, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            status = started.wait(limit)
        except subprocess.TimeoutExpired:
            status = "no end in time"
        finally:
            try:
                os.killpg(started.pid, signal.SIGKILL)  # what the fault has left running, too
            except ProcessLookupError:
                pass
            started.wait(60)
        log.seek(0)
        return status, log.read()


if __name__ == "__main__":
    sys.exit(main())
