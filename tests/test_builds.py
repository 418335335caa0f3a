"""What a reader builds is run on real ranks, answered in a sentence, and never hangs.

Right answers are the solutions of the lessons; wrong ones are these with one thing changed.
"""

import ast
import importlib.util
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from further import SEEDS, first_of
from mutated import mutated
from ranks import run_on_ranks
from readers_answers import RIGHT

from course import launch
from course.building import messages, on_ranks, own_file
from course.checks import build_save, build_stash, library_mistakes, reader_on_ranks
from course.checks import build_steps as build
from course.checks.answer import NOT_ATTEMPTED
from course.checks.build_text import holes, request_of, zero_as_none
from course.failed_run import RunFailed
from course.launch import ROOT, run
from small import pipeline

pytestmark = pytest.mark.processes

MODEL = own_file.MODEL.read_text()
BUILDING = ROOT / "source_code" / "course" / "building"


def cells_of_solution(notebook):
    path = ROOT / "notebooks" / "solutions" / f"{notebook}.ipynb"
    cells = json.loads(path.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


PARTS = [
    *(BUILDING / f"{name}.py" for name in ("single_messages", "zb_h1")),
    *(own_file.MODEL.with_name(f"{name}.py") for name in ("split_backward", "weight_stash")),
]
PARTS = [path.read_text() for path in PARTS]
STEPS_OF_LESSONS = cells_of_solution("05_interleaved")
numbers = itertools.count()

THERE_AND_BACK = """
def there_and_back():
    dist.init_process_group("gloo")
    received = torch.empty(3)
    if dist.get_rank() == 0:
        dist.isend(torch.tensor([1.0, 2.0, 3.0]), 1).wait()
        dist.irecv(received, 1).wait()
    else:
        dist.irecv(received, 0).wait()
        dist.isend(2 * received, 0).wait()
    dist.destroy_process_group()
    return received
"""


def definition(name):
    """The text of a function of a solution, or of a file of small/ or course/building/."""
    text = next(text for text in [*STEPS_OF_LESSONS, *PARTS, MODEL] if f"def {name}(" in text)
    body = ast.parse(text).body
    return ast.get_source_segment(text, next(n for n in body if getattr(n, "name", "") == name))


SOLUTIONS = {
    "there_and_back": THERE_AND_BACK,
    "naive_step": definition("naive_step"),
    "gpipe_step": "\n\n".join(map(definition, ["forward", "backward", "gpipe_step"])),
    "one_f_one_b_step": definition("one_f_one_b_step"),
    "interleaved_step": definition("interleaved_step"),
    "zb_h1_step": definition("zb_h1_step"),
    "pipedream_run": definition("pipedream_run"),
}
CHECKS = {name: getattr(build, name, None) or build_stash.pipedream_run for name in SOLUTIONS}


def written(tmp_path, text, name):
    """The function `name` of a file with `text`, as a reader's cell defines it."""
    path = tmp_path / f"cell_{next(numbers)}.py"
    head = "import torch\nimport torch.distributed as dist\n"
    head += "from course.building.single_messages import backward, forward\n"
    head += "from small.pipeline import DIM, loss_of\n"
    head += "from collections import deque\nfrom course.building.zb_h1 import backward_input\n"
    head += "from small.weight_stash import backward_with, first_weights, forward_with\n"
    head += "class Impatient(list):\n    def append(self, send):\n        send.wait()\n\n\n"
    path.write_text(head + text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def answer_to(tmp_path, capsys, name, *edits):
    text = SOLUTIONS[name]
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    CHECKS[name](written(tmp_path, text, name))
    assert multiprocessing.active_children() == []
    return capsys.readouterr().out.strip()


@pytest.mark.parametrize("name", SOLUTIONS)
def test_a_solution_is_right(name, tmp_path, capsys):
    assert answer_to(tmp_path, capsys, name).startswith("Right: ")


@pytest.mark.parametrize(
    "case", [case for case in RIGHT if case.startswith(("a partial", "an object"))]
)
def test_a_partial_or_an_object_is_right_if_it_has_a_name(case, tmp_path, capsys):
    name, cells = RIGHT[case]
    step = written(tmp_path, "\n\n".join(cells), name)
    CHECKS[name](step)
    assert capsys.readouterr().out.startswith("Right: ")
    for nameless in (lambda *given: step(*given), partial(step)):
        CHECKS[name](nameless)
        assert "a cell defines by name" in capsys.readouterr().out


def test_a_hint_of_what_no_rank_has_changes_nothing(tmp_path, capsys):
    hint = "def naive_step(stage: Nowhere, tokens, targets) -> Loss:"
    text = SOLUTIONS["naive_step"].replace("def naive_step(stage, tokens, targets):", hint)
    whole = f"from __future__ import annotations\n{PARTS[0]}\n\n{text}"
    path = tmp_path / "hinted.py"
    path.write_text(whole)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    build.naive_step(module.naive_step)
    assert capsys.readouterr().out.startswith("Right: ")
    own = own_file.assemble([request_of(module.naive_step)])
    assert hint in own and len(losses_of(tmp_path, own, "naive", 2)) == 4


@pytest.mark.parametrize("name", SOLUTIONS)
def test_nonsense_gets_a_sentence_and_a_stub_is_not_attempted(name, tmp_path, capsys):
    check = CHECKS[name]
    for nonsense in ("0F0", 3, lambda: 1, print, int):
        check(nonsense)
        assert capsys.readouterr().out.startswith("Not yet: this exercise asks for a function")
    places = "    ...\n" * 3
    check(written(tmp_path, f"def {name}(stage, tokens, targets):\n{places}", name))
    assert capsys.readouterr().out.strip() == NOT_ATTEMPTED


def test_a_place_that_is_still_open_is_named_by_its_line(tmp_path, capsys):
    half = ("dist.isend(2 * received, 0).wait()", "...")
    said = answer_to(tmp_path, capsys, "there_and_back", half)
    assert said == "Not yet: line 9 of there_and_back still has its ..."
    text = "dist.isend(inputs.grad, rank - 1).wait()"
    said = answer_to(tmp_path, capsys, "naive_step", (text, "..."))
    assert said == "Not yet: line 19 of naive_step still has its ..."


WRONG = {
    "there_and_back": [
        (
            [("dist.irecv(received, 0).wait()\n", "dist.isend(2 * received, 0).wait()\n"),
             ("        dist.isend(2 * received, 0).wait()\n    dist.destroy",
              "        dist.irecv(received, 0).wait()\n    dist.destroy")],
            "deadlock: rank 0 waits at line 5 of there_and_back",
        ),
        ([("dist.irecv(received, 1).wait()", "dist.irecv(received, 1)")], "before wait() returns"),
        ([("isend(2 * received", "isend(received.mul_(2)")], "it should be [1.0, 2.0, 3.0]: that has arrived"),
        ([("2 * received", "received")], "rank 0 returns [1.0, 2.0, 3.0]"),
        (
            [("2 * received", "received"), ("received, 1).wait()", "received, 1).wait()\n        received *= 2")],
            "rank 0 receives [1.0, 2.0, 3.0], and the other should send [2.0, 4.0, 6.0]",
        ),
        (
            [("        dist.irecv(received, 0).wait()", "        got = dist.irecv(received, 0).wait()"),
             ("2 * received", "2 * got")],
            "irecv() and wait() do not return the tensor",
        ),
        ([("3.0]), 1)", "3.0]), 0)")], "rank 0 is this rank itself"),
        ([('    dist.init_process_group("gloo")\n', "")], "belongs to no group at line 3"),
        ([("    dist.destroy_process_group()\n", "")], "at the end each rank leaves"),
        ([("torch.empty(3)", "torch.empty(4)")], "rank 1 has made room for (4,) in float32"),
        (
            [("    dist.init", "    if torch.distributed.is_torchelastic_launched() or 'RANK' in "
              "__import__('os').environ and __import__('os').environ['RANK'] == '1':\n"
              "        return None\n    dist.init")],
            "rank 1 has returned without joining",
        ),
    ],
    "naive_step": [
        ([("        inputs.requires_grad_()\n", "")], "call requires_grad_() on what arrived"),
        ([("stage(inputs)", "stage(tokens)")], "does the stage get what has arrived"),
        ([("loss_of(output, targets)", "loss_of(targets, output)")], "loss_of(scores, targets)"),
        ([("inputs.grad", "output.grad")], "a computed one, such as a stage's output, has none"),
        (
            [("        dist.irecv(gradient, rank + 1).wait()\n", "")],
            "what rank 0 never receives, and rank 0 has already returned: a receive is missing",
        ),
        (
            [("        dist.isend(output.detach(), rank + 1).wait()\n        gradient",
              "        gradient"),
             ("        dist.irecv(gradient, rank + 1).wait()\n",
              "        dist.irecv(gradient, rank + 1).wait()\n"
              "        dist.isend(output.detach(), rank + 1).wait()\n")],
            "deadlock: rank 0 waits at line 15 of naive_step",
        ),
        (
            [("output.backward(gradient)", "output.backward(2 * gradient)")],
            "the gradient on rank 2 is 2 times that of one process: a backward begins at the loss",
        ),
        ([("dist.isend(inputs.grad, rank - 1).wait()", "pass")], "a send is missing there"),
        (
            [("        output.backward(gradient)\n", "        __import__('os')._exit(3)\n")],
            "the ranks did not finish: rank 2 ended with exit status 3",
        ),
        ([("loss.item()", "loss")], "still has its whole graph behind it: detach() it"),
        (
            [("dtype=torch.float64, device", "device"), ("output.detach()", "output.detach().float()"),
             ("inputs.requires_grad_()", "inputs = inputs.double().requires_grad_()")],
            "on numbers with too few digits: were they rounded to float32 on their way?",
        ),
        (
            [("dist.isend(inputs.grad, rank - 1)", "dist.isend(inputs.detach(), rank - 1)")],
            "and that on rank 3 is right: look at what rank 3 sends back",
        ),
        ([("        output.backward(gradient)\n", "")], "has a .grad after the backward"),
        ([("output.detach()", "output.detach_()")], "an output that detach_() has cut itself"),
        (
            [("torch.empty(*tokens.shape, DIM", "torch.empty(dist.get_world_size(), 8, DIM")],
            "on 3 ranks: rank 0 sends (4, 8, 16) in float64",
        ),
        (
            [("last = dist.get_rank(), dist.get_world_size() - 1",
              "last = dist.get_rank(), 3 if dist.get_world_size() == 4 else 1")],
            "on 3 ranks: line ",
        ),
    ],
    "gpipe_step": [
        ([(" / len(inputs)", "")], "5 times too large: each micro-batch counts as a whole batch"),
        ([(" / len(inputs)", " / len(inputs) ** 2")], "it is divided by 5 twice"),
        ([("targets[k]", "targets")], "inputs[k] is that of micro-batch k"),
        ([("targets[k]", "targets[0]")], "than that of one process; this rank has the loss: of which scores and which targets is it?"),
        ([("sum(shares) if", "torch.tensor(sum(shares)).item() if")], "was it rounded to float32 on its way?"),
        (
            [("    if stage.previous is not None:\n        activation =",
              "    if stage.previous:\n        activation =")],
            "Rank 0 counts as false, as None does, for `previous` in line 4 of forward",
        ),
        (
            [("range(len(inputs)):\n        backward", "range(1, len(inputs)):\n        backward")],
            "the gradient of micro-batch 0 is missing on rank 3",
        ),
        (
            [("    output.backward(gradient)", "    output.backward(gradient, retain_graph=k == 1)\n"
              "    if k == 1:\n        output.backward(gradient)")],
            "the gradient of micro-batch 1 is counted twice on rank 3",
        ),
        (
            [("for k in range(len(inputs)):\n        backward",
              "for k in [1, 0, *range(2, len(inputs))]:\n        backward")],
            "rank 0 takes 0B1 as its action 5 at line 8 of backward",
        ),
        (
            [("    for send in sends:\n        send.wait()\n", "")],
            "never waits for what it sends at line 13 of forward",
        ),
        ([("for send in sends:", "for send in 2 * sends:")], "a second wait() for the same message"),
        (
            [("activation, share = inputs[k], None", "activation, share = inputs, None")],
            "inputs[k] is that of micro-batch k",
        ),
        (
            [("activation, share = inputs[k], None", "activation, share = inputs[0], None")],
            "rank 0 uses the tokens of micro-batch 0 in two forwards",
        ),
        (
            [("dist.irecv(activation, stage.previous).wait()",
              "dist.isend(activation, stage.previous).wait()")],
            "deadlock: rank",
        ),
        (
            [("output.backward(gradient)", "output.backward()")],
            "scalar outputs; a stage before the last gives backward() the gradient",
        ),
        (
            [("held[k] = activation", "held[0] = activation"), ("held.pop(k)", "held[0]")],
            "a second time; is the output of each micro-batch kept under its own number?",
        ),
        (
            [("return sum(shares) if stage.following is None else None", "return sum(shares)")],
            "forward returns a share of the loss on the last stage, and None elsewhere",
        ),
        ([("torch.empty(*inputs[k].shape, DIM", "torch.empty(2, 8, DIM")], "rank 0 sends (3, 8, 16)"),
        (
            [(" / len(inputs)", " / (5 if len(inputs) == 5 else 2)")],
            "on 3 ranks: with 8 micro-batches every gradient on rank 2 is 4 times the right one",
        ),
    ],
    "one_f_one_b_step": [
        (
            [("min(len(inputs), dist.get_world_size() - 1 - dist.get_rank())",
              "dist.get_world_size() - 1 - dist.get_rank()")],
            "this step has 2 micro-batches, counted from 0",
        ),
        ([(" - 1 - dist.get_rank())", " - 2 - dist.get_rank())")], "did a forward on this rank store an entry under 0"),
        (
            [("min(len(inputs), dist.get_world_size() - 1 - dist.get_rank())",
              "min(len(inputs), dist.get_rank())")],
            "deadlock: rank 0 waits at line 9 of one_f_one_b_step",
        ),
        ([("- warm_up, len(inputs)):", "- warm_up, len(inputs) - 1):")], "it never took 2B5"),
        (
            [(" - 1 - dist.get_rank())", " - dist.get_rank())")],
            "rank 0 takes 0F4 as its action 4",
        ),
        (
            [("held, sends, shares = {}, [], []", "held, sends, shares = {}, Impatient(), []")],
            "deadlock: rank",
        ),
        (
            [("return sum(shares)", "return 2 * sum(shares)")],
            "2 times that of the batch",
        ),
        (
            [("    warm_up =", "    inputs = inputs[: len(inputs) // 2 * 2]\n    warm_up =")],
            "on 3 ranks: the gradient of micro-batch 6 is missing on rank 2",
        ),
        (
            [("get_world_size() - 1", "get_world_size() // 2 * 2 - 1")],
            "on 3 ranks: line 9 of one_f_one_b_step",
        ),
    ],
    "interleaved_step": [
        ([("(v - 1) * p + 2", "(v - 1) * p + 1")], "rank 0 takes 4B0 as its action 8"),
        ([("(passage, p * v)", "(passage, v * m)"), ("within // p, group * p + within % p", "divmod(within, m)")],
         "F4 where the schedule has "),
        ([("(v - 1) * p + 2 *", "(v - 1) * p - 1 + 2 *")], "raised KeyError: 0; the schedule has 7F0 there"),
        (
            [("backward(stages[v - 1 - c], k, held[v - 1 - c], sends)",
              "backward(stages[c], k, held[c], sends)")],
            "; the schedule has 7B0 next on rank 3, which needs no message",
        ),
        ([("- warm_up, v * m):", "- warm_up, v * m - 1):")], "it never took"),
        (
            [("backward(stages[v - 1 - c], k, held[v - 1 - c], sends)",
              "if (c, k) != (0, 2) or dist.get_rank():\n"
              "            backward(stages[v - 1 - c], k, held[v - 1 - c], sends)")],
            "rank 0 took 4F5 where the schedule has 4B2",
        ),
        (
            [("return sum(filter(None, shares))", "return sum(filter(None, shares)) / 2")],
            "0.5 times that of the batch",
        ),
        (
            [(" if stages[-1].following is None else None", "")],
            "rank 0 returns 0 as a loss, which only rank 3 has: return None elsewhere",
        ),
        ([("len(stages), len(inputs)", "2, len(inputs)")], "on 2 ranks with 3 chunks each: "),
        (
            [("p, v, m = dist.get_world_size()", "p, v, m = 4")],
            "on numbers that no micro-batch has there; rank 0 took 0F2 where the schedule has 2F0",
        ),
        (
            [("    p, v, m = dist.get_world_size(), len(stages), len(inputs)",
              "    p, m = dist.get_world_size(), len(inputs)\n    v = 2 if p == 4 else 3")],
            "on 3 ranks with 2 chunks each: line ",
        ),
        (
            [("len(stages), len(inputs)", "len(stages), len(inputs) // 4 * 4")],
            "on 3 ranks with 2 chunks each: line 16 of interleaved_step",
        ),
    ],
    "zb_h1_step": [
        ([("if len(later) > rank:", "if later:")], "rank 1 takes 1W0 as its action 4"),
        (
            [("    while later:\n        later.popleft()()\n", "")],
            "the gradient of micro-batch 3 is missing on rank 3",
        ),
        (
            [("rank:\n            later.popleft()()", "rank:\n            later.popleft()"),
             ("sends))\n        later.popleft()()", "sends))\n        later.popleft()"),
             ("while later:\n        later.popleft()()", "while later:\n        later.popleft()")],
            "an I ran on rank 3, but no W: call what backward_input returned for it",
        ),
        (
            [("        later.append(backward_input(stage, k, held, sends))\n        if len(later) > rank:"
              "\n            later.popleft()()", "        backward(stage, k, held, sends)"),
             ("        later.append(backward_input(stage, k, held, sends))\n        later.popleft()()\n",
              "        backward(stage, k, held, sends)\n")],
            "backward in its place returns nothing to call",
        ),
        ([("dist.get_world_size() - 1 - rank)", "rank)")], "deadlock: rank 0 waits at line 10"),
        (
            [("    while later:\n        later.popleft()()",
              "    while later:\n        later[0]()\n        later.popleft()()")],
            "rank 1 takes 1W5 once more than the schedule",
        ),
        ([("return sum(shares)", "return sum(shares) / 2")], "0.5 times that of the batch"),
        (
            [("    held, sends", "    inputs = inputs[: len(inputs) // 2 * 2]\n    held, sends")],
            "on 3 ranks: the gradient of micro-batch 6 is missing on rank 2",
        ),
        (
            [("len(later) > rank:", "len(later) > min(rank, dist.get_world_size() // 2 * 2 - 1):")],
            "on 3 ranks: the losses agree, but rank 2 takes 2W0 as its action 4",
        ),
    ],
    "pipedream_run": [
        ([("stash.pop(k)", "newest")], "with other weights than its forward had, at line 11"),
        ([("stash.pop(k)", "stash[k]")], "versions in memory, and 1 is in use there"),
        ([("stash[k] =", "stash[k + 1] =")], "did a forward on this rank store an entry under 0"),
        (
            [("def pipedream_run(", f"{definition('backward_with')}\n\n\ndef pipedream_run(")],
            "your cells define backward_with, but the check can follow only",
        ),
        (
            [("        return {\n            name: (weight - rate * gradients[name]).detach()"
              ".requires_grad_()\n            for name, weight in newest.items()\n        }",
              "        for name, weight in newest.items():\n"
              "            weight.data -= rate * gradients[name]\n        return newest")],
            "with weights that have been overwritten since its forward",
        ),
        ([(".detach()", "")], "detach() a new version"),
        (
            [("rate * gradients", "rate / 4 * gradients")],
            "rank 3 runs the forward of mini-batch 1 after an update that is 0.25 times",
        ),
        (
            [("dist.get_world_size() - 1 - dist.get_rank()", "dist.get_rank()")],
            "deadlock: rank 0 waits at line 11 of pipedream_run",
        ),
        ([("- warm_up, len(inputs)):", "- warm_up, len(inputs) - 1):")], "it never took 2B7"),
        ([("return newest, losses", "return losses")], "return newest, losses"),
        (
            [("gradients = backward_with(stash.pop(k),",
              "old = stash.pop(k)\n        gradients = backward_with(old,"),
             ("in newest.items()", "in old.items()")],
            "rank 2 runs the forward of mini-batch 3 with weights that no sequence of updates",
        ),
        (
            [("dist.get_world_size() - 1 - dist.get_rank()", "dist.get_world_size() - dist.get_rank()")],
            "Not yet: rank 0 takes 0F4 as its action 4",
        ),
        (
            [("newest, stage, k, inputs, targets, held))\n",
              "newest, stage, k, inputs, targets, held))\n        stash.pop(k - warm_up - 1, None)\n"),
             ("stash.pop(k)", "stash[k]")],
            "rank 3 runs the forward of mini-batch 1 with 2 versions in memory, and 1 is in use",
        ),
        (
            [("rate * gradients", "0.5 * gradients")],
            "on 2 ranks, 10 mini-batches, a rate of 0.3: rank 1 runs the forward of mini-batch 1 after "
            "an update that is 1.66667 times that of the rule: is it `rate` times the gradient?",
        ),
        (
            [("min(len(inputs), dist.get_world_size() - 1 - dist.get_rank())",
              "dist.get_world_size() - 1 - dist.get_rank()")],
            "on 4 ranks, 2 mini-batches, a rate of 0.5: line ",
        ),
        ([("weight - rate", "weight + rate")], "-1 times that of the rule: is it `rate` times the gradient, and subtracted?"),
        ([(".detach().requires_grad_()", ".detach()")], "call requires_grad_() on a new tensor"),
        (
            [("get_world_size() - 1", "get_world_size() // 2 * 2 - 1")],
            "on 3 ranks, 5 mini-batches, a rate of 0.4: line ",
        ),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "edits", "sentence"),
    [case for name in WRONG for case in first_of([(name, *case) for case in WRONG[name]], 3)],
    ids=[f"{name}-{number}" for name, cases in WRONG.items() for number in range(len(cases))],
)
def test_a_typical_wrong_program_gets_its_own_sentence(name, edits, sentence, tmp_path, capsys):
    said = answer_to(tmp_path, capsys, name, *edits)
    assert said.startswith("Not yet: ") and sentence in said


def test_a_message_of_a_batch_is_a_message_too(tmp_path, capsys):
    edit = (
        "sends.append(dist.isend(output.detach(), stage.following))",
        "message = dist.P2POp(dist.isend, output.detach(), stage.following)\n"
        "        sends.extend(dist.batch_isend_irecv([message]))",
    )
    assert answer_to(tmp_path, capsys, "gpipe_step", edit).startswith("Right: ")


def test_a_batch_may_be_waited_for_in_any_order(tmp_path, capsys):
    cells = cells_of_solution("03_1f1b")
    text = next(cell for cell in cells if "def one_f_one_b_for_nccl(" in cell)
    old = """    for work in dist.batch_isend_irecv(messages) if messages else ():
        work.wait()
"""
    assert text.count(old) == 1
    new = """    works = dist.batch_isend_irecv(messages) if messages else []
    while works:
        works.pop().wait()
"""
    build.one_f_one_b_for_nccl(written(tmp_path, text.replace(old, new), "one_f_one_b_for_nccl"))
    assert capsys.readouterr().out.startswith("Right: ")


COLLECT = "    [activation] = exchange(outbox, inputs[k], [stage.previous])\n"


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [  # over gloo, a message whose handle is gone may never arrive
        ("        outbox.append((output.detach(), stage.following))\n",
         "        dist.isend(output.detach(), stage.following)\n",
         "never waits for what it sends at line"),
        (".requires_grad_()", "", "call requires_grad_() on what arrived"),
        (COLLECT, "    alone = stage.previous is None and len(outbox) < 3\n"
         + COLLECT.replace("exchange(", "[None] if alone else exchange("),
         "when rank 0 takes 0F1, it has not yet sent what 0F0 has made"),
        ("    outbox.clear()\n", "", "where the schedule has 2F1: was the same tensor sent twice?"),
    ],
    ids=["each handle is waited for", "what arrives requires grad", "rank 0 sends in time", "each is sent once"],
)  # fmt: skip
def test_by_the_rules_of_nccl_each_slip_is_named(tmp_path, capsys, old, new, sentence):
    cells = cells_of_solution("03_1f1b")
    text = next(cell for cell in cells if "def one_f_one_b_for_nccl(" in cell)
    assert text.count(old) == 1
    build.one_f_one_b_for_nccl(written(tmp_path, text.replace(old, new), "one_f_one_b_for_nccl"))
    assert sentence in capsys.readouterr().out


def test_a_loop_without_an_end_is_ended_and_named(tmp_path, capsys, monkeypatch):
    edit = ("    for send in sends:\n", "    while True:\n        pass\n    for send in sends:\n")
    said = answer_to(tmp_path, capsys, "one_f_one_b_step", edit)
    assert re.search(
        r"line 1[23] of one_f_one_b_step .* raised TimeoutError: .* does this loop", said
    )


@pytest.mark.soak
def test_where_processes_cannot_be_forked_torchrun_starts_the_ranks(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(launch, "can_fork", lambda: False)
    assert answer_to(tmp_path, capsys, "naive_step").startswith("Right: ")
    edit = ("        dist.irecv(gradient, rank + 1).wait()\n", "")
    assert "a receive is missing" in answer_to(tmp_path, capsys, "naive_step", edit)


def test_a_message_is_reported_before_it_begins_since_gloo_may_end_the_process(monkeypatch):
    order, ours = [], messages.Messages(None)
    monkeypatch.setattr(messages, "tell", lambda event, **_: order.append(event))
    ours.begin = {"receive": lambda *_, **__: order.append("torch begins it")}
    monkeypatch.setattr(ours, "name_of", lambda peer, what: peer)
    ours.start("receive", torch.zeros(1), 1, None, SimpleNamespace(group_name="0"), 0)
    assert order == ["begins", "torch begins it"]


STEPS = {"naive_step": "naive", "gpipe_step": "gpipe", "one_f_one_b_step": "1f1b",
         "interleaved_step": "interleaved"}  # fmt: skip


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("name", SOLUTIONS)
def test_no_mutation_hangs_and_none_is_accepted_that_changes_a_loss(name, seeds, tmp_path, capsys):
    for seed in seeds:
        text = mutated(SOLUTIONS[name], f"{name} {seed}")
        function = written(tmp_path, text, name)
        CHECKS[name](function)
        said = capsys.readouterr().out.strip().splitlines()[-1]
        assert said.startswith(("Right: ", "Not yet: ")), said
        assert "did not finish" not in said, f"{said}\n{text}"
        if said.startswith("Right: ") and name in STEPS:
            own = own_file.assemble([request_of(function)])
            assert losses_of(tmp_path, own, STEPS[name], 4) == losses_of(
                tmp_path, MODEL, "naive"
            ), text


def test_lesson_03_goes_on_with_a_step_that_is_not_mended_for_nccl(tmp_path, capsys):
    step = written(tmp_path, SOLUTIONS["one_f_one_b_step"], "one_f_one_b_step")
    path = ROOT / "build" / f"{tmp_path.name}_{os.getpid()}.py"
    path.parent.mkdir(exist_ok=True)
    lesson = json.loads((ROOT / "notebooks" / "03_1f1b.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in lesson["cells"] if cell["cell_type"] == "code"]
    [cell] = [cell for cell in cells if "rehearse.py strict build/my_pipeline.py" in cell]
    path.write_text(own_file.assemble([request_of(step)]))
    try:
        exec(cell.replace("build/my_pipeline.py", f"build/{path.name}"), {**globals()})
    finally:
        path.unlink()
    assert re.fullmatch(r"not mended yet: rank \d is stuck.*\n", capsys.readouterr().out)


def losses_of(tmp_path, text, name, ranks=None):
    path = ROOT / "build" / f"{tmp_path.name}_{os.getpid()}.py"  # two run in two processes
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    try:
        return run(f"build/{path.name} {name}", ranks=ranks, warm=True, show=False, limit=60).losses
    finally:
        path.unlink()


def test_the_readers_file_needs_no_course_and_has_the_losses_of_one_process(tmp_path):
    path = tmp_path / "my_pipeline.py"
    path.write_text(own_file.assemble([]))
    command = [sys.executable, "-I", str(path), "naive"]
    alone = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    expected = re.findall(r"loss (\S+)", alone.stdout)
    assert len(expected) == 4
    for name in STEPS.values():
        losses = losses_of(tmp_path, path.read_text(), name, 4)
        assert [f"{loss:.6f}" for loss in losses] == expected


def train_alone(rank):
    """In a rank: the reader's program as plain python starts it, where no store may open a port."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    meeting = sys.modules["torch.distributed.rendezvous"]
    with mock.patch.object(meeting, "TCPStore", side_effect=AssertionError):
        pipeline.main(["naive", "--steps", "1"])


def test_one_process_alone_meets_nobody_through_a_port():
    """One that met itself at port 0 did not always find itself, and then waited."""
    assert run_on_ranks(train_alone, 1) == [None]


@pytest.mark.parametrize(
    ("name", "ranks", "sentence"),
    [
        ("interleaved", 3, "interleaved needs 2 to 4 ranks that divide 8, not 3"),
        ("interleaved", None, "interleaved needs 2 to 4 ranks that divide 8, not 1"),
        ("1f2b", None, "invalid choice: '1f2b'"),
    ],
)
def test_the_file_rejects_what_it_cannot_run(name, ranks, sentence, tmp_path):
    with pytest.raises(RunFailed, match=sentence):
        losses_of(tmp_path, MODEL, name, ranks)


def test_what_a_check_has_called_right_is_kept_in_the_readers_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(own_file, "FILE", tmp_path / "my_pipeline.py")
    monkeypatch.setattr(own_file, "PARTS", tmp_path / "my_pipeline")
    mine = "    # written on a rainy day\n    warm_up = min("
    text = SOLUTIONS["one_f_one_b_step"].replace("    warm_up = min(", mine)
    right, wrong = (
        written(tmp_path, text.replace("one_f_one_b_step", "my_step"), "my_step"),
        written(tmp_path, SOLUTIONS["gpipe_step"].replace(" / len(inputs)", ""), "gpipe_step"),
    )
    for check, function in ((build.one_f_one_b_step, right), (build.gpipe_step, wrong)):
        check(function)
        own_file.keep(function)
    said = capsys.readouterr().out
    assert "one_f_one_b_step is yours" in said and "gpipe_step       is the course's" in said
    file = own_file.FILE.read_text()
    assert "# written on a rainy day" in file and "targets[k]) / len(inputs)" in file
    (own_file.PARTS / "one_f_one_b_step.json").write_text("{")  # cut short
    own_file.keep(wrong)
    assert "run the check of one_f_one_b_step again" in capsys.readouterr().out
    assert "# written on a rainy day" not in own_file.FILE.read_text()


@pytest.mark.parametrize("end", ["dist.isend(None, 1)", "dist.barrier()"], ids=["raises", "waits"])
def test_an_error_behind_a_finally_that_fails_or_never_ends_is_told(end, tmp_path, capsys):
    room = "    received = torch.empty(3)\n"
    new = "    try:\n        received = torch.empty(3 if dist.get_rank() else '3')\n"
    new += f"    finally:\n        if dist.get_rank() == 0:\n            {end}\n"
    said = answer_to(tmp_path, capsys, "there_and_back", (room, new))
    assert re.search(r"line 4 of there_and_back .* raised TypeError: empty.*\(on rank 0\)", said)


@pytest.fixture
def float64_by_default():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_the_default_type_that_a_cell_has_set_goes_with_a_step(
    tmp_path, capsys, monkeypatch, float64_by_default
):
    monkeypatch.setattr(own_file, "FILE", tmp_path / "my_pipeline.py")
    monkeypatch.setattr(own_file, "PARTS", tmp_path / "my_pipeline")
    text = SOLUTIONS["naive_step"]
    assert text.count(", dtype=torch.float64") == 1
    step = written(tmp_path, text.replace(", dtype=torch.float64", ""), "naive_step")
    build.naive_step(step)
    assert capsys.readouterr().out.startswith("Right: ")
    own_file.keep(step)
    assert "name the type within naive_step" in capsys.readouterr().out
    assert "set_default_dtype" not in own_file.FILE.read_text()
    torch.set_default_dtype(torch.float32)
    build.naive_step(step)
    assert "rank 1 has made room for (4, 8, 16) in float32" in capsys.readouterr().out


def test_the_default_type_of_a_cell_changes_no_run_that_an_answer_is_compared_with(
    float64_by_default,
):
    with reader_on_ranks.as_on_a_rank():
        assert torch.get_default_dtype() is torch.float32
    assert build_save.undisturbed.__wrapped__()[0] == pytest.approx(5.183731, abs=1e-6)
    assert library_mistakes.losses_of.__wrapped__(steps=1)[0] == pytest.approx(5.183731, abs=1e-6)


def test_an_attribute_that_a_cell_sets_by_setattr_goes_along(tmp_path):
    head = "from types import SimpleNamespace\nsizes = SimpleNamespace()\n"
    head += "setattr(sizes, 'three', 3)\n\n\n"
    edit = ("torch.empty(3)", "torch.empty(sizes.three)")
    step = written(tmp_path, head + SOLUTIONS["there_and_back"].replace(*edit), "there_and_back")
    assert "setattr(sizes, 'three', 3)" in dict(request_of(step)["sources"])["sizes"]


def test_a_local_variable_is_not_taken_for_a_name_of_the_notebook(tmp_path):
    """The cells of lesson 03 import `warm_up` from the course; a step has a variable `warm_up`."""
    head = "from course.launch import run, warm_up\nstage, k = 3, 4\n\n\n"
    function = written(tmp_path, head + SOLUTIONS["one_f_one_b_step"], "one_f_one_b_step")
    assert [line.split()[-1] for line in request_of(function)["imports"]] == ["backward", "forward"]


def test_what_a_step_takes_from_the_notebook_goes_with_it(tmp_path):
    head = "from math import ceil\nrate, wide = 2, torch.float64\n\n\n"
    text = SOLUTIONS["gpipe_step"].replace("dtype=torch.float64", "dtype=wide")
    text = text.replace("stage, k, held", "stage, ceil(k * rate / 2), held")
    text = text.replace(
        "def backward(stage, ceil(k * rate / 2), held", "def backward(stage, k, held"
    )
    imports = request_of(written(tmp_path, head + text, "gpipe_step"))["imports"]
    assert sorted(imports) == ["from math import ceil as ceil", "rate = 2", "wide = torch.float64"]


def test_a_function_imported_from_torch_goes_with_the_step_too(tmp_path):
    text = SOLUTIONS["gpipe_step"].replace("torch.empty(", "space(")
    text = "from torch import empty as space\n\n\n" + text
    imports = request_of(written(tmp_path, text, "gpipe_step"))["imports"]
    assert imports == ["from torch import empty as space"]


def test_the_open_that_jupyter_puts_into_a_notebook_is_pythons(tmp_path):
    from IPython.core.interactiveshell import InteractiveShell

    text = SOLUTIONS["gpipe_step"].replace("held.pop(k)", "held.pop(k) if open else None")
    function = written(tmp_path, text, "gpipe_step")
    function.__globals__["open"] = InteractiveShell().user_ns["open"]
    assert function.__globals__["open"] is not open
    assert request_of(function)["imports"] == []


def test_the_dots_of_an_index_are_not_those_of_a_stub():
    assert holes("def f(x):\n    y = x[..., 0]\n    return y[...]\n") == []
    assert holes("def f(x: tuple[int, ...]):\n    y = x[f(...)]\n    ...\n") == [2, 3]


def test_a_variable_that_names_a_neighbour_is_one_too():
    tuples = "def f(stage):\n    before, after = stage.previous, stage.following\n    if %s:\n        pass"
    assert zero_as_none(tuples % "before") == (3, "before")
    assert zero_as_none(tuples % "(there := stage.following)") == (3, "following")
    assert zero_as_none(tuples % "before is not None") is None


def test_a_step_that_another_function_makes_has_the_name_of_the_notebook(tmp_path):
    text = SOLUTIONS["gpipe_step"].replace("def gpipe_step", "def step")
    text += "\n\n\ndef same(function):\n    def wrapper(*all):\n        return function(*all)\n"
    text += "    return wrapper\n\n\ngpipe_step = same(step)\n"
    request = request_of(written(tmp_path, text, "gpipe_step"))
    assert request["functions"] == ["gpipe_step"]
    assert {"same", "step"} < {name for name, _ in request["sources"]}
    own = own_file.assemble([request])
    assert "gpipe_step = gpipe_step_same(gpipe_step_step)" in own


def test_a_step_below_a_decorator_of_a_library_takes_its_helpers_along(tmp_path):
    text = SOLUTIONS["gpipe_step"].replace("def gpipe_step", "@torch.enable_grad()\ndef gpipe_step")
    sources = dict(request_of(written(tmp_path, text, "gpipe_step"))["sources"])
    assert sources.keys() == {"backward", "forward", "gpipe_step"}


def test_a_step_can_be_a_lambda_with_a_name(tmp_path):
    text = SOLUTIONS["gpipe_step"].replace("def gpipe_step", "def step")
    text += "\n\n\ngpipe_step = lambda *all: step(*all)\n"
    own = own_file.assemble([request_of(written(tmp_path, text, "gpipe_step"))])
    assert "gpipe_step = lambda *all: gpipe_step_step(*all)" in own


def test_what_fills_a_container_goes_with_it(tmp_path):
    text = SOLUTIONS["gpipe_step"].replace(
        "backward(stage, k, held", "steps['B'](stage, k, held", 2
    )
    text = text.replace("def steps['B']", "def backward")
    text += "\n\n\nsteps = {}\nsteps['B'] = backward\nsteps |= {'F': forward}\n"
    sources = dict(request_of(written(tmp_path, text, "gpipe_step"))["sources"])
    assert sources["steps"] == "steps = {}\nsteps['B'] = backward\nsteps |= {'F': forward}"


def test_a_rank_prints_what_a_notebook_would_display(capsys):
    request = {"functions": ["f"], "imports": [], "sources": [["f", "def f(x):\n    display(x)\n"]]}
    on_ranks.functions_of(request)[0]("seen")
    assert capsys.readouterr().out == "seen\n"


def test_the_attributes_that_statements_set_go_along(tmp_path):
    text = SOLUTIONS["gpipe_step"].replace(
        "held.pop(k)", "held.pop(k - backward.first - Room.size)"
    )
    text += "\n\n\nbackward.first = 1\n\n\nclass Room:\n    pass\n\n\nRoom.size = 0\nbackward.first = 0\n"
    sources = dict(request_of(written(tmp_path, text, "gpipe_step"))["sources"])
    assert sources["backward"].endswith("\nbackward.first = 1\nbackward.first = 0")
    assert sources["Room"] == "class Room:\n    pass\n\nRoom.size = 0"


def test_a_loop_that_fills_a_container_defines_its_own_variable(tmp_path):
    text = SOLUTIONS["gpipe_step"].replace("backward(stage, k, held", "STEPS[0](stage, k, held", 2)
    text = text.replace("def STEPS[0]", "def backward")
    text += "\n\n\nSTEPS = []\nfor step in (backward, forward):\n    STEPS.append(step)\n"
    sources = dict(request_of(written(tmp_path, text, "gpipe_step"))["sources"])
    assert list(sources) == ["backward", "forward", "STEPS", "gpipe_step"]


def test_a_second_name_goes_along_although_another_line_ends_with_its_text(tmp_path):
    text = SOLUTIONS["gpipe_step"].replace("append(forward(", "append(GO(")
    text = text.replace("    held, sends, shares", "    LET_GO = forward\n    held, sends, shares")
    path = written(tmp_path, f"{text}\n\nGO = forward\n", "gpipe_step")
    sources = dict(request_of(path)["sources"])
    assert sources["GO"] == "GO = forward" and "LET_GO = forward" in sources["gpipe_step"]


def test_functions_that_decorators_put_into_a_table_go_with_it(tmp_path):
    text = SOLUTIONS["gpipe_step"].replace("backward(stage, k, held", "TABLE[0](stage, k, held", 2)
    text = text.replace("def TABLE[0]", "@into_table\ndef backward")
    head = "TABLE = []\n\n\ndef into_table(f):\n    TABLE.append(f)\n    return f\n\n\n"
    names = [
        name for name, _ in request_of(written(tmp_path, head + text, "gpipe_step"))["sources"]
    ]
    assert names == ["TABLE", "into_table", "backward", "forward", "gpipe_step"]


def test_dots_above_code_do_nothing():
    assert holes("def f(x):\n    ...\n    return x\n") == []
    assert holes("def f(x):\n    if x:\n        ...  # room\n        x += 1\n    ...\n") == [5]
    assert holes("def f(x):\n    y = 2\n    ...\n    return y\n") == [3]
    assert holes("def f(x):\n    return x\n    ...\n") == []
    assert holes("def f(x):\n    if False:\n        ...\n    return x\n") == []


def test_an_empty_class_and_an_abstract_method_are_no_stubs():
    assert holes("class Stop(Exception): ...\n") == []
    method = "class Step(ABC):\n    @abc.abstractmethod\n    def order(self, m): ...\n"
    assert holes(method) == []
    assert holes(method.replace("    @abc.abstractmethod\n", "")) == [2]


def test_the_readers_functions_take_the_place_of_the_courses(tmp_path):
    text = SOLUTIONS["gpipe_step"].replace("held.pop(k)", "taken(held, k)")
    text += "\n\n\ndef taken(held, k):\n    return held.pop(k)\n"
    own = own_file.assemble([request_of(written(tmp_path, text, "gpipe_step"))])
    assert own.count("def gpipe_step(") == own.count("def gpipe_step_taken(") == 1
    assert "gpipe_step_taken(held, k)\n" in own
    assert losses_of(tmp_path, own, "gpipe", 4) == losses_of(tmp_path, MODEL, "naive")


@pytest.mark.parametrize(
    ("notebook", "names"),
    [
        ("01_naive_model_parallelism", ["naive_step"]),
        ("02_gpipe", ["forward", "backward", "gpipe_step"]),
        ("03_1f1b", ["one_f_one_b_step"]),
        ("04_pipedream", ["pipedream_run"]),
        ("05_interleaved", ["interleaved_step"]),
        ("09_zero_bubble", ["input_half", "weight_half", "zb_h1_step"]),
    ],
)
def test_the_solution_of_a_lesson_is_what_the_file_has(notebook, names):
    text = "\n".join(cells_of_solution(notebook))
    for name in names:
        assert definition(name) in text, name
