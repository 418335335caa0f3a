"""The checks of lesson 08 know a stub, the right answer and typical wrong ones."""

import pytest

from course.checks import lesson_08
from course.checks.answer import NOT_ATTEMPTED


def answer_to(check, capsys, answer):
    check(answer)
    return capsys.readouterr().out.strip()


def test_an_untouched_stub_is_not_attempted_yet(capsys):
    assert answer_to(lesson_08.placement, capsys, lambda *arguments: ...) == NOT_ATTEMPTED


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        (lambda shape, r, p: [2 * r, 2 * r + 1], "one large stage again"),
        (lambda shape, r, p: [r, r + p], "with it ZB-V waits for ever"),
        (lambda shape, r, p: [r, r + p if shape == "loop" else 2 * p - r], "counted from 0"),
        (lambda shape, r, p: [r], "one stage, and each rank has two; it is [0, 4]"),
        (lambda shape, r, p: [r, 2 * p - 1 - r if shape == "loop" else r + p], "[0, 7], the V"),
        (lambda shape, r, p: [r + 1, r + 1 + p], "[1, 5], but stages are counted from 0"),
        (  # right only for powers of two
            lambda shape, r, p: [r, r + p if shape == "loop" else (2 * p - 1) ^ r],
            "rank 2 of 3: you say [2, 7]; it is [2, 3]",
        ),
        (lambda shape, r, p: 3, "return a list of two numbers"),
        (lambda shape, r, p: f"{r},{r + p}", "you say '0,4'; it is [0, 4]"),
    ],
)
def test_placement_explains(place, sentence, capsys):
    answer = answer_to(lesson_08.placement, capsys, place)
    assert answer.startswith("Not yet: ") and sentence in answer
