"""The checks of lesson 12c know a stub, the right answer and typical wrong ones."""

import pytest

from course.checks import lesson_12c
from course.checks.answer import NOT_ATTEMPTED


def answer_to(check, capsys, answer):
    check(answer)
    return capsys.readouterr().out.strip()


@pytest.mark.parametrize("check", [lesson_12c.loss_of_an_update, lesson_12c.utilisation])
def test_an_untouched_stub_is_not_attempted_yet(check, capsys):
    assert answer_to(check, capsys, lambda *arguments: ...) == NOT_ATTEMPTED


def mean(values):
    return sum(values) / len(values)


def weighted(one):
    return sum(m * n for m, n in one) / sum(n for _, n in one)


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (lambda passes: mean([m for one in passes for m, _ in one]), "a mean of means"),
        (lambda passes: mean([weighted(one) for one in passes]), "each pass counts the same"),
        (lambda passes: sum(weighted(one) for one in passes), "twice the loss"),
        (lambda passes: sum(m * n for one in passes for m, n in one), "divide it by how many"),
        (lambda passes: 1.0, "the mean over all its tokens is"),
    ],
)
def test_loss_of_an_update_explains(loss, sentence, capsys):
    answer = answer_to(lesson_12c.loss_of_an_update, capsys, loss)
    assert answer.startswith("Not yet: ") and sentence in answer


def right(n, layers, d, t, rate, peak, recompute):
    return (6 * n + 12 * layers * d * t) * rate / peak


@pytest.mark.parametrize(
    ("mfu", "sentence"),
    [
        (lambda n, layers, d, t, rate, peak, recompute: 6 * n * rate / peak, "12 L d T"),
        (lambda n, layers, d, t, rate, peak, recompute: 2 * n * rate / peak, "a forward; the"),
        (lambda *case: right(*case) * (4 / 3 if case[-1] else 1), "not useful work"),
        (
            lambda n, *case: right(n * 4 / 3 if case[-1] else n, *case),
            "a forward run again is work",
        ),
        (lambda *case: 100 * right(*case), "in per cent"),
        (lambda *case: 1 / right(*case), "possible work over useful work"),
    ],
)
def test_utilisation_explains(mfu, sentence, capsys):
    answer = answer_to(lesson_12c.utilisation, capsys, mfu)
    assert answer.startswith("Not yet: ") and sentence in answer


def test_right_answers_are_right(capsys):
    def loss(passes):
        return weighted([one for a_pass in passes for one in a_pass])

    for check, answer in [
        (lesson_12c.loss_of_an_update, loss),
        (lesson_12c.utilisation, right),
    ]:
        assert answer_to(check, capsys, answer).startswith("Right: ")
