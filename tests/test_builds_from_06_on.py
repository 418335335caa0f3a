"""What a reader builds in lessons 06, 07, 08 and 10 runs on real ranks and is answered by name.

Right answers are those of the solutions' notebooks; wrong ones are these with one thing changed.
"""

import ast
import importlib.util
import itertools
import json
import multiprocessing
import sys

import pytest
import torch
from mutated import mutated

from course.checks import lesson_06
from course.checks.answer import NOT_ATTEMPTED
from course.launch import ROOT, warm_up

pytestmark = pytest.mark.processes
warm_up("torch._dynamo")
numbers = itertools.count()


def solution(notebook, *names):
    """The functions of these names in a solutions notebook, as one text."""
    cells = json.loads((ROOT / f"notebooks/solutions/{notebook}.ipynb").read_text())["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    found = [
        ast.get_source_segment(text, node)
        for text in texts
        if not text.startswith("%%")
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    assert len(found) == len(names), names
    return "\n\n\n".join(found)


SOLUTIONS = {
    "recomputing_backward": solution("06_activation_checkpointing", "backward"),
}
NAMES = {"recomputing_backward": ["backward"]}
CHECKS = {"recomputing_backward": lesson_06.recomputing_backward}


def written(tmp_path, text, names):
    """The functions `names` of a file with `text`, as a reader's cell defines them."""
    path = tmp_path / f"cell_{next(numbers)}.py"
    path.write_text("import torch\n\n\n" + text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return [getattr(module, name) for name in names]


def answer_to(tmp_path, capsys, exercise, *edits):
    text = SOLUTIONS[exercise]
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    CHECKS[exercise](*written(tmp_path, text, NAMES[exercise]))
    assert multiprocessing.active_children() == []
    return capsys.readouterr().out.strip()


@pytest.mark.parametrize("exercise", SOLUTIONS)
def test_a_solution_is_right(exercise, tmp_path, capsys):
    assert answer_to(tmp_path, capsys, exercise).startswith("Right: ")


@pytest.mark.parametrize("exercise", SOLUTIONS)
def test_nonsense_gets_a_sentence_and_a_stub_is_not_attempted(exercise, tmp_path, capsys):
    count = len(NAMES[exercise])
    for nonsense in ("0F0", 3, lambda: 1, print, int):
        CHECKS[exercise](*[nonsense] * count)
        assert capsys.readouterr().out.startswith("Not yet: this exercise asks for a function")
    stubs = "\n\n\n".join(f"def {name}(*all):\n    ..." for name in NAMES[exercise])
    CHECKS[exercise](*written(tmp_path, stubs, NAMES[exercise]))
    assert capsys.readouterr().out.strip() == NOT_ATTEMPTED


WRONG = {
    "recomputing_backward": [
        ([("    if x.is_floating_point():\n        x.requires_grad_()\n", "")],
         "rank 1, backward of micro-batch 0: it returns no gradient of its input"),
        ([("backward(gradient)", "backward()")], "raised RuntimeError: grad can be implicitly"),
        ([("held.pop(k)", "held[k]")], "its input is still in held afterwards; pop it"),
        ([("    return x.grad", "    stage(k, x)\n    return x.grad")], "run again more than once"),
        ([("    x = held.pop(k)\n", "    everything = [stage(j, x) for j, x in held.items() if torch.is_grad_enabled()]\n"
           "    x = held.pop(k)\n")], "of insides are there at once"),
        ([("backward(gradient)", "backward(gradient, retain_graph=True)"),
          ("    return x.grad", "    stage.kept = output\n    return x.grad")],
         "bytes of a graph are still there"),
        ([("held.pop(k)", "held.pop(min(held))")],
         "micro-batch 2: the second forward ran on the input of micro-batch 0"),
        ([("output = stage(k, x)", "output = 2 * stage(k, x)")], "is 2 times the right one"),
        ([("    output = stage(k, x)\n", "    with torch.no_grad():\n        output = stage(k, x)\n")],
         "line 7 of backward (`output.backward(gradient)`) raised RuntimeError: element 0"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("exercise", "edits", "sentence"),
    [(name, *case) for name, cases in WRONG.items() for case in cases],
    ids=[f"{name}-{number}" for name, cases in WRONG.items() for number in range(len(cases))],
)
def test_a_typical_wrong_program_gets_its_own_sentence(exercise, edits, sentence, tmp_path, capsys):
    said = answer_to(tmp_path, capsys, exercise, *edits)
    assert said.startswith("Not yet: ") and sentence in said


@pytest.mark.parametrize("seeds", [range(5), pytest.param(range(5, 45), marks=pytest.mark.soak)])
@pytest.mark.parametrize("exercise", SOLUTIONS)
def test_no_mutation_hangs_and_none_is_accepted_that_is_wrong(exercise, seeds, tmp_path, capsys):
    for seed in seeds:
        text = mutated(SOLUTIONS[exercise], f"{exercise} {seed}")
        functions = written(tmp_path, text, NAMES[exercise])
        CHECKS[exercise](*functions)
        said = capsys.readouterr().out.strip().splitlines()[-1]
        assert said.startswith(("Right: ", "Not yet: ")), said
        assert "took longer than" not in said, f"{said}\n{text}"
        if said.startswith("Right: "):
            assert ORACLES[exercise](*functions), text


def recomputes_as_autograd_keeps(backward):
    """Whether `backward` has the gradients of a plain backward, on a stage of its own."""
    layer = torch.nn.Linear(3, 3, dtype=torch.float64)
    x, gradient = torch.randn(2, 4, 3, dtype=torch.float64)
    kept = x.clone().requires_grad_()
    (layer(kept) ** 3).backward(gradient)
    wanted, layer.weight.grad = layer.weight.grad, None
    found = backward(lambda k, x: layer(x) ** 3, 5, gradient, {5: x})
    return torch.equal(found, kept.grad) and torch.equal(layer.weight.grad, wanted)


ORACLES = {"recomputing_backward": recomputes_as_autograd_keeps}
