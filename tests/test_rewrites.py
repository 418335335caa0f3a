"""A right answer is right however it is written: seeded rewrites of every solution are accepted."""

import pytest
import test_builds as early
import test_builds_11_to_12c as late
import test_builds_from_06_on as middle
from further import seeds_up_to
from rewritten import rewritten

from course.checks import build_llama
from course.checks import lesson_12b as find_the_fault

pytestmark = pytest.mark.processes

SEEDS = seeds_up_to(2)


def of_lessons_01_to_09(name):
    def ask(tmp_path, text):
        early.CHECKS[name](early.written(tmp_path, text, name))

    return early.SOLUTIONS[name], ask


def of_the_step_for_nccl(name):
    def ask(tmp_path, text):
        early.build.one_f_one_b_for_nccl(early.written(tmp_path, text, name))

    cells = early.cells_of_solution("03_1f1b")
    return next(cell for cell in cells if f"def {name}(" in cell), ask


def of_lessons_06_to_10(name):
    def ask(tmp_path, text):
        middle.CHECKS[name](*middle.written(tmp_path, text, name))

    return middle.SOLUTIONS[name], ask


def of_a_repair(case):
    def ask(tmp_path, text):
        find_the_fault.repair(case, late.written(tmp_path, text))

    return late.repair_text(case), ask


def of_the_layer(_):
    text = late.solution("12c_pretrain_llama", "feed_forward")
    return text, lambda tmp_path, text: build_llama.feed_forward(late.written(tmp_path, text))


EXERCISES = [
    *((of_lessons_01_to_09, name) for name in early.SOLUTIONS),
    (of_the_step_for_nccl, "one_f_one_b_for_nccl"),
    *((of_lessons_06_to_10, name) for name in middle.SOLUTIONS),
    *((of_a_repair, case) for case in late.ORACLES),
    (of_the_layer, "feed_forward"),
]


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize(("make", "name"), EXERCISES, ids=[str(name) for _, name in EXERCISES])
def test_no_rewrite_of_a_solution_is_rejected(make, name, seeds, tmp_path, capsys):
    solution, ask = make(name)
    for seed in seeds:
        text = rewritten(solution, f"{name} {seed}")
        ask(tmp_path, text)
        said = capsys.readouterr().out.strip().splitlines()[-1]
        assert said.startswith("Right: "), f"seed {seed}: {said}\n{text}"
