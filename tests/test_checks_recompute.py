"""The checks of lesson 06 know a stub, the right answer and typical wrong ones."""

import math

import pytest

from course.checks import lesson_06
from course.checks.answer import NOT_ATTEMPTED


def answer_to(check, capsys, answer):
    check(answer)
    return capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    "check",
    [lesson_06.held_with_recompute, lesson_06.best_checkpoints],
)
def test_an_untouched_stub_is_not_attempted_yet(check, capsys):
    assert answer_to(check, capsys, lambda *arguments: ...) == NOT_ATTEMPTED


def waiting(schedule, rank, p, m):
    return m if schedule == "gpipe" else min(m, p - rank)


@pytest.mark.parametrize(
    ("held", "sentence"),
    [
        (lambda s, r, p, m, a, i: waiting(s, r, p, m) * a + i, "is part of its inside"),
        (lambda s, r, p, m, a, i: waiting(s, r, p, m) * a, "needs the inside of its own"),
        (lambda s, r, p, m, a, i: waiting(s, r, p, m) * i, "the bill without recomputation"),
        (lambda s, r, p, m, a, i: (m - 1) * a + i, "in 1F1B fewer micro-batches wait"),
        (lambda s, r, p, m, a, i: (waiting(s, r, p, m) - 1) * a + i / m, "of one micro-batch"),
        (lambda s, r, p, m, a, i: i, "the rank has 8 micro-batches between forward and backward"),
    ],
)
def test_held_with_recompute_explains(held, sentence, capsys):
    answer = answer_to(lesson_06.held_with_recompute, capsys, held)
    assert answer.startswith("Not yet: ") and sentence in answer


def root(layers, inp, inside, waiting):
    return math.sqrt(layers * inside / (waiting * inp))


@pytest.mark.parametrize(
    ("best", "sentence"),
    [
        (lambda layers, a, i, k: layers, "the inputs are most of it"),
        (lambda layers, a, i, k: 1, "the inside of the whole stage is most of it"),
        (lambda layers, a, i, k: round(layers**0.5), "only if an inside is an input"),
        (lambda layers, a, i, k: min(layers, round(root(layers, a, i, 1))), "each of the 4"),
        (lambda layers, a, i, k: round(root(layers, a, i, k)), "there are only 8 layers"),
        (lambda layers, a, i, k: root(layers, a, i, k) + 0.5, "return a whole number from 1"),
        (lambda layers, a, i, k: math.nan, "is something divided by zero"),
        (lambda layers, a, i, k: math.inf, "is something divided by zero"),
        (lambda layers, a, i, k: 6, "which holds"),
        (lambda *case: min(case[0], round(root(*case))), "the root is 1.46, so compare the whole"),
        (lambda *case: min(case[0], math.floor(root(*case))), "the root is 1.46, so compare"),
        (lambda *case: min(case[0], math.ceil(root(*case))), "the root is 2.24, so compare"),
    ],
)
def test_best_checkpoints_explains(best, sentence, capsys):
    answer = answer_to(lesson_06.best_checkpoints, capsys, best)
    assert answer.startswith("Not yet: ") and sentence in answer
