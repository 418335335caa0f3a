# SPDX-License-Identifier: Apache-2.0
"""Records a broken pipeline of lesson 12b and a healthy one, and compares them."""

import shutil

from course.debugging.cases import CASES
from course.debugging.time_machine import time_machine
from course.failed_run import RunFailed
from course.launch import ROOT, run

FOLDER = ROOT / "build" / "12b"
LONGEST_WAIT = 5  # seconds: a rank of a case that waits longer ends its job


def investigate(case):
    """Record case `case` with and without its fault, print both losses, open the time machine."""
    if case not in list(CASES):
        print(f"Put a number from 1 to {len(CASES)} in the place of the dots.")
        return None
    folders = []
    for name, call, ranks in runs_of(case):
        folder = FOLDER / f"case_{case}_{name}"
        shutil.rmtree(folder, ignore_errors=True)
        FOLDER.mkdir(parents=True, exist_ok=True)
        print(f"{name:8}", end=" ")
        try:
            finished = run(f"{call} --record {folder.relative_to(ROOT)}", ranks, True, show=False)
            print(*(f"{loss:.6f}" for loss in finished.losses))
            tell_summary(finished.output)
        except RunFailed as failed:
            print(failed)
        folders.append(folder)
    print("recorded in", " and ".join(str(folder.relative_to(ROOT)) for folder in folders))
    return time_machine(*folders)


def runs_of(case):
    """(name, command, ranks) of the two runs of a case."""
    if case == len(CASES):  # the case of broken_unknown_program.py
        script = "broken_unknown_program.py"
        return [("broken", script, 2), ("healthy", script, 1)]
    call = f"broken_pipelines.py --case {case}"
    return [
        ("broken", f"{call} --timeout {LONGEST_WAIT}", 4),
        ("healthy", f"{call} --cured", 4),
    ]


def tell_summary(output):
    """Print the program's line with the time of a step and the ranks' idle time, if it has one."""
    last = output.splitlines()[-1].split("  peak")[0]
    if "idle" in last:
        print(last)
