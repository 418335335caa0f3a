# SPDX-License-Identifier: Apache-2.0
"""The reader's own file: small/pipeline.py with the functions that the reader has written."""

import ast
import json
import os
import re
from pathlib import Path

from course.building.cells import module_of, name_of, text_of
from course.launch import ROOT
from course.source import read_source

MODEL = ROOT / "source_code" / "small" / "pipeline.py"
GIVEN = "course.building.single_messages"
GIVEN_TEXT = read_source(Path(__file__).with_name("single_messages.py"))
FILE = ROOT / "build" / "my_pipeline.py"
PARTS = FILE.with_suffix("")  # a folder with one JSON file for each exercise
EXERCISES = ["naive_step", "gpipe_step", "one_f_one_b_step", "interleaved_step"]
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_accepted = {}  # text of a function -> the request whose check accepted it


def accept(request):
    """Remember a right answer, so that `keep` can put it into the reader's file."""
    _accepted[request["sources"][-1][1]] = request


def keep(function):
    """Write build/my_pipeline.py with `function` in it, if its check has accepted the function.

    For exercises that are not solved yet, the file has the course's solution.
    """
    request = _accepted.get(text_of(name_of(function), function, module_of(function)))
    if request:
        PARTS.mkdir(parents=True, exist_ok=True)
        _write(PARTS / f"{_place_of(request)}.json", json.dumps(request))
    parts = {name: PARTS / f"{name}.json" for name in EXERCISES}
    yours = {}
    for name, path in parts.items():
        try:
            if path.exists():
                yours[name] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            print(f"{path} cannot be read; run the check of {name} again")
    FILE.parent.mkdir(exist_ok=True)
    _write(FILE, assemble(yours.values()))
    for name in EXERCISES:
        whose = "yours" if name in yours else "the course's"
        print(f"build/my_pipeline.py: {name:16} is {whose}")
        if name in yours and "" in dict(yours[name]["sources"]):  # see `default_dtype`
            print(f"  without your torch.set_default_dtype: name the type within {name}")


def assemble(requests):
    """The text of small/pipeline.py with the functions of `requests` in place of the course's.

    All else that an exercise brings along gets the exercise's name in front of its own: helpers of
    two lessons may have one name.
    """
    text = read_source(MODEL)
    if requests:  # as on the ranks of a check, a hint may name what the file does not have
        text = text.replace("\n\nimport ", "\n\nfrom __future__ import annotations\n\nimport ", 1)
    for request in requests:
        exercise = _place_of(request)
        lines = [line for line in request["imports"] if line not in text.splitlines()]
        given = [_bound_name(line) for line in lines if line.startswith(f"from {GIVEN} ")]
        sources = [(name, _text_of_given(name)) for name in given]
        sources += [(name, text) for name, text in request["sources"] if name]
        lines = [line for line in lines if not line.startswith(f"from {GIVEN} ")]
        brought = [name for name, _ in sources] + list(map(_bound_name, lines))
        own = {name: f"{exercise}_{name}" for name in brought}
        own[_name_of(request)] = exercise
        for line in lines:
            text = text.replace("\nLAYERS", f"\n{_renamed(line, own)}\nLAYERS", 1)
        functions = [_renamed(function, own).rstrip() for _, function in sources]
        text = _replace(text, exercise, "\n\n\n".join(functions))
    return text


def _name_of(request):
    """The name of the reader's function, which comes after all that it uses."""
    return request["sources"][-1][0]


def _place_of(request):
    """The step of the file that a reader's function replaces."""
    return request.get("replaces", _name_of(request))


def _text_of_given(name):
    """The text of a function that lessons 03, 05 and 09 give; the reader's file has no course."""
    [node] = [n for n in ast.parse(GIVEN_TEXT).body if getattr(n, "name", "") == name]
    return ast.get_source_segment(GIVEN_TEXT, node)


def _bound_name(line):
    """The name that an import line, or a line such as `rate = 2`, defines."""
    [node] = ast.parse(line).body
    return node.targets[0].id if isinstance(node, ast.Assign) else node.names[0].asname


def _renamed(text, names):
    """`text` with other names for what `names` has; attributes, strings and local names stay."""
    lines = [line.encode() for line in text.splitlines()]  # offsets count bytes
    for number, start, name in sorted(_places_of(ast.parse(text), set(names), lines), reverse=True):
        line = lines[number - 1]
        lines[number - 1] = line[:start] + names[name].encode() + line[start + len(name.encode()) :]
    return "\n".join(line.decode() for line in lines)


def _places_of(node, names, lines):
    """(line, offset, name) of each of `names` below `node`, where it is a name of the module."""
    inner = node.body if isinstance(node, SCOPES) else []
    inner = inner if isinstance(inner, list) else [inner]  # that of a lambda
    if isinstance(node, ast.Name) and node.id in names:
        yield node.lineno, node.col_offset, node.id
    elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Global)):
        line = lines[node.lineno - 1]
        for name in names & {getattr(node, "name", None), *getattr(node, "names", ())}:
            at = re.search(rb"(?<![\w])" + name.encode() + rb"(?![\w])", line[node.col_offset :])
            yield node.lineno, node.col_offset + at.start(), name
    elif isinstance(node, ast.alias) and node.asname in names:
        yield node.end_lineno, node.end_col_offset - len(node.asname.encode()), node.asname
    for child in ast.iter_child_nodes(node):
        if child not in inner:
            yield from _places_of(child, names, lines)
    local = _local_names(node, inner) if inner else set()
    for child in inner:
        is_method = isinstance(node, ast.ClassDef) and isinstance(child, SCOPES)
        yield from _places_of(child, names if is_method else names - local, lines)


def _local_names(scope, body):
    """The names that belong to a function or a class itself."""
    arguments = ast.walk(scope.args) if hasattr(scope, "args") else ()
    local = {each.arg for each in arguments if isinstance(each, ast.arg)}
    nodes = list(_within(body))
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            local.add(node.id)
        elif isinstance(node, SCOPES):
            local.add(getattr(node, "name", None))
    for node in nodes:
        local -= set(node.names) if isinstance(node, ast.Global) else set()
    return local


def _within(nodes):
    """All nodes below `nodes`, but none inside of inner functions and classes."""
    for node in nodes:
        yield node
        if not isinstance(node, SCOPES):
            yield from _within(ast.iter_child_nodes(node))


def _replace(text, name, function):
    """`text` with `function` as the definition of `name`."""
    lines = text.splitlines()
    [node] = [n for n in ast.parse(text).body if getattr(n, "name", "") == name]
    return "\n".join(lines[: node.lineno - 1] + [function] + lines[node.end_lineno :]) + "\n"


def _write(path, text):
    """Write the file in one atomic step, so that no process reads half of it."""
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
