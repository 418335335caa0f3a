"""Lesson 10d's checks answer wrong dispatches on two real ranks, each with what is wrong."""

from decimal import Decimal
from fractions import Fraction

import numpy
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


def counts_are_tensors(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences):
    order, sent = chosen.argsort(), chosen.bincount(minlength=2)
    received = torch.tensor(exchange_counts(sent))  # noqa: F821
    returned = exchange(expert(exchange(x[order], sent, received)), received, sent)
    return returned[order.argsort()] * weight[:, None], losses.sum() / sequences


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


def detached(*arguments):
    mixed, share = right(*arguments)  # noqa: F821
    return mixed.detach(), share


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


def loss_of_numbers_alone(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences):
    mixed, share = right(  # noqa: F821
        x, chosen, weight, expert, exchange_counts, exchange, losses, sequences
    )
    return mixed, share.item() + 0 * losses.sum()


def loss_with_twice_its_gradient(
    x, chosen, weight, expert, exchange_counts, exchange, losses, sequences
):
    mixed, share = right(  # noqa: F821
        x, chosen, weight, expert, exchange_counts, exchange, losses, sequences
    )
    return mixed, 2 * share - share.detach()


def way_back_swapped(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences):
    order = chosen.argsort(stable=True)
    sent = chosen.bincount(minlength=2).tolist()
    received = exchange_counts(sent)
    returned = exchange(expert(exchange(x[order], sent, received)), sent, received)
    return returned[order.argsort()] * weight[:, None], losses.sum() / sequences


def counts_not_exchanged(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences):
    order = chosen.argsort(stable=True)
    sent = chosen.bincount(minlength=2).tolist()
    returned = exchange(expert(exchange(x[order], sent, sent)), sent, sent)
    return returned[order.argsort()] * weight[:, None], losses.sum() / sequences


def sorted_twice(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences):
    order = chosen.argsort(stable=True)
    sent = chosen.bincount(minlength=2).tolist()
    received = exchange_counts(sent)
    returned = exchange(expert(exchange(x[order], sent, received)), received, sent)
    return returned[order] * weight[:, None], losses.sum() / sequences


def never_put_back(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences):
    order = chosen.argsort(stable=True)
    sent = chosen.bincount(minlength=2).tolist()
    received = exchange_counts(sent)
    returned = exchange(expert(exchange(x[order], sent, received)), received, sent)
    return returned * weight[:, None], losses.sum() / sequences


def never_sorted(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences):
    sent = chosen.bincount(minlength=2).tolist()
    received = exchange_counts(sent)
    returned = exchange(expert(exchange(x, sent, received)), received, sent)
    return returned * weight[:, None], losses.sum() / sequences


def weights_of_the_sorted(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences):
    order = chosen.argsort(stable=True)
    sent = chosen.bincount(minlength=2).tolist()
    received = exchange_counts(sent)
    returned = exchange(expert(exchange(x[order], sent, received)), received, sent)
    return returned[order.argsort()] * weight[order, None], losses.sum() / sequences


def sent_back_reversed(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences):
    order = chosen.argsort(stable=True)
    sent = chosen.bincount(minlength=2).tolist()
    received = exchange_counts(sent)
    results = expert(exchange(x[order], sent, received)).flip(0)
    returned = exchange(results, received, sent)
    return returned[order.argsort()] * weight[:, None], losses.sum() / sequences


def put_back_reversed(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences):
    order = chosen.argsort(stable=True)
    sent = chosen.bincount(minlength=2).tolist()
    received = exchange_counts(sent)
    returned = exchange(expert(exchange(x[order], sent, received)), received, sent)
    return returned[order.argsort()].flip(0) * weight[:, None], losses.sum() / sequences


def weighted_twice(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences):
    mixed, share = right(  # noqa: F821
        x, chosen, weight, expert, exchange_counts, exchange, losses, sequences
    )
    return mixed * weight[:, None], share


def tokens_added(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences):
    mixed, share = right(  # noqa: F821
        x, chosen, weight, expert, exchange_counts, exchange, losses, sequences
    )
    return x + mixed, share


def no_way_back(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences):
    order = chosen.argsort(stable=True)
    sent = chosen.bincount(minlength=2).tolist()
    made = expert(exchange(x[order], sent, exchange_counts(sent)))
    return made * weight[:, None], losses.sum() / sequences


def with_a_bias(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences):
    mixed, share = right(  # noqa: F821
        x, chosen, weight, expert, exchange_counts, exchange, losses, sequences
    )
    return mixed + 1, share


def weighted_before(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences):
    x, ones = x * weight[:, None], weight / weight.detach()
    return right(x, chosen, ones, expert, exchange_counts, exchange, losses, sequences)  # noqa: F821


def nothing_for_no_tokens(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences):
    order = chosen.argsort(stable=True)
    sent = chosen.bincount(minlength=2).tolist()
    received = exchange_counts(sent)
    arrived = exchange(x[order], sent, received)
    if len(arrived) == 0:
        return x * 0, losses.sum() / sequences
    returned = exchange(expert(arrived), received, sent)
    return returned[order.argsort()] * weight[:, None], losses.sum() / sequences


def a_share_in_a_list(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences):
    mixed, share = right(  # noqa: F821
        x, chosen, weight, expert, exchange_counts, exchange, losses, sequences
    )
    return mixed, share.reshape(1)


def padded_to_equal_counts(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences):
    room = 8
    rows, place = torch.zeros(2 * room, x.shape[1], dtype=x.dtype), []  # noqa: F821
    for n, e in enumerate(chosen.tolist()):
        place.append(e * room + chosen[:n].tolist().count(e))
    rows = rows.index_copy(0, torch.tensor(place), x)  # noqa: F821
    received = exchange_counts([room, room])
    back = exchange(expert(exchange(rows, [room, room], received)), received, [room, room])
    return back[place] * weight[:, None], losses.sum() / sequences


def every_token_to_both(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences):
    sent = [len(x), len(x)]
    received = exchange_counts(sent)
    rows = exchange(torch.cat([x, x]), sent, received)  # noqa: F821
    of_0, of_1 = exchange(expert(rows), received, sent).chunk(2)
    mixed = torch.where(chosen[:, None] == 0, of_0, of_1)  # noqa: F821
    return mixed * weight[:, None], losses.sum() / sequences


def rows_of_float32(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences):
    mixed, share = right(  # noqa: F821
        x, chosen, weight, expert, exchange_counts, exchange, losses, sequences
    )
    rows = torch.zeros(x.shape)  # noqa: F821
    for token, row in enumerate(mixed):
        rows[token] = row
    return rows, share


def loss_of_float32(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences):
    return right(  # noqa: F821
        x, chosen, weight, expert, exchange_counts, exchange, losses.float(), sequences
    )


def four_sequences(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences):
    return right(x, chosen, weight, expert, exchange_counts, exchange, losses, 4)  # noqa: F821


def order_of_the_first_call(
    x,
    chosen,
    weight,
    expert,
    exchange_counts,
    exchange,
    losses,
    sequences,
    kept=[],  # noqa: B006
):
    kept.append(chosen)
    return right(x, kept[0], weight, expert, exchange_counts, exchange, losses, sequences)  # noqa: F821


def some_of_expert_0(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences):
    last = (chosen.sort().values == 0).nonzero()[-1]
    assert last + 1 == (chosen == 0).sum()
    return right(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences)  # noqa: F821


def one_count(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences):
    exchange_counts(chosen.bincount().tolist())
    return right(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences)  # noqa: F821


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


@pytest.mark.parametrize(
    "mix", [right, row_by_row, counts_are_tensors, a_share_in_a_list, padded_to_equal_counts]
)
def test_right_answers(mix, capsys):
    assert answer_to(check.dispatch_and_combine, mix, capsys).startswith("Right")


@pytest.mark.parametrize(
    ("mix", "words"),
    [
        (stub, "Not attempted yet"),
        (order_lost, "in another order"),
        (router_forgotten, "the router gets no gradient"),
        (detached, "return them without detach()"),
        (unweighted, "multiply by it"),
        (loss_per_rank, "the sum of both ranks is too large"),
        (loss_without_gradient, "has no gradient"),
        (loss_of_numbers_alone, "has no gradient"),
        (loss_with_twice_its_gradient, "the gradient of the auxiliary loss is wrong"),
        (rows_of_float32, "each result is right to about seven digits only"),
        (loss_of_float32, "auxiliary loss is right to about seven digits only"),
        (four_sequences, "with other numbers of tokens and sequences, on rank 0 the share"),
        (order_of_the_first_call, "is out of bounds for dimension 0 with size 4"),
        (some_of_expert_0, "raised IndexError: index -1 is out of bounds"),
        (one_count, "] is not a count for each of 2 ranks"),
        (only_own_tokens, "of expert 0 for token 0, which chose expert 1"),
        (sorted_twice, "place of token 0, there is the result of expert 0 for token 4"),
        (never_put_back, "place of token 0, there is the result of expert 0 for token 1"),
        (never_sorted, "of expert 0 for token 0, which chose expert 1"),
        (weights_of_the_sorted, "which chose expert 1, times the weight of token 1"),
        (sent_back_reversed, "of expert 1 for token 2 of rank 1, which chose expert 1"),
        (put_back_reversed, "place of token 0, there is the result of expert 1 for token 5"),
        (results_alone, "a pair of tensors"),
        (way_back_swapped, "Split sizes doesn't match total dim 0 size; `exchange(rows, sent, rec"),
        (weighted_twice, "multiplied by its weight twice"),
        (tokens_added, "the results have their tokens added"),
        (no_way_back, "only after the rows have come back through `exchange`"),
        (counts_not_exchanged, "rows are to arrive from ranks 0 and 1, and"),
        (with_a_bias, "which row belongs to which token, to which weight and to which rank"),
        (weighted_before, "the weight multiplies what goes into the expert"),
        (nothing_for_no_tokens, "and rank 1 has returned without it"),
        (every_token_to_both, "expert 0 also computes 6 tokens that chose the other one"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_typical_wrong_answers(mix, words, capsys):
    assert words in answer_to(check.dispatch_and_combine, mix, capsys)


def test_how_much_of_the_all_to_alls_is_hidden(capsys):
    right_shares = {5: Fraction(110, 190), 15: 0.418}
    assert answer_to(check.hidden_parts, right_shares, capsys).startswith("Right")
    right_shares = {5: numpy.array(110 / 190), 15: Decimal("0.418")}
    assert answer_to(check.hidden_parts, right_shares, capsys).startswith("Right")


@pytest.mark.parametrize(
    "hidden",
    [
        {5: Fraction(1, 2), 15: 0.418},
        {5: 0.145, 15: 0.209},
        {5: 0.579, 15: 1.0},
        {5: 0.421, 15: 0.582},
    ],
    ids=["a fraction", "of the whole step", "all of it", "what is not hidden"],
)
def test_wrong_shares_name_the_row_and_how_to_compute_it(hidden, capsys):
    assert " ms: " in answer_to(check.hidden_parts, hidden, capsys)


def test_a_share_in_percent_is_no_number_from_0_to_1(capsys):
    said = answer_to(check.hidden_parts, {5: 58, 15: 42}, capsys)
    assert "5 ms: give a number from 0 to 1, not 58" in said


def test_shares_that_are_not_attempted_missing_or_no_dictionary(capsys):
    assert "Not attempted" in answer_to(check.hidden_parts, {5: ..., 15: ...}, capsys)
    for hidden, milliseconds in [({}, 5), ({"5": 0.579}, 5), ({5: 0.579, 15: ...}, 15)]:
        assert f"{milliseconds} ms is still open" in answer_to(check.hidden_parts, hidden, capsys)
    for hidden in ([0.579, 0.418], 0.579, right):
        assert "hidden is a dictionary" in answer_to(check.hidden_parts, hidden, capsys)
