"""The reader's own file: my_pipeline.py with the functions that the reader has written."""

import ast
import inspect
import json
import os
import textwrap
from pathlib import Path

from course.launch import ROOT

MODEL = Path(__file__).with_name("my_pipeline.py")
FILE = ROOT / "build" / "my_pipeline.py"
PARTS = FILE.with_suffix("")  # a folder with one JSON file for each exercise
EXERCISES = ["naive_step", "gpipe_step", "one_f_one_b_step", "interleaved_step"]
_accepted = {}  # text of a function -> the request whose check accepted it


def accept(request):
    """Remember a right answer, so that `keep` can put it into the reader's file."""
    _accepted[request["sources"][0][1]] = request


def keep(function):
    """Write build/my_pipeline.py with `function` in it, if its check has accepted the function.

    For exercises that are not solved yet, the file has the course's solution.
    """
    request = _accepted.get(textwrap.dedent(inspect.getsource(function)))
    if request:
        PARTS.mkdir(parents=True, exist_ok=True)
        _write(PARTS / f"{function.__name__}.json", json.dumps(request))
    parts = {name: PARTS / f"{name}.json" for name in EXERCISES}
    yours = {name: json.loads(path.read_text()) for name, path in parts.items() if path.exists()}
    FILE.parent.mkdir(exist_ok=True)
    _write(FILE, assemble(yours.values()))
    for name in EXERCISES:
        whose = "yours" if name in yours else "the course's"
        print(f"build/my_pipeline.py: {name:16} is {whose}")


def assemble(requests):
    """The text of my_pipeline.py with the functions of `requests` in place of the course's."""
    text = MODEL.read_text()
    for request in requests:
        for name, function in reversed(request["sources"]):
            text = _replace(text, name, function, before=request["function"])
        for line in request["imports"]:
            if line not in text.splitlines():
                text = text.replace("\nLAYERS", f"\n{line}\nLAYERS", 1)
    return text


def _replace(text, name, function, before):
    """`text` with `function` as the definition of `name`; a new name is inserted above `before`."""
    lines = text.splitlines()
    places = {
        n.name: n for n in ast.parse(text).body if isinstance(n, (ast.FunctionDef, ast.ClassDef))
    }
    node = places.get(name, places[before])
    end = node.end_lineno if name in places else node.lineno - 1
    new = function.rstrip().splitlines() + ([] if name in places else ["", ""])
    return "\n".join(lines[: node.lineno - 1] + new + lines[end:]) + "\n"


def _write(path, text):
    """Write the file in one atomic step, so that no process reads half of it."""
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(text)
    part.replace(path)
