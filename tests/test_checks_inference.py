"""Lesson 11b's checks answer wrong decode loops on real ranks, each with what is wrong."""

import collections  # noqa: F401 - which an answer uses on the ranks

import pytest

from course.building.examining import Observed, Rank
from course.checks import lesson_11b as check
from course.checks.build_words import Words
from course.launch import PRELOAD

PRELOAD.extend(["torch.distributed.checkpoint", "tokenizers"])


def right(rank, last, first, count, forward, send, receive):
    texts = {group: [] for group in first}
    for turn in range(count):
        for group in first:
            if rank > 0:
                x = receive(rank - 1)
            elif turn == 0:
                x = first[group]
            else:
                x = receive(last)
                texts[group].append(x)
            send(forward(group, x), rank + 1 if rank < last else 0)
    if rank == 0:
        for group in first:
            texts[group].append(receive(last))
    return texts


def texts_in_arrays(rank, last, first, count, forward, send, receive):
    texts = right(rank, last, first, count, forward, send, receive)  # noqa: F821
    makers = torch.tensor, collections.deque, tuple, list  # noqa: F821
    return {group: make(texts[group]) for group, make in zip(first, makers)}


def kept_on_the_last_rank(rank, last, first, count, forward, send, receive):
    texts = {group: [] for group in first}
    for turn in range(count):
        for group in first:
            x = receive(rank - 1) if rank else receive(last) if turn else first[group]
            y = forward(group, x)
            if rank == last:
                texts[group].append(y)
            send(y, rank + 1 if rank < last else 0)
    for _ in first if rank == 0 else []:
        receive(last)
    return texts


def one_list_for_all_groups(rank, last, first, count, forward, send, receive):
    texts = right(rank, last, first, count, forward, send, receive)  # noqa: F821
    return dict.fromkeys(texts, [token for text in texts.values() for token in text])


def no_layers_in_the_middle(rank, last, first, count, forward, send, receive):
    whole = forward
    forward = whole if rank in (0, last) else lambda group, x: x
    return right(rank, last, first, count, forward, send, receive)  # noqa: F821


def groups_reversed_on_rank_0(rank, last, first, count, forward, send, receive):
    texts = {group: [] for group in first}
    for turn in range(count):
        for group in reversed(first) if turn and rank == 0 else first:
            x = receive(rank - 1) if rank else receive(last) if turn else first[group]
            texts[group] += [x] if turn else []
            send(forward(group, x), rank + 1 if rank < last else 0)
    for group in first if rank == 0 else []:
        texts[group].append(receive(last))
    return texts


def stub(rank, last, first, count, forward, send, receive):
    texts = {group: [] for group in first}
    ...
    return texts


def one_group_at_a_time(rank, last, first, count, forward, send, receive):
    texts = {group: [] for group in first}
    for turn in range(count):
        for group in first:
            if rank > 0:
                x = receive(rank - 1)
            else:
                x = texts[group][-1] if turn else first[group]
            send(forward(group, x), rank + 1 if rank < last else 0)
            if rank == 0:
                texts[group].append(receive(last))
    return texts


def all_tokens_before_the_next_pass(rank, last, first, count, forward, send, receive):
    texts = {group: [] for group in first}
    for turn in range(count):
        for group in first:
            x = receive(rank - 1) if rank else texts[group][-1] if turn else first[group]
            send(forward(group, x), rank + 1 if rank < last else 0)
        for group in first if rank == 0 else []:
            texts[group].append(receive(last))
    return texts


def all_activations_before_the_first_forward(rank, last, first, count, forward, send, receive):
    if rank == 0:
        return right(rank, last, first, count, forward, send, receive)  # noqa: F821
    for _ in range(count):
        for group, x in [(group, receive(rank - 1)) for group in first]:
            send(forward(group, x), rank + 1 if rank < last else 0)


def outputs_sent_one_turn_late(rank, last, first, count, forward, send, receive):
    if rank != 0:
        return right(rank, last, first, count, forward, send, receive)  # noqa: F821
    texts, kept = {group: [] for group in first}, []
    for group in first:
        send(forward(group, first[group]), 1)
    for turn in range(count):
        for group in first:
            texts[group].append(receive(last))
            if kept:
                send(kept.pop(), 1)
            if turn < count - 1:
                kept.append(forward(group, texts[group][-1]))
    return texts


def everybody_waits_first(rank, last, first, count, forward, send, receive):
    texts = {group: [] for group in first}
    for _ in range(count):
        for group in first:
            x = receive(rank - 1 if rank else last)
            send(forward(group, x), rank + 1 if rank < last else 0)
    return texts


def always_the_first_token(rank, last, first, count, forward, send, receive):
    texts = {group: [] for group in first}
    for _ in range(count):
        for group in first:
            x = receive(rank - 1) if rank > 0 else first[group]
            send(forward(group, x), rank + 1 if rank < last else 0)
    if rank == 0:
        for _ in range(count):
            for group in first:
                texts[group].append(receive(last))
    return texts


def given_token_returned(rank, last, first, count, forward, send, receive):
    texts = right(rank, last, first, count, forward, send, receive)  # noqa: F821
    return {group: [first[group], *tokens[:-1]] for group, tokens in texts.items()}


def last_tokens_left_behind(rank, last, first, count, forward, send, receive):
    texts = {group: [] for group in first}
    for turn in range(count):
        for group in first:
            x = receive(rank - 1) if rank else receive(last) if turn else first[group]
            if rank == 0 and turn:
                texts[group].append(x)
            send(forward(group, x), rank + 1 if rank < last else 0)
    return texts


def a_group_for_each_rank(rank, last, first, count, forward, send, receive):
    first = {group: first[group] for group in range(last + 1)}
    return right(rank, last, first, count, forward, send, receive)  # noqa: F821


def rank_2_is_the_last(rank, last, first, count, forward, send, receive):
    def receive_from(source):
        return receive(2 if rank == 0 else source)

    return right(rank, last, first, count, forward, send, receive_from)  # noqa: F821


def sends_beyond_the_last_rank(rank, last, first, count, forward, send, receive):
    send(forward(0, receive(rank - 1) if rank else first[0]), rank + 1)


def asks_for_a_group_that_is_not_there(rank, last, first, count, forward, send, receive):
    return first[7]


@pytest.mark.parametrize(
    ("decode", "words"),
    [
        (right, ["Right"]),
        (texts_in_arrays, ["Right"]),
        (kept_on_the_last_rank, ["group 0 has no token: is it begun, and does rank 0 keep each"]),
        (one_list_for_all_groups, ["has 12 tokens instead of 4", "in a list of its own"]),
        (stub, ["Not attempted yet"]),
        (one_group_at_a_time, ["Not yet", "more than 1 of 3 groups"]),
        (all_tokens_before_the_next_pass, ["Not yet", "rank 0 had only 0 of 3 groups under way"]),
        (
            all_activations_before_the_first_forward,
            ["rank 1 waits for the next message", "an activation that has not gone through"],
        ),
        (
            outputs_sent_one_turn_late,
            ["rank 0 waits for the next message while it holds an output that it has not sent"],
        ),
        (
            everybody_waits_first,
            ["Not yet: deadlock: rank 0 waits at line 5 of everybody_waits_first"],
        ),
        (
            no_layers_in_the_middle,
            ["rank 1 runs 0 forwards: each rank runs 12, one for each new token of each group"],
        ),
        (
            groups_reversed_on_rank_0,
            [
                "forward 3 of rank 1 is for group 0, that of rank 0 for group 2: what arrives belongs"
            ],
        ),
        (always_the_first_token, ["Not yet", "token", "group 0", "one process chooses"]),
        (
            last_tokens_left_behind,
            [
                "line 8 of last_tokens",
                "what rank 0 never receives, and rank 0 has already returned",
            ],
        ),
        (given_token_returned, ["Not yet", "group 0 begins with the token that was given"]),
        (
            a_group_for_each_rank,
            ["Not yet: on 2 ranks with 4 groups: the texts have no group 2"],
        ),
        (rank_2_is_the_last, ["on 2 ranks with 4 groups: line 3", "receives from rank 2, but"]),
        (sends_beyond_the_last_rank, ["Not yet", "rank 2 sends to rank 3", "for rank 0"]),
        (asks_for_a_group_that_is_not_there, ["Not yet", "line 2", "KeyError: 7"]),
    ],
)
def test_a_decode_loop_is_answered_by_what_it_did_on_three_ranks(decode, words, capsys):
    check.decode_loop(decode)
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    for word in words:
        assert word in said


@pytest.mark.parametrize("left", range(3))
def test_a_rank_that_left_is_named_whichever_rank_waits_first(left):
    """Each rank waits for the one after it, and so for the one that has returned."""
    observed = Observed([Rank(number) for number in range(3)], stuck=True)
    observed.note({"rank": left, "event": "done"})
    for rank in ((left + 1) % 3, (left + 2) % 3):
        message = ["send", (rank + 1) % 3, "0", 1]
        observed.note({"rank": rank, "event": "waits", "message": message, "at": None})
    assert observed.nobody_can_go_on()
    told = Words(observed, {"sources": []}).transport()
    assert f"and rank {left} has already returned: a receive is missing there" in told


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (lambda p: p if 24 + p <= 1000 / 30 else 0, "Right"),
        (lambda p: p, "takes the hop back to the first stage, and fewer groups"),
        (lambda p: 1 if p < 10 else 0, "more groups than 1 write more in all"),
        (lambda p: 0, "you say 0, but with 1 group each text gets 41.7 tokens per second"),
        (lambda p: p + 1, "from 0 to"),
        (lambda p: ..., "Not attempted"),
    ],
)
def test_the_groups_of_a_chat_are_checked_against_the_simulator(groups, words, capsys):
    check.groups_for_chat(groups)
    assert words in capsys.readouterr().out
