"""The check of lesson 06 knows a stub, the right answer and typical wrong ones."""

import math

import pytest

from course.checks import lesson_06
from course.checks.answer import NOT_ATTEMPTED


def answer_to(check, capsys, answer):
    check(answer)
    return capsys.readouterr().out.strip()


def test_an_untouched_stub_is_not_attempted_yet(capsys):
    stub = answer_to(lesson_06.held_with_recompute, capsys, lambda *arguments: ...)
    assert stub == NOT_ATTEMPTED


def waiting(schedule, rank, p, m):
    return m if schedule == "gpipe" else min(m, p - rank)


@pytest.mark.parametrize(
    ("held", "sentence"),
    [
        (lambda s, r, p, m, a, i: waiting(s, r, p, m) * a + i, "is part of its inside"),
        (lambda s, r, p, m, a, i: waiting(s, r, p, m) * a, "needs the inside of its own"),
        (lambda s, r, p, m, a, i: (waiting(s, r, p, m) - 1) * a, "112, the inputs alone"),
        (lambda s, r, p, m, a, i: (waiting(s, r, p, m) - 1) * i + a, "the one at work its inside"),
        (lambda s, r, p, m, a, i: waiting(s, r, p, m) * i, "what it holds without recomputation"),
        (lambda s, r, p, m, a, i: (m - 1) * a + i, "in 1F1B fewer micro-batches wait"),
        (lambda s, r, p, m, a, i: (waiting(s, r, p, m) - 1) * a + i / m, "of one micro-batch"),
        (lambda s, r, p, m, a, i: (waiting(s, 0, p, m) - 1) * a + i, "448, as on rank 0; fewer"),
        (lambda s, r, p, m, a, i: i, "the rank has 8 micro-batches between forward and backward"),
        (lambda *case: math.nan, "is something divided by zero"),
        (lambda *case: math.inf, "is something divided by zero"),
    ],
)
def test_held_with_recompute_explains(held, sentence, capsys):
    answer = answer_to(lesson_06.held_with_recompute, capsys, held)
    assert answer.startswith("Not yet: ") and sentence in answer
