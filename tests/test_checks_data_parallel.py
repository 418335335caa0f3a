"""The checks of lesson 10 know a stub, the right answer and typical wrong ones."""

import pytest

from course.checks import lesson_10
from course.checks.answer import NOT_ATTEMPTED

SLOW = "four nodes, one slow card each"
RIGHT = {
    ("1.3 billion", "one node"): "data parallel",
    ("1.3 billion", "four nodes"): "hybrid",
    ("1.3 billion", SLOW): "4 x 8",
    ("6.6 billion", "one node"): "sharded",
    ("6.6 billion", "four nodes"): "sharded",
    ("6.6 billion", SLOW): "4 x 8",
}


def answer_to(check, capsys, answer):
    check(answer)
    return capsys.readouterr().out.strip()


@pytest.mark.parametrize("check", [lesson_10.peers_of, lesson_10.share_of_loss])
def test_an_untouched_stub_is_not_attempted_yet(check, capsys):
    assert answer_to(check, capsys, lambda *arguments: ...) == NOT_ATTEMPTED


def test_an_untouched_table_is_not_attempted_yet(capsys):
    assert answer_to(lesson_10.choices, capsys, dict.fromkeys(RIGHT, ...)) == NOT_ATTEMPTED


def test_right_answers_are_right(capsys):
    def peers(rank, num_ranks, replicas):
        return range(rank % (num_ranks // replicas), num_ranks, num_ranks // replicas)

    for check, answer in [
        (lesson_10.peers_of, peers),
        (lesson_10.share_of_loss, lambda losses, counts: sum(losses) / sum(counts)),
        (lesson_10.choices, RIGHT),
    ]:
        assert answer_to(check, capsys, answer).startswith("Right: ")


def own_pipeline(rank, num_ranks, replicas):
    ranks = num_ranks // replicas
    return range(rank // ranks * ranks, rank // ranks * ranks + ranks)


def others_only(rank, num_ranks, replicas):
    ranks = num_ranks // replicas
    return [peer for peer in range(rank % ranks, num_ranks, ranks) if peer != rank]


@pytest.mark.parametrize(
    ("peers", "sentence"),
    [
        (own_pipeline, "its own pipeline: those ranks have other stages"),
        (others_only, "the rank itself adds its own gradient, too"),
        (lambda rank, n, r: range(rank % r, n, r), "not by the replicas"),
        (lambda rank, n, r: list(range(rank % (n // r), n, n // r))[::-1], "in the wrong order"),
        (lambda rank, n, r: rank, "return a list of ranks, not 0"),
        (lambda rank, n, r: ["rank", 2], "return a list of ranks, not ['rank', 2]"),
        (lambda rank, n, r: [0], "its stages are on"),
    ],
)
def test_peers_of_explains(peers, sentence, capsys):
    answer = answer_to(lesson_10.peers_of, capsys, peers)
    assert answer.startswith("Not yet: ") and sentence in answer


def weighted_mean(losses, counts):
    return sum(losses) / len(losses) * len(losses) / sum(counts)  # right, unless there are none


@pytest.mark.parametrize(
    ("share", "sentence"),
    [
        (lambda losses, counts: sum(losses) / max(len(losses), 1) / len(counts), "mean of means"),
        (weighted_mean, "and then it adds 0"),
        (lambda losses, counts: sum(losses) / max(len(losses), 1), "as many losses as there are"),
        (lambda losses, counts: sum(losses), "would take a longer step"),
        (
            lambda losses, counts: sum(losses) / len(counts),
            "one process with the whole batch has 5",
        ),
    ],
)
def test_share_of_loss_explains(share, sentence, capsys):
    answer = answer_to(lesson_10.share_of_loss, capsys, share)
    assert answer.startswith("Not yet: ") and sentence in answer


@pytest.mark.parametrize(
    ("model", "machine", "pick", "sentence"),
    [
        ("6.6 billion", "one node", "data parallel", "cannot be done, 120 GB do not fit"),
        ("6.6 billion", SLOW, "sharded", "GB that leave each node"),
        ("6.6 billion", "four nodes", "4 x 8", "how long its ranks wait"),
        ("6.6 billion", "one node", "tensor 8", "GB that each GPU sends within the layers"),
        ("6.6 billion", "one node", "pipeline", "there is no way called 'pipeline'"),
        ("6.6 billion", "one node", ["sharded"], "there is no way called ['sharded']"),
        ("1.3 billion", "one node", ..., "is still open"),
    ],
)
def test_choices_explains(model, machine, pick, sentence, capsys):
    answer = answer_to(lesson_10.choices, capsys, {**RIGHT, (model, machine): pick})
    assert answer.startswith("Not yet: ") and sentence in answer


@pytest.mark.parametrize("pick", ["sharded", "hybrid"])
@pytest.mark.parametrize("model", ["1.3 billion", "6.6 billion"])
def test_choices_accepts_every_way_within_the_error_of_a_forecast(model, pick, capsys):
    """An engineer's "sharded" was once rejected on a fast network, for 8 % of a wrong model."""
    answer = answer_to(lesson_10.choices, capsys, {**RIGHT, (model, "four nodes"): pick})
    assert answer.startswith("Right: ")


def test_choices_wants_every_pair_in_a_dictionary(capsys):
    assert "is a dictionary" in answer_to(lesson_10.choices, capsys, "sharded")
    assert "nothing is chosen for 1.3 billion, one node" in answer_to(
        lesson_10.choices, capsys, {("6.6 billion", "one node"): "sharded"}
    )
