# SPDX-License-Identifier: Apache-2.0
"""Notes a reader's progress: the checks write one line per call, into one file per person.

COURSE_PROGRESS names the folder, which must exist; in a workshop, all readers must be able to write
to it. Without the variable, the folder is build/progress; "off" switches the notes off. COURSE_NAME
names the person; the default is the login name. A line has the exercise, the outcome and the time,
but nothing of the answer. `make wall` shows such a folder.
"""

import getpass
import json
import os
import re
import sys
import time
import unicodedata
from pathlib import Path

from files.inputs import printable, read_as_it_is

FOLDER_VARIABLE = "COURSE_PROGRESS"
NAME_VARIABLE = "COURSE_NAME"
OFF = "off"
REACHED, TRIED, RIGHT = "not attempted", "not yet", "right"
OUTCOMES = (REACHED, TRIED, RIGHT)
MOST_BYTES = 5_000_000  # of a file; a week's notes of one person are far smaller
MOST_LINES = MOST_BYTES // 40  # a line has more bytes; millions of empty ones would stop the wall
LATEST = 1e11  # seconds since 1970: the year 5138
ROOT = Path(__file__).resolve().parents[2]
NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe must not block
told = set()  # the sentences that have been printed


def note(exercise, outcome):
    """Append a line on an exercise. A file that cannot be written does not stop the check."""
    folder = folder_of_progress()
    if folder is None:
        return
    record = {"exercise": exercise, "outcome": outcome, "time": round(time.time(), 1)}
    file = folder / f"{name_of_person()}.jsonl"
    is_shared = bool(os.environ.get(FOLDER_VARIABLE))
    # A new folder would hide a slip in its name from everybody.
    if is_shared and not os.path.isdir(folder):
        tell_once(f"Your progress is not noted: {FOLDER_VARIABLE} {folder} is not a folder")
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A line is appended in one write, so lines of several kernels do not mix. In a folder that
        # all may write to, a link may be anybody's: it is not followed.
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | NO_LINK, 0o644)
        try:
            if is_shared and hasattr(os, "fchmod"):  # so that the wall can read it
                os.fchmod(descriptor, 0o644)
            os.write(descriptor, f"{json.dumps(record)}\n".encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        tell_once(f"Your progress is not noted: {error}")
    else:
        shown = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
        sentence = f"Checks note your progress in {shown}; {FOLDER_VARIABLE}=off switches that off."
        tell_once(sentence, sys.stdout)  # not an error, which a notebook colours red


def folder_of_progress():
    """The folder for the lines; None if notes are off, in a web page or a stored notebook."""
    chosen = os.environ.get(FOLDER_VARIABLE, "")
    stored = os.environ.get("PIPELINE_STORED_PICTURES") == "1"  # a notebook that is being stored
    if chosen == OFF or stored or sys.platform == "emscripten":
        return None
    return Path(chosen) if chosen else ROOT / "build" / "progress"


def name_of_person():
    """The person's name as a file name, without characters that are special in a path."""
    try:
        name = os.environ.get(NAME_VARIABLE) or getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        name = ""
    # The vowels of many scripts are marks, which \w lacks: without them two names would be one.
    letters = unicodedata.normalize("NFC", name)[:40]
    kept = (re.match(r"[\w-]", one) or unicodedata.category(one)[0] == "M" for one in letters)
    return "".join(one if keep else "_" for one, keep in zip(letters, kept)) or "somebody"


def tell_once(sentence, stream=None):
    if sentence not in told:
        told.add(sentence)
        print(sentence, file=stream or sys.stderr)


def read_progress(folder):
    """({person: records in the order of time}, [a sentence for each thing that was skipped]).

    A file that is not a progress file is skipped, and so is a damaged line. The last line may still
    be incomplete; the next call reads it.
    """
    people, skipped = {}, []
    for file in sorted(Path(folder).iterdir()):
        name = printable(file.name)  # anybody may write there
        try:
            if file.is_symlink():
                skipped.append(f"{name} is a link, which is not followed")
                continue
            if file.suffix != ".jsonl" or not file.is_file():
                skipped.append(f"{name} is not a file of progress")
                continue
            if file.stat().st_size > MOST_BYTES:
                skipped.append(f"{name} is too large for a file of progress")
                continue
            *lines, _ = read_as_it_is(file, MOST_BYTES).split(b"\n")
        except OSError as error:
            skipped.append(f"{name} cannot be read: {error.strerror}")
            continue
        if len(lines) > MOST_LINES:
            skipped.append(f"{name} has too many lines for a file of progress")
            continue
        records = [record for record in map(read_line, lines) if record]
        damaged = len(lines) - len(records)
        if damaged:
            skipped.append(f"{name}: {damaged} of {len(lines)} lines are damaged")
        if records:
            people[file.stem] = sorted(records, key=lambda record: record["time"])
    return people, skipped


def read_line(line):
    """The record in a line, or None if the line is not a valid record."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.keys() != {"exercise", "outcome", "time"}:
        return None
    exercise, moment = record["exercise"], record["time"]
    known = isinstance(exercise, str) and len(exercise) <= 80 and record["outcome"] in OUTCOMES
    timed = isinstance(moment, (int, float)) and 0 <= moment <= LATEST
    return record if known and timed else None
