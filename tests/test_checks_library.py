"""The checks of lesson 08 know a stub, the right answer and typical wrong ones."""

import pytest

from course.checks import lesson_08
from course.checks.answer import NOT_ATTEMPTED


def answer_to(check, capsys, answer):
    check(answer)
    return capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    "check", [lesson_08.placement, lesson_08.what_to_pass, lesson_08.clip_factor]
)
def test_an_untouched_stub_is_not_attempted_yet(check, capsys):
    assert answer_to(check, capsys, lambda *arguments: ...) == NOT_ATTEMPTED


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        (lambda shape, r, p: [2 * r, 2 * r + 1], "one large stage again"),
        (lambda shape, r, p: [r, r + p], "with it ZB-V waits for ever"),
        (lambda shape, r, p: [r, r + p if shape == "loop" else 2 * p - r], "counted from 0"),
        (lambda shape, r, p: [r], "it is [0, 4]"),
        (lambda shape, r, p: 3, "return a list of two numbers"),
    ],
)
def test_placement_explains(place, sentence, capsys):
    answer = answer_to(lesson_08.placement, capsys, place)
    assert answer.startswith("Not yet: ") and sentence in answer


@pytest.mark.parametrize(
    ("passed", "sentence"),
    [
        (lambda first, last: {"inputs"} if first else set(), "do not travel"),
        (lambda first, last: {"inputs", "mask"}, "comes from the stage before"),
        (lambda first, last: {"mask", "target"} | ({"inputs"} if first else set()), "no scores"),
        (
            lambda first, last: (
                {"inputs", "mask"} if first else {"mask", "target", "losses"} if last else {"mask"}
            ),
            "rank 0 of a V",
        ),
        (lambda first, last: 3, "return a set of names"),
    ],
)
def test_what_to_pass_explains(passed, sentence, capsys):
    answer = answer_to(lesson_08.what_to_pass, capsys, passed)
    assert answer.startswith("Not yet: ") and sentence in answer


@pytest.mark.parametrize(
    ("factor", "sentence"),
    [
        (lambda norms, most: most / sum(norm**2 for norm in norms) ** 0.5, "short enough"),
        (lambda norms, most: min(1.0, most / sum(norms)), "their squares do"),
        (lambda norms, most: min(1.0, most / max(norms)), "the longest part alone"),
        (lambda norms, most: 1.0, "so it is 0.2"),
    ],
)
def test_clip_factor_explains(factor, sentence, capsys):
    answer = answer_to(lesson_08.clip_factor, capsys, factor)
    assert answer.startswith("Not yet: ") and sentence in answer


def test_clip_factor_takes_torchs_own_formula_too(capsys):
    answer = answer_to(
        lesson_08.clip_factor,
        capsys,
        lambda norms, most: min(1.0, most / (sum(norm**2 for norm in norms) ** 0.5 + 1e-6)),
    )
    assert answer.startswith("Right: ")
