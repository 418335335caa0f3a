"""Lesson 11c's checks answer wrong cost models, choices and numbers of GPUs, each in a sentence."""

import math

import numpy
import pytest

from course.checks import lesson_11c as check
from course.checks.answer import NOT_ATTEMPTED
from course.checks.lesson_11c import RANKS, right_times

SLOW = "four nodes, one slow card each"
RIGHT = {
    ("1.3 billion", "one node"): "data parallel",
    ("1.3 billion", "four nodes"): "hybrid",
    ("1.3 billion", SLOW): "4 x 8",
    ("6.6 billion", "one node"): "sharded",
    ("6.6 billion", "four nodes"): "sharded",
    ("6.6 billion", SLOW): "4 x 8",
}


def answer_to(question, capsys, answer):
    question(answer)
    return capsys.readouterr().out.strip()


def test_untouched_stubs_are_not_attempted_yet(capsys):
    for question in (check.stage_cost, check.perform, check.gpus_needed):
        assert answer_to(question, capsys, lambda *arguments: ...) == NOT_ATTEMPTED
    assert answer_to(check.choices, capsys, dict.fromkeys(RIGHT, ...)) == NOT_ATTEMPTED


def gpus(factor=8.0, seconds=86400, to_nodes=lambda n: 8 * math.ceil(n / 8)):
    return lambda p, t, days, x: to_nodes(factor * t * p / (days * seconds * x))


def test_right_answers_are_right(capsys):
    for question, answer in [(check.choices, RIGHT), (check.gpus_needed, gpus())]:
        assert answer_to(question, capsys, answer).startswith("Right: ")


# The cost of a stage.


def test_the_right_costs_choose_a_cut_that_beats_the_even_one_by_a_quarter(capsys):
    said = answer_to(check.stage_cost, capsys, right_times)
    assert said.startswith("Right: your costs cut 3,4,4,1")
    assert "780 ms in place of the 1032 ms of 3,3,3,3, 24% less" in said


@pytest.mark.parametrize("pair", [numpy.array, iter])
def test_two_numbers_are_a_pair_whatever_they_are_in(pair, capsys):
    said = answer_to(check.stage_cost, capsys, lambda *case: pair(right_times(*case)))
    assert said.startswith("Right: your costs cut 3,4,4,1")


def without(end):
    return lambda times, *part: right_times(times._replace(**{end: (0, 0)}), *part)


def last_one_included(times, first, last):
    forward, backward = right_times(times, first, last)
    return forward + times.layer[0], backward + times.layer[1]


def head_everywhere(times, first, last):
    forward, backward = right_times(times, first, last)
    missing = last < times.layers
    return forward + missing * times.head[0], backward + missing * times.head[1]


def nothing_run_again(times, first, last):
    return right_times(times._replace(recompute=False), first, last)


def all_run_again(times, first, last):
    forward, backward = nothing_run_again(times, first, last)
    return forward, backward + forward * times.recompute


def one_end_only(times, first, last):
    ends = {} if first or last < times.layers else {"head": (0, 0)}
    return right_times(times._replace(**ends), first, last)


def even_stages_only(times, first, last):
    """Right for a cut with equal stages and for all layers together, wrong for the lesson's cuts."""
    whole = last - first == times.layers
    layer = [
        each * (1 if whole else times.layers // RANKS / (last - first)) for each in times.layer
    ]
    return right_times(times._replace(layer=layer), first, last)


def embedding_twice(times, first, last):
    forward, backward = right_times(times, first, last)
    again = first == 1
    return forward + again * times.embedding[0], backward + again * times.embedding[1]


def backward_is_two_forwards(times, first, last):
    forward, _ = right_times(times, first, last)
    return forward, 2 * forward


@pytest.mark.parametrize(
    ("stage_times", "sentence"),
    [
        (without("head"), "this stage also makes the scores, which takes 15 ms more"),
        (without("embedding"), "this stage also looks the tokens up, 3 ms"),
        (
            one_end_only,
            "layers 0 to 7 of 8: you say 80 and 160 ms; this stage also makes the scores",
        ),
        (last_one_included, "`last` is not one of them, so there are 2"),
        (head_everywhere, "the head is on the last stage only"),
        (nothing_run_again, "forward a second time before their backward: 20 ms more"),
        (all_run_again, "only the layers run forward again"),
        (backward_is_two_forwards, "it need not be two forwards"),
        (even_stages_only, "layer 0 of 8: you say 20 and 40 ms; its layers and ends add up to 10"),
        (
            embedding_twice,
            "layer 1 of 8: you say 13 and 27 ms; the embedding is on the first stage",
        ),
        (
            lambda *case: map(int, right_times(*case)),
            "its layers and ends add up to",
        ),
        (lambda *case: right_times(*case)[::-1], "40 and 20 ms; the forward comes first"),
        (
            lambda times, first, last: (
                right_times(times, first, last)[0],
                right_times(times._replace(recompute=False), first, last)[1]
                + times.recompute * times.layer[0],
            ),
            "23 and 67 ms, 20 of these 67 in the layers' second forward",
        ),
        (lambda times, first, last: (1, 1), "add up to 20 and 40 ms"),
        (lambda times, first, last: 1, "return two numbers"),
        (lambda times, first, last: ("a", 1), "your function returned 'a', which is not a number"),
    ],
)
def test_a_wrong_cost_model_is_told_what_it_leaves_out(stage_times, sentence, capsys):
    said = answer_to(check.stage_cost, capsys, stage_times)
    assert said.startswith("Not yet: ") and sentence in said and "\n" not in said


@pytest.mark.parametrize("question", [check.stage_cost, check.perform])
def test_a_cost_that_no_float_can_hold_is_named(capsys, question):
    said = answer_to(question, capsys, lambda times, first, last: (10**400, 1))
    assert said == "Not yet: your function returned a number of more than 308 digits"


@pytest.mark.further
@pytest.mark.processes
def test_real_ranks_perform_the_even_cut_and_a_shorter_one(capsys, monkeypatch):
    short = check.Times(4, layer=(2, 4), embedding=(0, 0), head=(4, 8))
    monkeypatch.setattr(check, "MEASURED", short)
    monkeypatch.setattr(check, "EVEN", [2, 2])
    monkeypatch.setattr(check, "RANKS", 2)
    monkeypatch.setattr(check, "best_cut", lambda times_of: [3, 1])
    _, *rows = answer_to(check.perform, capsys, right_times).splitlines()
    assert [row.split()[:2] for row in rows] == [["even", "2,2"], ["yours", "3,1"]]
    predicted, performed = zip(*((int(row.split()[3]), int(row.split()[6])) for row in rows))
    assert predicted[1] < predicted[0]
    assert all(after > 0.98 * before for before, after in zip(predicted, performed))


# Which way, and how many GPUs.


@pytest.mark.parametrize(
    ("model", "machine", "pick", "sentence"),
    [
        ("6.6 billion", "one node", "data parallel", "cannot be done, 120 GB do not fit"),
        ("6.6 billion", SLOW, "sharded", "GB that leave each node"),
        ("6.6 billion", "four nodes", "1 x 32", "how long its ranks wait"),
        ("6.6 billion", "one node", "pipeline", "there is no way called 'pipeline'"),
        ("6.6 billion", "one node", ["sharded"], "there is no way called ['sharded']"),
        ("1.3 billion", "one node", ..., "is still open"),
    ],
)
def test_choices_explains(model, machine, pick, sentence, capsys):
    answer = answer_to(check.choices, capsys, {**RIGHT, (model, machine): pick})
    assert answer.startswith("Not yet: ") and sentence in answer


@pytest.mark.parametrize(
    ("model", "pick"),
    [
        *[
            (model, pick)
            for model in ("1.3 billion", "6.6 billion")
            for pick in ("sharded", "hybrid")
        ],
        ("1.3 billion", "16 x 2"),
        ("6.6 billion", "4 x 8"),
    ],
)
def test_choices_accepts_every_way_within_the_error_of_a_forecast(model, pick, capsys):
    """An engineer's "sharded" was once rejected on a fast network, for 8 % of a wrong model."""
    answer = answer_to(check.choices, capsys, {**RIGHT, (model, "four nodes"): pick})
    assert answer.startswith("Right: ")


@pytest.mark.parametrize(("model", "machine"), RIGHT)
def test_choices_praises_what_holds_for_every_right_answer(model, machine, capsys):
    """With the slow card only pipelines are right, and sharding is right wherever it is missing."""
    accepted = {}
    for name, way in check.ways_of(model, machine).items():
        said = answer_to(check.choices, capsys, {**RIGHT, (model, machine): name})
        accepted |= {name: way.plan.ranks} if said.startswith("Right: ") else {}
    assert min(accepted.values()) > 1 if machine == SLOW else "sharded" in accepted


def test_choices_wants_every_pair_in_a_dictionary(capsys):
    assert "is a dictionary" in answer_to(check.choices, capsys, "sharded")
    assert "nothing is chosen for 1.3 billion, one node" in answer_to(
        check.choices, capsys, {("6.6 billion", "one node"): "sharded"}
    )


@pytest.mark.parametrize(
    ("needed", "sentence"),
    [
        (gpus(to_nodes=math.ceil), "round up"),
        (gpus(factor=6.0), "6 T P"),
        (gpus(to_nodes=lambda n: math.ceil(n / 8)), "which is the number of nodes"),
        (gpus(seconds=24), "a day has 86400 seconds"),
        (gpus(seconds=1440), "a day has 86400 seconds, and 34 days have 2937600"),
        (gpus(factor=1.0), "or the 8 of 8 T P is missing"),
        (gpus(to_nodes=lambda n: 8 * math.floor(n / 8)), "a node too few"),
        (gpus(to_nodes=lambda n: 8 * round(n / 8)), "a node too few"),
        (gpus(to_nodes=lambda n: 8 * (n // 8 + 1)), "you say 16, a node too many: 8 GPUs"),
        (
            gpus(to_nodes=lambda n: 64 * math.ceil(n / 64)),
            "operations in 10 days are the work of 3480 GPUs",
        ),
        (gpus(to_nodes=lambda n: 8 * round(n / 8 + 0.5)), "8 GPUs are enough"),
        (lambda p, t, days, x: gpus()(p, t, days, 1 / x), "the fewer GPUs it takes"),
        (lambda p, t, days, x: gpus()(p, t, days // 2 * 2, x), "operations in 131.5 days are"),
        (gpus(to_nodes=lambda n: max(16, 8 * math.ceil(n / 8))), "you say 16, a node too many"),
    ],
)
def test_gpus_needed_explains(needed, sentence, capsys):
    answer = answer_to(check.gpus_needed, capsys, needed)
    assert answer.startswith("Not yet: ") and sentence in answer
