"""Lesson 10d's checks answer wrong dispatches on two real ranks, each with what is wrong."""

import pytest

from course.checks import lesson_10d as check
from course.launch import PRELOAD

PRELOAD.extend(["torch._dynamo", "torch.distributed.checkpoint"])


def right(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences):
    order = chosen.argsort(stable=True)
    sent = chosen.bincount(minlength=2).tolist()
    received = exchange_counts(sent)
    returned = exchange(expert(exchange(x[order], sent, received)), received, sent)
    mixed = torch.zeros_like(x).index_add(0, order, returned * weight[order, None])  # noqa: F821
    return mixed, losses.sum() / sequences


def row_by_row(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences):
    order = torch.cat([(chosen == e).nonzero()[:, 0] for e in (0, 1)])  # noqa: F821
    sent = [int((chosen == e).sum()) for e in (0, 1)]
    received = exchange_counts(sent)
    back = exchange(expert(exchange(x[order], sent, received)), received, sent)
    results = [None] * len(x)
    for row, token in enumerate(order.tolist()):
        results[token] = back[row] * weight[token]
    return torch.stack(results), sum(losses) / sequences  # noqa: F821


def stub(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences): ...


def order_lost(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences):
    order = chosen.argsort(stable=True)
    sent = chosen.bincount(minlength=2).tolist()
    received = exchange_counts(sent)
    returned = exchange(expert(exchange(x[order], sent, received)), received, sent)
    return returned * weight[order, None], losses.sum() / sequences


def router_forgotten(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences):
    mixed, share = right(  # noqa: F821
        x, chosen, weight.detach(), expert, exchange_counts, exchange, losses, sequences
    )
    return mixed, share


def unweighted(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences):
    ones = weight / weight.detach()
    return right(x, chosen, ones, expert, exchange_counts, exchange, losses, sequences)  # noqa: F821


def loss_per_rank(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences):
    mixed, _ = right(  # noqa: F821
        x, chosen, weight, expert, exchange_counts, exchange, losses, sequences
    )
    return mixed, losses.mean()


def loss_without_gradient(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences):
    mixed, share = right(  # noqa: F821
        x, chosen, weight, expert, exchange_counts, exchange, losses, sequences
    )
    return mixed, share.detach()


def only_own_tokens(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences):
    return expert(x) * weight[:, None], losses.sum() / sequences


def results_alone(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences):
    mixed, _ = right(  # noqa: F821
        x, chosen, weight, expert, exchange_counts, exchange, losses, sequences
    )
    return mixed


def answer_to(function, given, capsys):
    function(given)
    return capsys.readouterr().out


@pytest.mark.parametrize("mix", [right, row_by_row])
def test_right_answers(mix, capsys):
    assert answer_to(check.dispatch_and_combine, mix, capsys).startswith("Right")


@pytest.mark.parametrize(
    ("mix", "words"),
    [
        (stub, "Not attempted yet"),
        (order_lost, "in another order"),
        (router_forgotten, "the router gets no gradient"),
        (unweighted, "multiply by it"),
        (loss_per_rank, "the sum of both ranks is too large"),
        (loss_without_gradient, "has no gradient"),
        (only_own_tokens, "which row belongs to which token"),
        (results_alone, "a pair of tensors"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_typical_wrong_answers(mix, words, capsys):
    assert words in answer_to(check.dispatch_and_combine, mix, capsys)


def test_how_much_of_the_all_to_alls_is_hidden(capsys):
    right_shares = {5: 110 / 190, 15: 0.418}
    assert answer_to(check.hidden_parts, right_shares, capsys).startswith("Right")


@pytest.mark.parametrize(
    "hidden",
    [{5: 0.145, 15: 0.209}, {5: 0.579, 15: 1.0}, {5: 0.421, 15: 0.582}, {5: 0.579, 15: ...}],
    ids=["of the whole step", "all of it", "what is not hidden", "half done"],
)
def test_wrong_shares_name_the_row_and_how_to_compute_it(hidden, capsys):
    assert " ms: " in answer_to(check.hidden_parts, hidden, capsys)


def test_shares_that_are_not_attempted(capsys):
    assert "Not attempted" in answer_to(check.hidden_parts, {5: ..., 15: ...}, capsys)
