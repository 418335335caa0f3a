"""Answers are judged as a reader gives them: in the cells of a kernel, one after the other.

A file is not enough: in a kernel, Python finds the text of no class, and of nothing below %%time.
"""

import re

import pytest
from kernels import Kernel
from readers_answers import GPIPE, ONE_F_ONE_B, PIECES, RIGHT, THERE, WRONG, edited

from course.launch import ROOT

pytestmark = [pytest.mark.processes, pytest.mark.further]  # test_builds.py asks the same checks

LIMIT = 240  # seconds for a cell, also on a busy machine

FIRST = f"""
import sys

sys.path[:0] = [{str(ROOT / "source_code")!r}]

import torch
import torch.distributed as dist

from course.building import own_file
from course.checks import build_stash, build_steps
from course.checks import lesson_09
from course.launch import run
from small.pipeline import DIM, loss_of
from small.weight_stash import backward_with, first_weights, forward_with
"""


@pytest.fixture(scope="module")
def kernel():
    manager = Kernel(kernel_name="python3")
    manager.start_kernel(cwd=str(ROOT / "notebooks"))
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=LIMIT)

    def perform(*cells):
        """What these cells print. An error in one of them fails the test."""
        printed = []

        def note(message):
            content = message["content"]
            assert message["msg_type"] != "error", "\n".join(content["traceback"])
            printed.append(content["text"] if message["msg_type"] == "stream" else "")

        for cell in cells:
            client.execute_interactive(cell, timeout=LIMIT, output_hook=note, store_history=True)
        return "".join(printed)

    perform(FIRST)
    yield perform
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def verdict(printed):
    """The line of a verdict, which must be the last and begin a line of its own."""
    assert "\x1e" not in printed and '"event"' not in printed
    return printed.splitlines()[-1]


CHECKS = {
    "there_and_back": "build_steps.there_and_back(there_and_back)",
    "naive_step": "build_steps.naive_step(naive_step)",
    "gpipe_step": "build_steps.gpipe_step(gpipe_step)",
    "one_f_one_b_step": "build_steps.one_f_one_b_step(one_f_one_b_step)",
    "pipedream_run": "build_stash.pipedream_run(pipedream_run)",
    "weight_half": "lesson_09.split_backward(input_half, weight_half)",
}


def answer_to(kernel, name, *cells):
    return verdict(kernel(*cells, CHECKS[name]))


@pytest.mark.parametrize("case", RIGHT)
def test_a_right_answer_is_right_however_it_is_written(case, kernel):
    name, cells = RIGHT[case]
    assert answer_to(kernel, name, *cells).startswith("Right: ")


def test_what_ranks_print_without_a_newline_disturbs_no_check(kernel):
    cell = edited(
        THERE,
        ("    x = torch", "    print('rank', dist.get_rank(), end=' ', flush=True)\n    x = torch"),
        ("    return x", "    print('done', end='')\n    return x"),
    )
    printed = kernel(cell, CHECKS["there_and_back"])
    assert verdict(printed).startswith("Right: ")
    assert all(printed.count(text) == 1 for text in ("rank 0 ", "rank 1 "))
    assert printed.count("done") == 2


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_answer_is_told_what_is_wrong(case, kernel):
    name, cells, sentence = WRONG[case]
    said = answer_to(kernel, name, *cells)
    assert said.startswith("Not yet: ") and re.search(sentence, said), said


def test_helpers_of_one_name_in_two_lessons_are_both_kept(kernel, tmp_path):
    """The file's steps call their own helper, class and device, and name their own arguments so."""
    kernel(
        f"from pathlib import Path\nown_file.FILE = Path({str(tmp_path / 'my_pipeline.py')!r})\n"
        "own_file.PARTS = own_file.FILE.with_suffix('')",
        "device = torch.device('cpu')",
        "class Room:\n    def of(self, x, device=device):\n"
        "        return torch.empty(*x.shape, DIM, dtype=torch.float64, device=device)",
        edited(PIECES, ("torch.empty(*inputs[k].shape, DIM, dtype=torch.float64)",
                        "Room().of(inputs[k], device=device)")),
        "def finish(sends):\n    for send in sends:\n        send.wait()",
        edited(GPIPE, ("    for send in sends:\n        send.wait()", "    finish(sends)")),
        CHECKS["gpipe_step"],
        "own_file.keep(gpipe_step)",
        "def finish(sends, shares):\n    for send in sends:\n        send.wait()\n"
        "    return sum(filter(None, shares))",
        edited(ONE_F_ONE_B, ("    for send in sends:\n        send.wait()\n",
                             "    loss = finish(sends, shares)\n"),
               ("return sum(shares)", "return loss")),
    )  # fmt: skip
    said = kernel(CHECKS["one_f_one_b_step"], "own_file.keep(one_f_one_b_step)")
    assert "gpipe_step       is yours" in said and "one_f_one_b_step is yours" in said
    own, path = (tmp_path / "my_pipeline.py").read_text(), ROOT / "build" / f"{tmp_path.name}.py"
    assert "def gpipe_step_finish(sends):" in own
    assert "def one_f_one_b_step_finish(sends, shares):" in own
    path.write_text(own)
    train = f"run('build/{path.name} ' + name + ' --steps 1', show=False, limit=60).losses"
    try:
        losses = kernel(f"print([{train} for name in ('gpipe', '1f1b')])")
    finally:
        path.unlink()
    assert losses == "[[5.183731], [5.183731]]\n"
