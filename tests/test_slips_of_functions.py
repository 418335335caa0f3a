"""A function with a slip is not praised: what a check accepts agrees with the solution elsewhere."""

import ast
import copy
import importlib
import math
import random
from unittest import mock

import pytest
import torch
from further import seeds_up_to
from mutated import mutated, slipped
from test_rewrites_of_functions import FUNCTIONS, asked

from course.checks.lesson_11c import Times

pytestmark = pytest.mark.processes

SEEDS = seeds_up_to(20, many=180, at_once=60)
CASES = 60  # inputs other than those of the check


def seconds(choose, least=1, most=9):
    return [choose.randint(1, 40) * 0.5 for _ in range(choose.randint(least, most))]


def cut_of(choose):
    layers = seconds(choose)
    return layers, choose.randint(1, len(layers))


def ranks_of(choose):
    layers = seconds(choose, most=5)
    return layers, choose.randint(len(layers), 12)


def held(choose):
    ranks = choose.randint(1, 8)
    rank, bytes_of = choose.randrange(ranks), [choose.randint(1, 9), choose.randint(10, 99)]
    return choose.choice(["gpipe", "1f1b"]), rank, ranks, choose.randint(1, 20), *bytes_of


def opened(choose):
    layers = choose.randint(1, 16)
    ranks, saved_by = choose.randint(1, layers), choose.randint(1, layers)
    return choose.randrange(ranks), ranks, saved_by, layers


def placed(choose):
    ranks = choose.randint(1, 9)
    return choose.choice(["loop", "v"]), choose.randrange(ranks), ranks


def losses(choose):
    counts = [choose.randint(1, 30) for _ in range(choose.randint(1, 6))]
    return [count * choose.random() for count in counts], counts


def headed(choose):
    layers = choose.randint(2, 40)
    return layers, choose.randint(0, 12), choose.randint(2, layers)


def waits(choose):
    """All wait in the end for one rank, or, if that one waits too, for each other."""
    ranks = random.Random(choose.random()).sample(range(7), choose.randint(2, 7))
    for_whom = {rank: choose.choice(ranks[:at]) for at, rank in enumerate(ranks) if at}
    first = choose.choice([None, *ranks[1:]])
    return ({rank: for_whom.get(rank, first) for rank in sorted(ranks)},)


def timed(choose):
    layers = choose.randint(1, 12)
    first = choose.randrange(layers)
    pairs = [(choose.random(), choose.random()) for _ in range(3)]
    times = Times(layers, *pairs, recompute=choose.random() < 0.5)
    return times, first, choose.randint(first + 1, layers)


def drawn(choose, *shapes):
    torch.manual_seed(choose.randrange(1000))
    return [torch.rand(*shape, dtype=torch.float64) for shape in shapes]


def two_layers(choose):
    first, second = drawn(choose, (5, 3), (5, 3))
    tokens = torch.tensor([[choose.randrange(5) for _ in range(4)] for _ in range(2)])
    return first, second, tokens, tokens.flip(1)


def deferred_layers(choose):
    deep = [2] * choose.randint(0, 2)
    return [
        drawn(choose, (*deep, 3, 2), (*deep, 3, 4), (2, 4)) for _ in range(choose.randint(1, 3))
    ]


def scored(choose):
    (scores,) = drawn(choose, (4, 6))
    return scores * choose.randint(1, 900), torch.tensor([choose.randrange(6) for _ in range(4)])


def compared(choose):
    """Gradients, and what a rank has found: right, off, missing or not a number."""
    right = drawn(choose, (3,), (2, 2))
    found = [tensor + choose.choice([0, 0, 1e-3, -0.4]) for tensor in right]
    at = choose.randrange(2)
    found[at] = choose.choice([None, found[at], found[at] * math.nan])
    return found, right


def routed(choose):
    x, weight = drawn(choose, (7, 3), (7,))
    chosen = torch.tensor([choose.randrange(2) for _ in range(7)])
    return x, chosen, weight, torch.tensor([0.5, choose.random()]), choose.randint(1, 8)


INPUTS = {
    "laundry_minutes": lambda c: (c.randint(1, 50), c.randint(1, 60), c.randint(1, 60)),
    "own_gpipe": lambda c: (c.randint(1, 6), c.randint(1, 9)),
    "microbatches_needed": lambda c: (c.randint(1, 40), c.randint(1, 99) / 100),
    "most_microbatches": lambda c: (
        c.choice(["gpipe", "1f1b"]), c.randint(1, 9), c.randint(1, 20), c.randint(1, 20),
    ),
    "version": lambda c: (c.randint(0, 20), rank := c.randint(0, 5), c.randint(rank + 1, 7)),
    "best_cut": cut_of,
    "spare_ranks": ranks_of,
    "best": lambda c: (
        p := c.choice([2, 3, 4]), 4 * p, *(c.randint(1, 40) * 1.37 for _ in "FB"), c.random() * 9,
    ),
    "held_bytes": held,
    "files": opened,
    "place": placed,
    "share": losses,
    "cut_by_cost": headed,
    "to_blame": waits,
    "groups_for_chat": lambda c: (c.randint(1, 40),),
    "stage_times": timed,
    "gradients_by_hand": two_layers,
    "input_half": deferred_layers,
    "split_loss": scored,
    "difference": compared,
    "layer_ends": lambda c: drawn(c, (2, 3), (2, 3)),
    "mix": routed,
    "gpus_needed": lambda c: (
        c.randint(1, 99) * 1e9, c.randint(1, 20) * 1e11, c.randint(30, 200), c.randint(2, 9) * 1e14,
    ),
}  # fmt: skip


def in_two_pieces(gradients_by_hand):
    def outcome(first, second, tokens, targets):
        first, second = first.requires_grad_(), second.requires_grad_()
        received = gradients_by_hand(
            lambda ids: torch.nn.functional.embedding(ids, first),
            lambda x: x @ second.T,
            tokens,
            targets,
        )
        return received.grad, first.grad, second.grad

    return outcome


def in_two_halves(input_half, weight_half):
    def outcome(*layers):
        deferred, gradients = [], []
        weights = [weight.requires_grad_() for _, _, weight in layers]
        with torch.no_grad():
            for _ in range(2):  # micro-batches
                gradients += [input_half(*layer, deferred) for layer in layers]
                weight_half(deferred)
        return gradients, [weight.grad for weight in weights], deferred

    return outcome


def of_one_rank(difference):
    def outcome(found, right):
        with mock.patch("torch.distributed.all_reduce"):
            return difference(found, right)

    return outcome


def doubled_at(layer_ends):
    """What the two ends of a layer make of x and of a gradient, where a sum doubles."""

    def outcome(x, gradient):
        made = []
        for end in layer_ends(lambda tensor: 2 * tensor):
            y = end(x.requires_grad_())
            made += [y, *torch.autograd.grad(y, x, gradient)]
        return made

    return outcome


def through_one_rank(mix):
    def outcome(x, chosen, weight, losses, sequences):
        def exchange(tokens, sent, received):
            assert sent == received == chosen.bincount(minlength=2).tolist()
            return tokens

        counts, expert = (lambda sent: sent), (lambda tokens: 3 * tokens)
        return mix(x, chosen, weight, expert, counts, exchange, losses, sequences)

    return outcome


# How the answers are compared, where it is not by what the function returns.
OUTCOMES = {
    "gradients_by_hand": in_two_pieces,
    "input_half": in_two_halves,
    "difference": of_one_rank,
    "layer_ends": doubled_at,
    "mix": through_one_rank,
    "split_loss": lambda f: lambda scores, targets: f(scores, targets, 0, lambda x, kind: x),
    "best_cut": lambda f: lambda seconds, stages: slowest(seconds, f(seconds, stages)),
    "spare_ranks": lambda f: lambda seconds, ranks: most(seconds, f(seconds, ranks)),
    "cut_by_cost": lambda f: lambda layers, head, stages: of_cut(f(layers, head, stages), head),
}


def slowest(seconds, cut):
    ends = [sum(cut[: at + 1]) for at in range(len(cut))]
    return ends[-1], max(sum(seconds[end - n : end]) for n, end in zip(cut, ends))


def most(seconds, ranks):
    return sum(ranks), max(own / more for own, more in zip(seconds, ranks, strict=True))


def of_cut(cut, head):
    return len(cut), sum(cut), min(cut) > 0, max(*cut[:-1], cut[-1] + head)


def same(one, other):
    """Whether two outcomes are equal; floats are to 1e-9, relative."""
    if isinstance(other, torch.Tensor):
        return (
            isinstance(one, torch.Tensor)
            and one.shape == other.shape
            and torch.allclose(one, other)
        )
    if isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == (other if isinstance(other, str) else pytest.approx(other, rel=1e-9))


def outcomes_of(functions, name, cases):
    outcome, found = OUTCOMES.get(name, lambda function: function)(*functions), []
    for arguments in cases:
        try:
            found.append(outcome(*copy.deepcopy(arguments)))
        except (
            ArithmeticError,
            AssertionError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            found.append(f"{error!r}")
    return found


def slip(answer, seed):
    """A changed `answer`, or None if nothing has changed."""
    try:
        text = (slipped if seed % 2 else mutated)(answer, seed)
    except IndexError:  # nothing of that kind to change
        return None
    return None if text == ast.unparse(ast.parse(answer)) else text


# So many questions, and more, were once all that a check asked; 30 where none is named.
KNOWN = {"version": 80, "place": 40, "held_bytes": 40, "stage_times": 280, "groups_for_chat": 7}
MORE_CASES = [key for key in FUNCTIONS if key[0].startswith("lesson_") and key[2] in INPUTS]
ONE_CASE = {"gradients_by_hand", "input_half", "split_loss", "layer_ends", "mix"}


@pytest.mark.parametrize(
    "key", [key for key in MORE_CASES if key[2] not in ONE_CASE], ids=lambda key: key[2]
)
def test_an_answer_to_the_first_questions_alone_is_not_praised(key, tmp_path, capsys):
    (answer, before), name = FUNCTIONS[key], key[2]
    (right,) = asked(tmp_path, key, f"{before}\n{answer}")
    assert "Right: " in capsys.readouterr().out
    results = []

    def memory(*question):
        if len(results) < KNOWN.get(name, 30):
            results.append(right(*question))
        return results[-1]

    getattr(importlib.import_module(f"course.checks.{key[0]}"), key[1])(memory)
    assert capsys.readouterr().out.startswith("Not yet: ")


def test_most_functions_are_tried():
    names = {name for key in FUNCTIONS for name in key[2:]}
    assert set(INPUTS) < names and len(INPUTS) >= 20


TRIED = {key: found for key, found in FUNCTIONS.items() if key[2] in INPUTS}


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("key", TRIED, ids=[f"{m}-{name}" for m, _, name, *_ in TRIED])
def test_a_slip_that_a_check_praises_changes_no_answer(key, seeds, tmp_path, capsys):
    (answer, before), name = TRIED[key], key[2]
    choose = random.Random(name)
    cases = [INPUTS[name](choose) for _ in range(CASES)]
    right = outcomes_of(asked(tmp_path, key, f"{before}\n{answer}"), name, cases)
    for text in {slip(answer, seed) for seed in seeds} - {None}:
        capsys.readouterr()
        functions = asked(tmp_path, key, f"{before}\n{text}")
        if "Right: " in capsys.readouterr().out:
            assert same(outcomes_of(functions, name, cases), right), text
