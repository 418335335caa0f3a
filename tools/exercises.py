"""The exercises of the course in order, found in the notebooks by the calls of their checks."""

import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "source_code"))
# nbformat's jsonschema would build 38 grammars with it, which takes 1.5 s and no notebook needs.
sys.modules.setdefault("rfc3987_syntax", None)

import nbformat  # noqa: E402

from files.inputs import MEBIBYTE, InputError, printable, read_text  # noqa: E402

NOTEBOOKS = ROOT / "notebooks"
MOST_BYTES = 64 * MEBIBYTE  # of a notebook; the course's largest has one
CALL = r"^(?:check|build)\.(\w+)\((?:(\d+), )?[\w, ]*\)$"  # a.b is not the reader's: it is shown
TITLE = r"\*\*\d+\. (.+?)\*\*"  # of an exercise
# What nbformat raises for other content than a notebook's.
OTHER_CONTENT = (
    AssertionError, AttributeError, KeyError, NameError, RecursionError, TypeError, ValueError
)  # fmt: skip
NOT_EXERCISES = ("perform", "broken_piece")  # calls that show something once the answer is right


class Exercise(NamedTuple):
    """`name` is that of the check, with its number if it has one, as in "puzzle 5"."""

    lesson: str  # as in "02"
    name: str
    call: str  # the line that asks the check
    title: str  # that of the exercise, in the text above


def exercises_of(cells, lesson):
    """[(index of the cell with the check, Exercise)] of a notebook's cells."""
    found, title = [], ""
    for index, cell in enumerate(cells):
        title = (re.findall(TITLE, cell.source) or [title])[-1]
        calls = re.finditer(CALL, cell.source, re.MULTILINE) if cell.cell_type == "code" else ()
        for call in calls:
            if call[1] not in NOT_EXERCISES:
                name = f"{call[1]} {call[2] or ''}".strip()
                found.append((index, Exercise(lesson, name, call[0], title)))
    return found


def notebook_of(path):
    """The notebook in a file. Raises InputError for a file that is not one, or a pipe."""
    text = read_text(path, MOST_BYTES)
    try:
        notebook = nbformat.reads(text, as_version=4)
        whole = isinstance(notebook.cells, list) and all(map(is_cell, notebook.cells))
    # Not JSON, such as an empty file or one with a merge conflict; or JSON of something else.
    except (nbformat.ValidationError, *OTHER_CONTENT):
        whole = False
    if not whole:
        raise InputError(f"{path} is not a notebook")
    for cell in notebook.cells:
        cell.setdefault("metadata", nbformat.NotebookNode())  # some programs leave it out
    return notebook


def is_cell(cell):
    """Whether a cell, as JSON has it, is one of a notebook; nbformat lets others pass."""
    about = cell.get("metadata", {}) if isinstance(cell, dict) else None
    if not isinstance(about, dict) or not is_text(cell.get("source")):
        return False
    if not isinstance(about.get("tags", []), list) or not isinstance(
        about.get("jupyter", {}), dict
    ):
        return False
    if cell.get("cell_type") == "code":
        listed = isinstance(cell.get("outputs"), list) and is_counted(cell)
        return listed and all(map(is_output, cell["outputs"]))
    return cell.get("cell_type") in ("markdown", "raw")


def is_output(output):
    """Whether an output of a cell has a text, or texts and drawings by their kinds."""
    data = output.get("data", {}) if isinstance(output, dict) else None
    if not isinstance(data, dict) or not is_counted(output):
        return False
    if not is_text(output.get("text", None if output.get("output_type") == "stream" else "")):
        return False
    texts = [value for kind, value in data.items() if not kind.endswith("json")]
    return all(map(is_text, texts)) and "<svg" in "".join(data.get("image/svg+xml", "<svg"))


def is_counted(part):
    """Whether the number of a run in a cell or an output is one, or is not there."""
    return type(part.get("execution_count")) in (int, type(None))


def is_text(value):
    """Whether this is text as notebooks have it: one string, or a list of lines."""
    lines = value if isinstance(value, list) else [value]
    return all(isinstance(line, str) for line in lines)


def lesson_of(path):
    return path.stem.partition("_")[0]


def read_notebooks(folder=NOTEBOOKS):
    """({path: its Exercises}, [a sentence for each file that is skipped]).

    Of several notebooks with the same exercise, such as a lesson and its copy, the one with the
    shortest name counts: a copy's name has an addition.
    """
    found, skipped, whose = {}, [], {}
    for path in sorted(folder.glob("*.ipynb"), key=lambda path: (len(path.name), path.name)):
        try:
            cells = notebook_of(path).cells
            exercises = [exercise for _, exercise in exercises_of(cells, lesson_of(path))]
            other = next((whose[one.name] for one in exercises if one.name in whose), None)
            if other:
                skipped.append(f"{printable(path.name)} has exercises of {other}, which counts")
                continue
            whose |= {exercise.name: printable(path.name) for exercise in exercises}
            found[path] = exercises
        except InputError as error:
            skipped.append(str(error).replace(str(path), printable(path.name)))
    return dict(sorted(found.items())), sorted(skipped)


def all_exercises(folder=NOTEBOOKS):
    """Every Exercise, lesson by lesson, of the notebooks that can be read."""
    return [exercise for exercises in read_notebooks(folder)[0].values() for exercise in exercises]
