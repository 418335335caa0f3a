"""The checks of lesson 10 know a stub, the right answer and typical wrong ones."""

import pytest
import torch

from course.checks import lesson_10
from course.checks.answer import NOT_ATTEMPTED


def answer_to(check, capsys, answer):
    check(answer)
    return capsys.readouterr().out.strip()


def test_an_untouched_stub_is_not_attempted_yet(capsys):
    assert answer_to(lesson_10.share_of_loss, capsys, lambda *arguments: ...) == NOT_ATTEMPTED


def test_the_sum_of_a_micro_batch_over_all_tokens_is_right(capsys):
    answer = answer_to(
        lesson_10.share_of_loss, capsys, lambda losses, counts: sum(losses) / sum(counts)
    )
    assert answer.startswith("Right: ")


def test_a_share_may_be_a_tensor_and_a_function_may_empty_its_lists(capsys):
    def share(losses, counts):
        total = 0
        while counts:
            total += counts.pop()
        return torch.tensor(losses).sum() / total

    assert answer_to(lesson_10.share_of_loss, capsys, share).startswith("Right: ")
    ones = lambda *lists: share(*lists).reshape(1)  # noqa: E731
    assert answer_to(lesson_10.share_of_loss, capsys, ones).startswith("Right: ")


def nothing_without_losses(losses, counts):
    if losses:
        return sum(losses) / sum(counts)


def weighted_mean(losses, counts):
    return sum(losses) / len(losses) * len(losses) / sum(counts)  # right, unless there are none


@pytest.mark.parametrize(
    ("share", "sentence"),
    [
        (lambda losses, counts: sum(losses) / max(len(losses), 1) / len(counts), "mean of means"),
        (weighted_mean, "and then adds 0"),
        (
            lambda losses, counts: torch.tensor(losses).mean() * len(losses) / sum(counts),
            "returned nan; is something divided by zero? (a micro-batch may be all padding",
        ),
        (nothing_without_losses, "every way through it? (a micro-batch may be all padding"),
        (
            lambda losses, counts: sum(losses) / max(len(losses), 1),
            "as if each micro-batch were a whole batch",
        ),
        (lambda losses, counts: sum(losses), "would take a longer step"),
        (
            lambda losses, counts: sum(losses) / len(counts),
            "7.5, divided by the number of micro-batches, and one process with the whole batch has 5",
        ),
        (
            lambda losses, counts: round(sum(losses) / sum(counts), 3),
            "add up to 2.031, and one process with the whole batch has 2.03125",
        ),
    ],
)
def test_share_of_loss_explains(share, sentence, capsys):
    answer = answer_to(lesson_10.share_of_loss, capsys, share)
    assert answer.startswith("Not yet: ") and sentence in answer
