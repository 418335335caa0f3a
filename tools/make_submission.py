"""Run all checks of your notebooks and write one file to hand in: build/submission_NAME.json.

    make submission                              # COURSE_NAME=... for another name than the login's
    python tools/make_submission.py 02 03        # only these lessons; others are not attempted

Each notebook runs in a separate process with a time limit: its imports and functions, your answers,
and the checks below them. The file has, for every exercise, the output of the check and your answer
as text.
"""

import argparse
import ast
import builtins
import contextlib
import io
import json
import linecache
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "source_code"))

from exercises import NOTEBOOKS, exercises_of, lesson_of, notebook_of, read_notebooks  # noqa: E402

from course.building.endless_loops import endless_loops_ended  # noqa: E402
from course.progress import FOLDER_VARIABLE, OFF, name_of_person  # noqa: E402
from files.inputs import InputError, printable  # noqa: E402
from files.outputs import (  # noqa: E402
    can_be_written,  # noqa: E402
    not_written,
    write_whole,
)
from guard.one_sentence import in_one_sentence, naming_files  # noqa: E402
from pipeline.command_line import Parser  # noqa: E402

FORM = "submission of the course on pipeline parallelism, 1"
LIMIT = 600  # seconds for a notebook
COMPUTING = 60  # seconds of processor time for a cell, so that a loop without end costs one answer
MOST_LETTERS = 20_000  # of an answer, and of the output of a check
MOST_WRITTEN = 2**28  # bytes of a file that an answer, or a program that it starts, writes
MOST_PRINTED = 2**25  # bytes that are read of what a notebook's process has printed
PROGRAM = re.compile(r"%%writefile \{(\w+)\}\n(.*)", re.DOTALL)  # an answer that is a whole file
DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)


@in_one_sentence()
def main():
    arguments = parse_arguments()
    if arguments.one:
        os.environ[FOLDER_VARIABLE] = OFF  # these runs do not count as attempts
        bound_files()
        try:
            answers = answers_of(arguments.one)
        except InputError as error:
            sys.exit(f"--one: {error}")
        with contextlib.suppress(OSError):  # there may be no room after what answers have printed
            os.lseek(1, 0, os.SEEK_SET)
            os.ftruncate(1, 0)
        print(json.dumps(answers), flush=True)
        os._exit(0)  # Python would wait for threads that an answer has left
    file = ROOT / "build" / f"submission_{name_of_person()}.json"
    check_place(file)  # before the minutes that the checks take
    answers = []
    notebooks, skipped = read_notebooks()
    for sentence in skipped:
        print(f"skipped: {sentence}", flush=True)
    for path in notebooks:
        if not arguments.lessons or lesson_of(path) in arguments.lessons:
            try:
                found = run_apart(path)
            except InputError as error:  # it has changed since all were read
                said = str(error).replace(str(path), printable(str(path)))
                print(f"skipped: {said}", flush=True)
                continue
            right = sum(answer["said"].startswith("Right: ") for answer in found)
            print(f"lesson {printable(lesson_of(path))}: {right} of {len(found)} right", flush=True)
            answers += found
    if not answers:
        sys.exit(
            f"make_submission.py: no exercise was found in {NOTEBOOKS}, and nothing was written; name "
            "other lessons, or get these back with: git checkout notebooks"
        )
    made = time.strftime("%Y-%m-%d %H:%M")
    content = {"form": FORM, "name": name_of_person(), "made": made, "answers": answers}
    with naming_files(file):
        write_whole(file, json.dumps(content, indent=1) + "\n")
    right = sum(answer["said"].startswith("Right: ") for answer in answers)
    print(f"{file.relative_to(ROOT)}: {right} of {len(answers)} exercises are right")
    return int(bool(not_written))


def bound_files():
    """From now on no file of this process, or of a program that it starts, exceeds MOST_WRITTEN.

    An answer may leave a program that prints without end, such as yes, which the system then ends.
    """
    with contextlib.suppress(ImportError):  # on Windows
        import resource

        for limit, most in ((resource.RLIMIT_FSIZE, MOST_WRITTEN), (resource.RLIMIT_CORE, 0)):
            hard = resource.getrlimit(limit)[1]  # -1 is none
            resource.setrlimit(limit, (min(most, hard) if hard >= 0 else most, hard))


def check_place(file):
    """Reject a course in which the file to hand in cannot be written."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(exist_ok=True)
    if not can_be_written(file):
        sys.exit(
            f"make_submission.py: {file} cannot be written; use a copy of the course in a folder of yours"
        )


def parse_arguments():
    parser = Parser(__doc__)
    parser.add_argument("lessons", nargs="*", help="such as 02 12b; all unless given")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)  # the process of one notebook
    arguments = parser.parse_args()
    known = [lesson_of(path) for path in sorted(NOTEBOOKS.glob("*.ipynb"))]
    if known and (unknown := set(arguments.lessons) - set(known)):
        parser.error(f"{min(unknown)} is not a lesson; the lessons are {' '.join(known)}")
    return arguments


def run_apart(path):
    """The answers of one notebook, from a separate process that is stopped after LIMIT."""
    cells = notebook_of(path).cells
    exercises = [exercise for _, exercise in exercises_of(cells, lesson_of(path))]
    command = [sys.executable, __file__, "--one", path]
    problem = f"Not yet: the checks of this notebook did not end within {LIMIT} s"
    try:
        # Not pipes, which a process that an answer starts may keep open.
        with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as errors:
            streams = {"stdin": subprocess.DEVNULL, "stdout": printed, "stderr": errors}
            subprocess.run(command, **streams, timeout=LIMIT)
            if answers := answers_in(text_of(printed), exercises):
                return answers
            reason = (text_of(errors).strip() or "it said nothing").splitlines()[-1]
        problem = f"Not yet: the checks of this notebook could not run: {reason}"
    except subprocess.TimeoutExpired:
        pass
    except OSError as error:  # such as a limit of processes
        problem = f"Not yet: the checks of this notebook could not run: {error.strerror}"
    return [
        {"lesson": exercise.lesson, "exercise": exercise.name, "said": problem, "answer": ""}
        for exercise in exercises
    ]


def text_of(file):
    """The end of what a file has: an answer may start a program that prints gigabytes."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - MOST_PRINTED))
    return file.read().decode(errors="replace")


def answers_in(output, exercises):
    """The answers to all `exercises` in what a notebook's process has printed, or None.

    They are not the last line if an answer prints something more when the process ends.
    """
    names = [(exercise.lesson, exercise.name) for exercise in exercises]
    for line in reversed(output.splitlines()):
        with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError):
            answers = json.loads(line)
            if [(answer["lesson"], answer["exercise"]) for answer in answers] == names:
                return answers
    return None


def answers_of(path):
    """[{lesson, exercise, said, answer}] of a notebook, after its answers and checks have run."""
    cells = notebook_of(path).cells
    checks = exercises_of(cells, lesson_of(path))
    with_checks = {index for index, _ in checks}
    code = [index for index, cell in enumerate(cells) if cell.cell_type == "code"]
    answer_at = {check: index for index, check in zip(code, code[1:]) if check in with_checks}
    namespace = {"__name__": "__main__", "cluster": False}  # lesson 11 submits no job here
    answers = []
    files = tempfile.TemporaryDirectory()  # for answers that are whole files
    for index in code:
        cell = cells[index]
        if index in with_checks:
            answer = cells[answer_at[index]].source if index in answer_at else ""
            here = [exercise for at, exercise in checks if at == index]
            for lesson, name, call, _ in here:
                said = run_check(cell.source if len(here) == 1 else call, namespace)
                answers.append(
                    {
                        "lesson": lesson,
                        "exercise": name,
                        "said": said[:MOST_LETTERS],
                        "answer": answer[:MOST_LETTERS],
                    }
                )
        else:
            whole = index in answer_at.values()
            prepare(cell.source, f"<cell {index}>", namespace, whole, files.name)
    files.cleanup()
    return answers


def prepare(source, name, namespace, whole, folder):
    """Run a cell that is not a check: all statements of an answer, the definitions of others.

    An answer that is a whole file is written into `folder`.
    """
    lines = source.splitlines(keepends=True)
    linecache.cache[name] = (len(source), None, lines, name)  # checks read the text of functions
    if whole and (program := PROGRAM.match(source)):
        file = Path(folder, f"{program[1]}.py")
        file.write_text(program[2], encoding="utf-8", errors="backslashreplace")
        namespace[program[1]] = file
        return
    try:
        statements = ast.parse(source).body
    except (MemoryError, RecursionError, SyntaxError, ValueError):
        statements = []  # a shell command, or an answer that the check will find missing
    with undone() if whole else contextlib.nullcontext():
        for statement in statements:
            if whole or isinstance(statement, DEFINITIONS):
                module = ast.Module([statement], [])
                # An answer may end everything, as exit() does: that costs this answer only.
                with contextlib.redirect_stdout(Printed()), contextlib.suppress(BaseException):
                    with endless_loops_ended(COMPUTING):
                        exec(compile(module, name, "exec"), namespace)


@contextlib.contextmanager
def undone():
    """A context for an answer, which may change what the checks of all answers share: undone at its end."""
    folder, depth, alarm = os.getcwd(), sys.getrecursionlimit(), getattr(signal, "alarm", abs)
    before = [(vars(module), {**vars(module)}) for module in (builtins, json, os, re, signal, sys)]
    try:
        yield
    finally:
        for now, then in before:
            now.update(then)
        alarm(0)  # Windows has none
        sys.setrecursionlimit(depth)
        os.chdir(folder)


class Printed(io.StringIO):
    """What a cell prints, but for what is beyond MOST_LETTERS: it may print without end."""

    def write(self, text):
        super().write(text[: MOST_LETTERS - self.tell()])
        return len(text)


def run_check(source, namespace):
    """The output of the check, or the exception that stopped it."""
    printed = Printed()
    try:
        with contextlib.redirect_stdout(printed), endless_loops_ended(COMPUTING), undone():
            exec(compile(source, "<check>", "exec"), namespace)
    except BaseException as error:
        return f"Not yet: {type(error).__name__}: {error}"
    return printed.getvalue().strip()


if __name__ == "__main__":
    sys.exit(main())
