"""A right function is right however it is written: seeded rewrites of what the checks call."""

import ast
import importlib
import importlib.util
import itertools
import json
import sys
from pathlib import Path

import pytest
from further import seeds_up_to
from rewritten import rewritten

pytestmark = pytest.mark.processes

SOLUTIONS = sorted((Path(__file__).parents[1] / "notebooks" / "solutions").glob("*.ipynb"))
DEFINITIONS = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef
numbers = itertools.count()


def checked_functions():
    """{(module of the checks, check): (names of the functions, their cell, what stands before it)}."""
    found = {}
    for path in SOLUTIONS:
        before, module, answer = [], None, None
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            text = "".join(cell["source"])
            if cell["cell_type"] != "code" or text.startswith("%"):
                continue
            body = ast.parse(text).body
            for node in body:
                if isinstance(node, ast.ImportFrom) and node.module == "course.checks":
                    module = node.names[0].name
            definitions = [node for node in body if isinstance(node, DEFINITIONS)]
            defined = {getattr(node, "name", None) for node in definitions} - {None}
            if defined:
                before += [answer] if answer else []
                answer, own = "\n".join(map(ast.unparse, definitions)), defined
            else:
                before += map(ast.unparse, definitions)
            call = getattr(body[-1], "value", None) if body else None
            if ast.unparse(body[-1]).startswith("check.") and isinstance(call, ast.Call):
                names = [ast.unparse(argument) for argument in call.args]
                if (
                    answer
                    and call.func.attr != "perform"
                    and {name for name in names if not name.isdigit()} <= own
                ):
                    found[(module, call.func.attr, *names)] = answer, "\n".join(before)
    return found


FUNCTIONS = checked_functions()


def asked(tmp_path, key, text):
    """Give the functions of `text` to their check, and return them."""
    module, check, *names = key
    path = tmp_path / f"answer_{next(numbers)}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    answers = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(answers)
    arguments = [int(name) if name.isdigit() else getattr(answers, name) for name in names]
    getattr(importlib.import_module(f"course.checks.{module}"), check)(*arguments)
    return [argument for argument in arguments if callable(argument)]


def test_every_lesson_with_a_function_to_write_is_tried():
    assert len({module for module, *_ in FUNCTIONS}) >= 19 and len(FUNCTIONS) >= 25


@pytest.mark.parametrize("seeds", seeds_up_to(2))
@pytest.mark.parametrize("key", FUNCTIONS, ids=[f"{m}-{names[0]}" for m, _, *names in FUNCTIONS])
def test_no_rewrite_of_a_function_is_rejected(key, seeds, tmp_path, capsys):
    answer, before = FUNCTIONS[key]
    for seed in seeds:
        text = f"{before}\n{rewritten(answer, f'{key} {seed}')}"
        asked(tmp_path, key, text)
        said = capsys.readouterr().out.strip()
        assert "Right: " in said, f"seed {seed}: {said}\n{text}"
