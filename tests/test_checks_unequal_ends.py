"""Lesson 10c's checks answer wrong losses on three real ranks, each with what was left out."""

import inspect
import math
import random
import re

import numpy
import pytest
import torch
from further import SEEDS

from course.checks import lesson_10c as check
from course.checks import lesson_10c_on_ranks as on_ranks
from pipeline.model import cut_evenly


def right(scores, targets, first, all_reduce):
    rows = torch.arange(len(targets))
    here = (targets >= first) & (targets < first + scores.shape[1])
    own = (targets - first).where(here, 0)
    largest = all_reduce(scores.max(1).values, "max")
    exponentials = (scores - largest[:, None]).exp()
    total = all_reduce(exponentials.sum(1), "sum")
    of_target = all_reduce(scores[rows, own] * here, "sum")
    gradient = exponentials / total[:, None]
    gradient[rows, own] -= here.double()
    return (total.log() + largest - of_target).mean(), gradient / len(targets)


def stub(scores, targets, first, all_reduce): ...


def changed(old, new, count=1):
    """The right program with one thing changed, under the name of this lambda's place."""
    return lambda text: text.replace(old, new, count)


WRONG = {
    "no sum of exponentials": (
        changed('all_reduce(exponentials.sum(1), "sum")', "exponentials.sum(1)"),
        ["rank 0", "this rank's rows alone", "sum of the exponentials"],
    ),
    "no maximum at all": (
        changed('all_reduce(scores.max(1).values, "max")', "0 * scores.max(1).values"),
        ["a thousand times as large", "overflows", "subtract the largest"],
    ),
    "each rank above its own maximum": (
        changed(
            "exponentials = (scores - largest[:, None]).exp()",
            "exponentials = (scores - scores.max(1).values[:, None]).exp()",
        ),
        ["exponentials above different scores"],
    ),
    "its own maximum alone": (
        changed('all_reduce(scores.max(1).values, "max")', "scores.max(1).values"),
        ["rank 0 the loss", "exponentials above different scores"],
    ),
    "its own maximum, also for the target": (
        changed(
            "    exponentials =",
            "    scores, largest = scores - scores.max(1).values[:, None], 0 * largest\n"
            "    exponentials =",
        ),
        ["rank 0 the loss", "exponentials above different scores"],
    ),
    "the maximum is not added again": (
        changed("total.log() + largest", "total.log()"),
        ["the largest score is subtracted from the exponentials alone"],
    ),
    "one maximum for all positions": (
        changed(
            'all_reduce(scores.max(1).values, "max")',
            'all_reduce(scores.max(), "max").expand(len(targets))',
        ),
        ["a thousand times as large", "is -inf", "all exponentials are zero"],
    ),
    "the target is not told": (
        changed('all_reduce(scores[rows, own] * here, "sum")', "scores[rows, own] * here"),
        ["rank 0", "without the score of most targets"],
    ),
    "targets that are not shifted": (
        changed(
            "here = (targets >= first) & (targets < first + scores.shape[1])\n"
            "    own = (targets - first)",
            "here = targets < scores.shape[1]\n    own = targets",
        ),
        ["the loss is that with targets that are not shifted", "column target - first"],
    ),
    "targets that are not shifted, on the right rank": (
        changed("(targets - first).where(here, 0)", "targets.clamp(max=scores.shape[1] - 1)"),
        ["the loss is that with targets that are not shifted"],
    ),
    "a score of each rank for each target": (
        changed("scores[rows, own] * here", "scores[rows, own]"),
        ["a score of every rank for each target", "the others add 0"],
    ),
    "a score of each rank, from the nearest column": (
        changed(
            "scores[rows, own] * here",
            "scores[rows, (targets - first).clamp(0, scores.shape[1] - 1)]",
        ),
        ["a score of every rank for each target"],
    ),
    "a column too early": (
        changed("scores[rows, own] * here", "scores[rows, own - 1] * here"),
        ["the score one column before each target's"],
    ),
    "a column too late": (
        changed("scores[rows, own] * here", "scores[rows, (own + 1) % scores.shape[1]] * here"),
        ["the score one column after each target's"],
    ),
    "no rank has its first column": (
        changed("targets >= first", "targets > first"),
        ["without the targets in the first column of a rank"],
    ),
    "no rank has its last column": (
        changed("first + scores.shape[1])", "first + scores.shape[1] - 1)"),
        ["without the targets in the last column of a rank"],
    ),
    "a column of the next rank": (
        changed(
            "targets < first + scores.shape[1])\n    own = (targets - first)",
            "targets <= first + scores.shape[1])\n"
            "    own = (targets - first).clamp(max=scores.shape[1] - 1)",
        ),
        ["one token too many on each rank", "the next rank"],
    ),
    "a column of the rank before": (
        changed("targets >= first", "targets >= first - 1"),
        ["one token too many on each rank", "the rank before"],
    ),
    "a mean over ranks, too": (
        changed(").mean()", ").mean() / 3"),
        ["the loss is that divided by the number of ranks"],
    ),
    "the sum of the sums": (
        changed("    of_target =", '    total = all_reduce(total, "sum")\n    of_target ='),
        ["the loss is that with the sum of the exponentials added up over the ranks a second time"],
    ),
    "a sum of logarithms": (
        changed(
            'all_reduce(exponentials.sum(1), "sum")',
            'all_reduce(exponentials.sum(1).log(), "sum").exp()',
        ),
        ["the loss is that with the sum of the ranks' logarithms"],
    ),
    "the largest score for a target": (
        changed('scores[rows, own] * here, "sum"', 'scores[rows, own] * here, "max"'),
        ["with the maximum of the ranks' scores for a target"],
    ),
    "the maximum is taken off twice": (
        changed("scores[rows, own] * here", "(scores[rows, own] - largest) * here"),
        ["with the largest score subtracted from the target's, too"],
    ),
    "a gradient of the exponentials": (
        changed("exponentials / total[:, None]", "exponentials"),
        ["gradient is made with the exponentials themselves"],
    ),
    "a gradient with the wrong sign": (
        changed("gradient / len(targets)", "-gradient / len(targets)"),
        ["gradient is -1 times the right one"],
    ),
    "targets used as columns": (
        changed("(targets - first).where(here, 0)", "targets"),
        ["is out of bounds; token t is in column t - first"],
    ),
    "one is subtracted in another column": (
        changed("gradient[rows, own]", "gradient[rows, own - 1]"),
        ["the gradient has its -1 at position 0 in column 2", "the target is in column 3"],
    ),
    "one is subtracted on every rank": (
        changed("-= here.double()", "-= 1"),
        ["gradient is wrong at positions", "on another rank"],
    ),
    "nothing is subtracted": (
        changed("    gradient[rows, own] -= here.double()\n", ""),
        ["gradient is the softmax alone"],
    ),
    "no mean": (changed("gradient / len(targets)", "gradient"), ["6 times the right one"]),
    "a mean over the ranks": (
        changed("gradient / len(targets)", "gradient / 3"),
        ["gradient is 2 times the right one: the loss is a mean of 6"],
    ),
    "a gradient of float32": (
        changed("gradient / len(targets)", "(gradient / len(targets)).float()"),
        ["gradient is right to about seven digits only"],
    ),
    "a sum of losses": (changed(".mean()", ".sum()"), ["return the mean over the positions"]),
    "a softmax of its own": (
        changed("exponentials / total[:, None]", "exponentials / exponentials.sum(1)[:, None]"),
        ["softmax of this rank's rows"],
    ),
    "all scores are added up on each rank": (
        changed(
            "rows =",
            "whole = torch.zeros(len(targets), 50, dtype=scores.dtype)\n"
            "    whole[:, first:first + scores.shape[1]] = scores\n"
            '    scores, first, start = all_reduce(whole, "sum"), 0, first\n'
            "    loss = torch.nn.functional.cross_entropy(scores.requires_grad_(), targets)\n"
            "    loss.backward()\n"
            "    width = 17 - start // 34\n"
            "    return loss, scores.grad[:, start:start + width]\n    rows =",
        ),
        ["all_reduce got 300 numbers", "has 102 scores", "three per position are enough"],
    ),
    "all scores are gathered on each rank": (
        changed(
            "rows =",
            "parts = [torch.empty(6, 17, dtype=scores.dtype) for _ in range(3)]\n"
            "    own = torch.full((6, 17), -torch.inf, dtype=scores.dtype)\n"
            "    own[:, :scores.shape[1]] = scores\n"
            "    dist.all_gather(parts, own)\n"
            "    whole = torch.cat(parts, 1).requires_grad_()\n"
            "    loss = torch.nn.functional.cross_entropy(whole, targets)\n"
            "    loss.backward()\n"
            "    return loss, whole.grad[:, first:first + scores.shape[1]]\n    rows =",
        ),
        ["nothing went through all_reduce"],
    ),
    "four sums": (
        changed("    gradient =", '    all_reduce(total, "sum")\n    gradient ='),
        ["with 4 calls", "3 are enough"],
    ),
    "a rank that does not take part": (
        changed(
            'of_target = all_reduce(scores[rows, own] * here, "sum")',
            'of_target = all_reduce(scores[rows, own] * here, "sum") if here.any() and first else 0',
        ),
        ["Not yet: rank 1 waits at line", "all_reduce, and rank 0 has returned without it"],
    ),
    "a rank without a target does not take part": (
        changed(
            'of_target = all_reduce(scores[rows, own] * here, "sum")',
            'of_target = all_reduce(scores[rows, own] * here, "sum") if here.any() else 0',
        ),
        ["Not yet: rank", "all_reduce, and rank 2 has returned without it"],
    ),
    "seven digits": (
        changed("    rows =", "    scores = scores.float()\n    rows ="),
        ["the loss is off by", "a part of it a float32"],
    ),
    "no gradient": (changed(", gradient / len(targets)", ""), ["return a pair"]),
    "a gradient that no backward has made": (
        changed(", gradient / len(targets)", ", scores.grad"),
        ["return a pair: the mean loss, and the gradient"],
    ),
    "six positions": (
        changed("gradient / len(targets)", "gradient / 6"),
        ["on 2 ranks, with 5 positions and 37 tokens", "0.8333 times", "a mean of 5"],
    ),
    "room for six positions": (
        changed("rows = torch.arange(len(targets))", "rows = torch.arange(6)"),
        ["on 2 ranks, with 5 positions and 37 tokens: line", "raised IndexError"],
    ),
    "17 columns": (
        changed("first + scores.shape[1])", "first + 17)"),
        ["on 2 ranks, with 5 positions", "the loss"],
    ),
    "an error": (changed("targets - first", "targets - nothing"), ["raised NameError"]),
}


@pytest.fixture
def program(monkeypatch):
    """Let the check read a changed text of `right`."""
    from course.checks import build_text

    plain = build_text.collect

    def give(change):
        def changed(function):
            (*helpers, (name, text)), imports = plain(function)
            return [*helpers, (name, change(text))], imports

        monkeypatch.setattr(build_text, "collect", changed)
        return right

    return give


def said_of(function, capsys):
    check.split_loss(function)
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    return said


def largest_of(scores):
    return scores.max(1).values


def with_a_helper(scores, targets, first, all_reduce):
    return inspect.isclass(all_reduce), all_reduce(largest_of(scores), "max")


def test_the_ranks_have_the_helpers_and_imports_of_the_readers_notebook(capsys):
    assert "on rank 0 the loss is 0.000000" in said_of(with_a_helper, capsys)


def test_the_solution_is_right_and_the_stub_not_attempted(capsys):
    assert said_of(right, capsys).startswith("Right: the loss and the gradient")
    assert said_of(stub, capsys).startswith("Not attempted yet")


def test_no_two_causes_give_the_same_loss():
    whole, targets = on_ranks.draw_scores(), torch.tensor(on_ranks.TARGETS)
    cut = cut_evenly(on_ranks.VOCABULARIES[3], 3)
    slips = on_ranks.losses_of_slips(whole, targets, cut)
    assert list(slips) == list(check.SLIPS)
    right = on_ranks.losses_that_might_be(whole, targets, cut, 0)["right"]
    causes = [{round(loss, 9) for loss in losses} for losses in ([right], *slips.values())]
    assert sum(map(len, causes)) == len(set.union(*causes))


def test_the_arguments_may_have_other_names(program, capsys):
    change = changed("all_reduce", "reduce", count=-1)
    assert said_of(program(change), capsys).startswith("Right: ")


def test_a_loss_that_is_a_python_number_is_right(program, capsys):
    change = changed(".mean(), gradient", ".mean().item(), gradient")
    assert said_of(program(change), capsys).startswith("Right: ")


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_loss_of_a_split_vocabulary_is_answered_by_what_was_left_out(name, program, capsys):
    change, words = WRONG[name]
    said = said_of(program(change), capsys)
    for word in words:
        assert word in said, said


SWAPS = [("+", "-"), ("-", "+"), ('"sum"', '"max"'), ('"max"', '"sum"'), ("/", "*"), ("&", "|"),
         (">=", ">"), ("< ", "<= "), (".log()", ".exp()"), ("first", "0"), ("* here", "")]  # fmt: skip


@pytest.mark.parametrize("seeds", SEEDS)
def test_a_mutation_of_the_solution_is_never_called_right(seeds, program, capsys):
    text = re.sub(r"  #.*", "", inspect.getsource(right))
    body = text.index("rows =")
    sites = [
        (match.start(), old, new)
        for old, new in SWAPS
        for match in re.finditer(re.escape(old), text)
        if match.start() > body
    ]
    random.Random(0).shuffle(sites)
    for place, old, new in [sites[seed] for seed in seeds if seed < len(sites)]:
        mutated = text[:place] + new + text[place + len(old) :]
        said = said_of(program(lambda _, mutated=mutated: mutated), capsys)
        if not harmless(mutated[body:].splitlines(), text[body:].splitlines()):
            assert said.startswith("Not yet: "), f"{old} -> {new} at {place}: {said}"


def harmless(mutated, original):
    """Whether the only changed line is the offset of a maximum, which may be any shared number."""
    (line,) = [new for new, old in zip(mutated, original) if new != old]
    return "largest = all_reduce" in line


def equal_share_rounded(layers, head, stages):
    last = max(1, round((layers + head) / stages - head))
    base, extra = divmod(layers - last, stages - 1)
    return [base + (stage < extra) for stage in range(stages - 1)] + [last]


def equal_share_rounded_up(layers, head, stages):
    last = max(1, math.ceil((layers + head) / stages - head))
    base, extra = divmod(layers - last, stages - 1)
    return [base + (stage < extra) for stage in range(stages - 1)] + [last]


def by_search(layers, head, stages):
    options = range(1, layers - stages + 2)
    last = min(options, key=lambda n: max(-(-(layers - n) // (stages - 1)), n + head))
    base, extra = divmod(layers - last, stages - 1)
    return [base + (stage < extra) for stage in range(stages - 1)] + [last]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (by_search, "Right"),
        (lambda *sizes: [*numpy.array(by_search(*sizes))], "Right"),
        (lambda *sizes: numpy.array(by_search(*sizes)), "Right"),
        (lambda *sizes: map(float, by_search(*sizes)), "Right"),
        (lambda *sizes: dict(enumerate(by_search(*sizes))), "Right"),
        (lambda *sizes: [n + 0.5 for n in by_search(*sizes)], "return a list"),
        (equal_share_rounded, "a cut with 7.80 exists"),
        (equal_share_rounded_up, "a cut with 4.00 exists"),
        (lambda layers, head, stages: ..., "Not attempted"),
        (lambda layers, head, stages: [layers // stages] * stages, "a cut with 3.42 exists"),
        (lambda layers, head, stages: [layers], "has 1 stages"),
        (lambda layers, head, stages: [3, 3, 2, 0], "0 in the smallest stage"),
        (lambda layers, head, stages: 7, "return a list"),
        (lambda layers, head, stages: [2, 2, 2, 1], "[2, 2, 2, 1] has 7 layers in all"),
    ],
)
def test_a_cut_by_cost_is_held_against_the_best_one(function, words, capsys):
    check.cut_by_cost(function)
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("case", [case for case in check.CASES if case[2] < 6])
def test_no_cut_of_all_cuts_is_better_than_the_best_one(case):
    layers, head, stages = case

    def cuts(left, count):
        if count == 1:
            yield [left]
            return
        for n in range(1, left - count + 2):
            for rest in cuts(left - n, count - 1):
                yield [n, *rest]

    best = min(check.slowest_of(cut, head) for cut in cuts(layers, stages))
    assert best == check.best_of(layers, head, stages)
