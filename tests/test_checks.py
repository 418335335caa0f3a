"""Each check knows an untouched stub, the right answer, and three typical wrong ones."""

import math
import sys
from collections import deque
from decimal import Decimal
from fractions import Fraction
from functools import cache, partial
from operator import floordiv, truediv

import numpy
import pytest
import torch

from course.checks import answer as answering
from course.checks import (
    lesson_00,
    lesson_01,
    lesson_02,
    lesson_03,
    lesson_04,
    lesson_04b,
    lesson_07,
    lesson_10,
    lesson_11,
)
from course.checks.answer import NOT_ATTEMPTED
from pipeline.model import cut_evenly, token_loss


def answer_to(check, capsys, *answers):
    check(*answers)
    return capsys.readouterr().out.strip()


def stub(*arguments):
    return ...


CHECKS = [
    lesson_00.laundry,
    lesson_01.backward_in_two_pieces,
    lesson_02.own_gpipe,
    lesson_02.enough_microbatches,
    lesson_03.most_microbatches,
    lesson_04.version_seen,
    lesson_04b.best_cut,
    lesson_04b.spare_ranks,
    lesson_11.to_blame,
    lesson_07.files_to_open,
]


@pytest.mark.parametrize("check", CHECKS)
def test_an_untouched_stub_is_not_attempted_yet(check, capsys):
    assert answer_to(check, capsys, stub) == NOT_ATTEMPTED


def test_an_untouched_number_is_not_attempted_yet(capsys):
    assert answer_to(lesson_00.memory_wall, capsys, ..., 2) == NOT_ATTEMPTED


def test_none_is_an_answer_and_not_called_untouched(capsys):
    for check, answers in (
        (lesson_07.order_of_a_save, [["rename", "write"].sort()]),
        (lesson_00.memory_wall, [12, None]),
    ):
        assert answer_to(check, capsys, *answers).startswith("Not yet: the answer is None")


def test_an_answer_that_raises_gets_its_own_error_and_no_traceback(capsys):
    answer = answer_to(lesson_02.enough_microbatches, capsys, lambda p, m: 1 / 0)
    assert answer == "Not yet: <lambda>(5, 0.25) raised ZeroDivisionError: division by zero"


def test_an_answer_that_exits_is_told_so_too(capsys):
    answer = answer_to(lesson_02.enough_microbatches, capsys, lambda p, x: sys.exit("too many"))
    assert answer == "Not yet: <lambda>(5, 0.25) raised SystemExit: too many"


@pytest.mark.parametrize(
    ("check", "function"),
    [
        (lesson_00.laundry, lambda n, w, d: w + d + (n - 1) * max(w, d)),
        (lesson_10.share_of_loss, lambda losses, counts: sum(losses) / sum(counts)),
    ],
)
def test_a_number_is_right_and_not_if_it_is_off_by_a_millionth(check, function, capsys):
    assert answer_to(check, capsys, function).startswith("Right: ")
    off = answer_to(check, capsys, lambda *case: function(*case) * (1 + 1e-6))
    assert off.startswith("Not yet: ")


def test_an_answer_that_is_no_number_is_told_so(capsys):
    answer = answer_to(lesson_02.enough_microbatches, capsys, lambda p, x: "9")
    assert answer == "Not yet: <lambda> returned '9', which is not a number"


def test_a_function_without_a_return_is_told_so(capsys):
    def minutes(loads, washer, dryer):
        washer + dryer + (loads - 1) * max(washer, dryer)

    answer = answer_to(lesson_00.laundry, capsys, minutes)
    assert answer.startswith("Not yet: minutes(5, 30, 40) returned nothing; is there a return")


def endless_loop(num_ranks, largest):
    m = 1
    while (num_ranks - 1) / (m + num_ranks - 1) > largest:
        pass
    return m


def endless_generator(num_ranks, num_microbatches):
    while True:
        yield "0F0"


def endless_loop_that_catches(num_ranks, largest):
    while True:
        try:
            while num_ranks:
                pass
        except Exception:
            continue


@pytest.mark.timeout(60, method="thread")  # the loop would catch an error
@pytest.mark.parametrize("endless", [endless_loop, endless_loop_that_catches])
def test_a_loop_without_an_end_is_ended(endless, capsys, monkeypatch):
    monkeypatch.setattr(answering, "LONGEST", 0.1)
    said = answer_to(lesson_02.enough_microbatches, capsys, endless)
    assert said.endswith("raised TimeoutError: computed for 0.1 s; does this loop end?")


def test_a_generator_without_an_end_is_ended(capsys):
    said = answer_to(lesson_02.own_gpipe, capsys, endless_generator)
    assert said.endswith("endless_generator(2, 2) gives 1,000,000 values and more; does it end?")


NONSENSE = [
    "nonsense", "0F0\n1F0", [], [1], ["x", "y"], [["0F0"]], {}, -1, 1.5, 1.0, 1e300, 10**400, True,
    float("nan"), float("inf"), 1 + 2j, Fraction(1, 2), torch.zeros(2, 3), object(), iter("ab"),
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS)
def test_nonsense_gets_a_sentence_and_no_traceback(check, capsys):
    for nonsense in NONSENSE:
        for answer in (nonsense, lambda *_, it=nonsense: it, partial(max, nonsense)):
            assert answer_to(check, capsys, answer).startswith("Not yet: ")


def test_nonsense_instead_of_a_number_gets_a_sentence_and_no_traceback(capsys):
    for nonsense in NONSENSE:
        for answers in ((nonsense, 2), (16, nonsense)):
            said = answer_to(lesson_00.memory_wall, capsys, *answers)
            assert said.startswith("Not yet: ")
    said = answer_to(lesson_00.memory_wall, capsys, "16", 2)
    assert said == "Not yet: bytes_per_parameter is '16', which is not a number"


def test_a_number_of_numpy_is_a_number(capsys):
    def most(schedule, num_ranks, room, available):
        return numpy.int64(
            available if schedule == "1f1b" and room >= num_ranks else min(room, available)
        )

    assert answer_to(lesson_03.most_microbatches, capsys, most).startswith("Right: ")


def test_a_decimal_is_a_number(capsys):
    def minutes(loads, washer, dryer):
        return Decimal(max(washer, dryer)) * loads + Decimal(min(washer, dryer))

    assert answer_to(lesson_00.laundry, capsys, minutes).startswith("Right: ")
    said = answer_to(lesson_00.memory_wall, capsys, Decimal(12), Decimal(4))
    assert "4 devices hold" in said.replace("4.0", "4")


def test_a_wrong_fraction_is_explained_as_any_number_is(capsys):
    said = answer_to(lesson_00.laundry, capsys, lambda n, w, d: Fraction(n * (w + d)))
    assert "you say 350 minutes, as if each load waited" in said


@pytest.mark.parametrize(
    ("minutes", "sentence"),
    [
        (lambda n, w, d: n * (w + d), "the washer is free"),
        (lambda n, w, d: n * w + d, "the dryer is the slower machine here"),
        (lambda n, w, d: w + n * d, "the washer is the slower machine here"),
        (lambda n, w, d: n * max(w, d), "the filling is missing"),
        (lambda n, w, d: w + d + n * max(w, d), "one turn too many"),
        (lambda n, w, d: w + d + (n - 2) * max(w, d), "you say 190 minutes, one turn too few"),
        (
            lambda n, w, d: n * min(w, d) + max(w, d),
            "you say 190 minutes, and playing it load by load gives 230",
        ),
        (lambda n, w, d: int(n * max(w, d) + min(w, d)), "you say 79 minutes, and playing it"),
        (lambda n, w, d: w + int(d) + (n - 1) * max(w, int(d)), "1 load, washer 12, dryer 22.5"),
        (
            lambda n, w, d: n * (w + d) if n < 3 else w + d + (n - 1) * max(w, d),
            "2 loads, washer 12, dryer 12: you say 48 minutes",
        ),
        (lambda n, w, d: 100, "playing it load by load gives 230"),
        (lambda n, w, d: min(n, 40) * max(w, d) + min(w, d), "playing it load by load gives 5285"),
        (lambda n, w, d: round((n - 1) * max(w, d) + w + d, 1), "playing it load by load gives"),
    ],
)
def test_laundry_explains(minutes, sentence, capsys):
    answer = answer_to(lesson_00.laundry, capsys, minutes)
    assert answer.startswith("Not yet: ") and sentence in answer


def begun(num_ranks, largest_bubble):
    if num_ranks > 5:
        return 4 * num_ranks
    return ...


def test_dots_that_a_begun_answer_returns_are_no_stub(capsys):
    said = answer_to(lesson_02.enough_microbatches, capsys, begun)
    assert said.startswith("Not yet: ") and "returned `...`" in said


def stub_with_a_name(num_ranks, largest_bubble):
    needed = ...
    return needed


@pytest.mark.parametrize(
    "answer", [lambda *_: ..., partial(stub, 1), cache(stub), stub_with_a_name]
)
def test_a_stub_is_untouched_in_any_form(answer, capsys):
    assert answer_to(lesson_02.enough_microbatches, capsys, answer) == NOT_ATTEMPTED


def hidden_by_a_finally(ranks, idle):
    try:
        return ranks / 0
    finally:
        {}["second"]


def raised_anew(ranks, idle):
    try:
        return ranks / 0
    except ZeroDivisionError:
        raise KeyError("second") from None


@pytest.mark.parametrize(
    "answer, earlier",
    [(hidden_by_a_finally, "ZeroDivisionError: division by zero, and then "), (raised_anew, "")],
)
def test_an_error_that_a_finally_hides_is_told_too(answer, earlier, capsys):
    said = answer_to(lesson_02.enough_microbatches, capsys, answer)
    assert said.endswith(f"raised {earlier}KeyError: 'second'")


@pytest.mark.parametrize(
    ("size", "ranks", "sentence"),
    [
        (4, 2, "that is the weights alone"),
        (8, 3, "momentum keeps one more number"),
        (16, 6, "that is AdamW's"),
        (12, 4.5, "round up"),
        (12, 4, "30e9 x 12 bytes are 360e9"),
        (12, 3, "divide 30e9 x 12 bytes by 80e9"),
    ],
)
def test_memory_wall_explains(size, ranks, sentence, capsys):
    answer = answer_to(lesson_00.memory_wall, capsys, size, ranks)
    assert answer.startswith("Not yet: ") and sentence in answer


def without_requires_grad(first, second, tokens, targets):
    received = first(tokens).detach()
    token_loss(second(received), targets).backward()
    return received


def without_requires_grad_and_handing_back(first, second, tokens, targets):
    output = first(tokens)
    received = output.detach()
    token_loss(second(received), targets).backward()
    output.backward(received.grad)
    return received


def with_a_clone(first, second, tokens, targets):
    output = first(tokens)
    received = output.clone()
    token_loss(second(received), targets).backward(retain_graph=True)
    output.backward(received.grad)
    return received


def without_handing_back(first, second, tokens, targets):
    received = first(tokens).detach().requires_grad_()
    token_loss(second(received), targets).backward()
    return received


def without_cutting(first, second, tokens, targets):
    received = first(tokens)
    received.retain_grad()
    token_loss(second(received), targets).backward()
    return received


def with_another_gradient(first, second, tokens, targets):
    output = first(tokens)
    received = output.detach().requires_grad_()
    token_loss(second(received), targets).backward()
    output.backward(torch.ones_like(output))
    return received


def without_the_second_stage(first, second, tokens, targets):
    return first(tokens)


def returning_what_was_sent(first, second, tokens, targets):
    output = first(tokens)
    received = output.detach().requires_grad_()
    token_loss(second(received), targets).backward()
    output.backward(received.grad)
    return output


def returning_the_gradient(first, second, tokens, targets):
    output = first(tokens)
    received = output.detach().requires_grad_()
    token_loss(second(received), targets).backward()
    output.backward(received.grad)
    return received.grad


def without_a_gradient(first, second, tokens, targets):
    output = first(tokens)
    received = output.detach().requires_grad_()
    token_loss(second(received), targets).backward()
    output.backward()
    return received


def with_two_backwards(first, second, tokens, targets):
    output = first(tokens)
    received = output.detach().requires_grad_()
    loss = token_loss(second(received), targets)
    loss.backward(retain_graph=True)
    loss.backward()
    output.backward(received.grad)
    return received


def asking_too_late(first, second, tokens, targets):
    output = first(tokens)
    received = output.detach()
    scores = second(received)
    received.requires_grad_()
    token_loss(scores, targets).backward()
    output.backward(received.grad)
    return received


def cutting_the_output_itself(first, second, tokens, targets):
    output = first(tokens)
    received = output.detach_().requires_grad_()
    token_loss(second(received), targets).backward()
    output.backward(received.grad)
    return received


def forgetting_at_the_end(first, second, tokens, targets):
    output = first(tokens)
    received = output.detach().requires_grad_()
    token_loss(second(received), targets).backward()
    output.backward(received.grad)
    second.zero_grad()
    return received


def through_the_cut_for_the_first(first, second, tokens, targets):
    output = first(tokens)
    parameters = list(first.parameters())
    found = torch.autograd.grad(token_loss(second(output), targets), parameters)
    for parameter, gradient in zip(parameters, found):
        parameter.grad = gradient
    received = output.detach().requires_grad_()
    token_loss(second(received), targets).backward()
    return received


def through_the_cut_past_the_call(first, second, tokens, targets):
    output = first(tokens)
    output.retain_grad()
    token_loss(type(second).forward(second, output), targets).backward()
    received = output.detach().requires_grad_()
    second(received)
    received.grad = output.grad
    return received


def both_pieces_in_one_call(first, second, tokens, targets):
    output = first(tokens)
    received = output.detach().requires_grad_()
    loss = token_loss(second(received), targets)
    (gradient,) = torch.autograd.grad(loss, received, retain_graph=True)
    torch.autograd.backward([loss, output], [None, gradient])
    return received


def misspelt_and_without_requires_grad(first, second, tokens, targets):
    output = first(tokens)
    received = output.detach()
    token_loss(second(received), targets).backward()
    output.backward(gradent)  # noqa: F821
    return received


def with_forward(first, second, tokens, targets):
    output = first.forward(tokens)
    received = output.data.requires_grad_()
    token_loss(second.forward(received), targets).backward()
    output.backward(received.grad)
    return received


def with_keywords(first, second, tokens, targets):
    output = first(x=tokens)
    received = output.detach().requires_grad_()
    token_loss(second(x=received), targets).backward()
    output.backward(gradient=received.grad)
    return received


def looking_at_the_loss_afterwards(first, second, tokens, targets):
    output = first(tokens)
    received = output.detach().requires_grad_()
    token_loss(second(received), targets).backward()
    output.backward(received.grad)
    with torch.no_grad():
        token_loss(second(output), targets).item()
    token_loss(second(received.detach()), targets).item()
    return received


def looking_at_the_scores_first(first, second, tokens, targets):
    second(first(tokens))
    return with_forward(first, second, tokens, targets)


@pytest.mark.parametrize(
    "answer",
    [
        with_forward, with_keywords, looking_at_the_loss_afterwards, looking_at_the_scores_first,
        both_pieces_in_one_call,
    ],
)  # fmt: skip
def test_backward_in_two_pieces_is_right_in_any_style(answer, capsys):
    said = answer_to(lesson_01.backward_in_two_pieces, capsys, answer)
    assert said.startswith("Right: ")


def in_float32(first, second, tokens, targets):
    output = first(tokens)
    received = output.detach().float().double().requires_grad_()
    token_loss(second(received), targets).backward()
    output.backward(received.grad)
    return received


def half_a_stub(first, second, tokens, targets):
    output = first(tokens)
    received = ...
    token_loss(second(received), targets).backward()
    output.backward(received.grad)
    return received


def the_tokens_for_the_second_stage(first, second, tokens, targets):
    output = first(tokens)
    received = output.detach().requires_grad_()
    token_loss(second(tokens), targets).backward()
    output.backward(received.grad)
    return received


def targets_before_the_scores(first, second, tokens, targets):
    received = first(tokens).detach().requires_grad_()
    token_loss(targets, second(received)).backward()
    return received


def handed_back_twice(first, second, tokens, targets):
    output = first(tokens)
    received = output.detach().requires_grad_()
    token_loss(second(received), targets).backward()
    output.backward(received.grad, retain_graph=True)
    output.backward(received.grad)
    return received


def without_a_graph(first, second, tokens, targets):
    with torch.no_grad():
        received = first(tokens)
    received.requires_grad_()
    token_loss(second(received), targets).backward()
    return received


def without_backward(first, second, tokens, targets):
    received = first(tokens).detach().requires_grad_()
    second(received)
    return received


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (without_requires_grad, "call requires_grad_() on what arrived"),
        (without_requires_grad_and_handing_back, "call requires_grad_() on what arrived"),
        (with_a_clone, "detach() what is sent"),
        (without_handing_back, "output.backward(gradient)"),
        (without_cutting, "detach() what is sent"),
        (with_another_gradient, "must go on from the gradient that came back"),
        (handed_back_twice, "gradient that came back, once"),
        (without_backward, "run the backward of the loss"),
        (half_a_stub, "raised AttributeError: 'ellipsis' object"),
        (the_tokens_for_the_second_stage, "not implemented for 'Long'"),
        (targets_before_the_scores, "as in token_loss(scores, targets)"),
        (without_a_graph, "what detach() or no_grad() makes leads to no weights"),
        (in_float32, "was a tensor rounded to float32 on its way?"),
        (with_two_backwards, "a backward of token_loss(scores, targets) gives it, one only"),
        (without_a_gradient, "output.backward(received.grad)"),
        (asking_too_late, "before the second stage gets it"),
        (cutting_the_output_itself, "detach_() cuts the output itself"),
        (forgetting_at_the_end, "at the end: has zero_grad() removed them?"),
        (through_the_cut_for_the_first, "detach() what is sent"),
        (through_the_cut_past_the_call, "detach() what is sent"),
        (misspelt_and_without_requires_grad, "raised NameError: name 'gradent' is not defined"),
        (without_the_second_stage, "the second stage was not called"),
        (returning_what_was_sent, "the very tensor that the second stage was called with"),
        (returning_the_gradient, "the very tensor that the second stage was called with"),
    ],
)
def test_backward_in_two_pieces_explains(answer, sentence, capsys):
    said = answer_to(lesson_01.backward_in_two_pieces, capsys, answer)
    assert said.startswith("Not yet: ") and sentence in said


def rows(order):
    """An answer from a function that gives one rank's cells."""
    return lambda p, m: [",".join(order(rank, p, m)) for rank in range(p)]


def backward_first(rank, p, m):
    return [f"{rank}{kind}{k}" for kind in "BF" for k in range(m)]


def one_at_a_time(rank, p, m):
    return [f"{rank}{kind}{k}" for k in range(m) for kind in "FB"]


def one_forgotten(rank, p, m):
    return [f"{rank}{kind}{k}" for kind in "FB" for k in range(m)][:-1]


def one_forward_one_backward(rank, p, m):
    first = min(m, p - rank)
    cells = [f"{rank}F{k}" for k in range(first)]
    for k in range(m):
        cells.append(f"{rank}B{k}")
        if first + k < m:
            cells.append(f"{rank}F{first + k}")
    return cells


def one_at_a_time_in_a_small_batch(rank, p, m):
    if m < p:
        return one_at_a_time(rank, p, m)
    return [f"{rank}{kind}{k}" for kind in "FB" for k in range(m)]


def one_stage_for_all(rank, p, m):
    return [f"0{kind}{k}" for kind in "FB" for k in range(m)]


@pytest.mark.parametrize(
    ("order", "sentence"),
    [
        (backward_first, "rank 0 runs the backward of micro-batch 0 on stage 0 at step 0, but"),
        (one_at_a_time, "as slow as lesson 01"),
        (one_forgotten, "rank 0 never runs the backward of micro-batch 1 on stage 0"),
        (one_forward_one_backward, "on rank 1 a backward comes before the last forward"),
        (one_at_a_time_in_a_small_batch, "5 ranks, 3 micro-batches: legal, but 450 ms, as slow as"),
        (one_stage_for_all, "stage 0 already belongs to rank 0"),
    ],
)
def test_own_gpipe_explains(order, sentence, capsys):
    answer = answer_to(lesson_02.own_gpipe, capsys, rows(order))
    assert answer.startswith("Not yet: ") and sentence in answer


def test_the_rows_of_a_schedule_may_have_blanks_and_ends_of_lines(capsys):
    def own(p, m):
        return [
            " " + " , ".join(f"{r}{kind}{k}" for kind in "FB" for k in range(m)) + ",\n"
            for r in range(p)
        ]

    assert answer_to(lesson_02.own_gpipe, capsys, own).startswith("Right: ")


def test_the_rows_of_a_schedule_may_be_lists_of_actions_from_a_generator(capsys):
    def own(p, m):
        for r in range(p):
            yield [f"{r}{kind}{k}" for kind in "FB" for k in range(m)]

    assert answer_to(lesson_02.own_gpipe, capsys, own).startswith("Right: ")


def test_the_rows_of_a_schedule_may_be_lists_in_a_dictionary_by_rank(capsys):
    def own(p, m):
        return {r: [f"{r}{kind}{k}" for kind in "FB" for k in range(m)] for r in range(p)}

    assert answer_to(lesson_02.own_gpipe, capsys, own).startswith("Right: ")


def test_the_rows_of_a_schedule_may_be_in_a_deque(capsys):
    def own(p, m):
        return deque(",".join(f"{r}{kind}{k}" for kind in "FB" for k in range(m)) for r in range(p))

    assert answer_to(lesson_02.own_gpipe, capsys, own).startswith("Right: ")


def counted_up(p, x, m=1):
    return m if (p - 1) / (m + p - 1) <= x else counted_up(p, x, m + 1)


def counted_up_in_thousandths(p, x, m=1):
    is_enough = round((p - 1) / (m + p - 1), 3) <= x
    return m if is_enough else counted_up_in_thousandths(p, x, m + 1)


def doubled_until_enough(p, x, m=1):
    return m if (p - 1) / (m + p - 1) <= x else doubled_until_enough(p, x, 2 * m)


@pytest.mark.parametrize(
    "needed",
    [
        counted_up,
        lambda p, x: max(1, math.ceil((p - 1) * (1 - x) / x)),
        lambda p, x: max(1, math.ceil((p - 1) / x - (p - 1))),
        lambda p, x: max(1, -(-(p - 1) * (1 - x) // x)),
    ],
)
def test_enough_microbatches_is_right_in_any_style(needed, capsys):
    assert answer_to(lesson_02.enough_microbatches, capsys, needed).startswith("Right: ")


@pytest.mark.parametrize(
    ("needed", "sentence"),
    [
        (lambda p, x: max(1, round((p - 1) * (1 - x) / x)), "bubble is 0.3043, too much"),
        (lambda p, x: max(1, int((p - 1) * (1 - x) / x)), "bubble is 0.3043, too much"),
        (lambda p, x: max(1, math.ceil((p - 1) / x)), "that bounds idle / busy"),
        (lambda p, x: (p - 1) * (1 - x) / x + 0.5, "round up"),
        (lambda p, x: max(1, math.floor((p - 1) * (1 - x) / x) - 1), "too much"),
        (lambda p, x: math.ceil((p - 1) * (1 - x) / x - 1e-9), "a batch has at least one"),
        (lambda p, x: 1000, "12 would do"),
        (doubled_until_enough, "16 micro-batches, whose bubble is 0.2000; 12 would do"),
        (lambda p, x: math.ceil(p * (1 - x) / x), "15 micro-batches, whose bubble is 0.2105; 12"),
        (counted_up_in_thousandths, "8 ranks, bubble at most 0.067: you say 97 micro-batches"),
        (
            lambda p, x: max(1, int((p - 1) * (1 - x) / x + 0.9)),
            "19 ranks, bubble at most 0.817: you say 4",
        ),
        (lambda p, x: counted_up(min(p, 32), x), ", too much"),
        (lambda p, x: counted_up(p, min(x, 0.5)), " would do"),
    ],
)
def test_enough_microbatches_explains(needed, sentence, capsys):
    answer = answer_to(lesson_02.enough_microbatches, capsys, needed)
    assert answer.startswith("Not yet: ") and sentence in answer


@pytest.mark.parametrize(
    ("most", "sentence"),
    [
        (lambda s, p, room, m: min(room, m), "never holds more than 4, however many"),
        (
            lambda s, p, room, m: m // p * p if s == "1f1b" and room >= p else min(room, m),
            "room for 6, 63 available: you say 60; rank 0 never holds more than 4",
        ),
        (lambda s, p, room, m: m, "holds every micro-batch before its first backward"),
        (lambda s, p, room, m: m if s == "1f1b" else min(room, m), "has no room for 8"),
        (
            lambda s, p, room, m: m if s == "1f1b" and room >= p - 1 else min(room, m),
            "2 ranks, room for 1, 2 available: you say 2, but rank 0 holds min(m, p) and has no",
        ),
        (
            lambda s, p, room, m: m if s == "1f1b" and not room < p <= m else min(room, m),
            "room for 1, 2 available: you say 2, but rank 0 holds min(m, p) and has no room for 2",
        ),
        (lambda s, p, room, m: m * (room >= p) if s == "1f1b" else min(room, m), "4 fit into its"),
        (lambda s, p, room, m: room if s == "gpipe" or room < p else m, "more than there are"),
        (
            lambda s, p, room, m: min(room, m) if s == "gpipe" else m if room >= p else room,
            "room for 6, 5 available: you say 6, more than there are",
        ),
    ],
)
def test_most_microbatches_explains(most, sentence, capsys):
    answer = answer_to(lesson_03.most_microbatches, capsys, most)
    assert answer.startswith("Not yet: ") and sentence in answer


@pytest.mark.parametrize(
    ("version", "sentence"),
    [
        (lambda k, r, p: k - (p - 1 - r), "nothing is older than the starting weights"),
        (lambda k, r, p: k, "as if every mini-batch before it were back here"),
        (lambda k, r, p: max(0, k - (p - 1)), "that is rank 0, and this rank is nearer to the end"),
        (lambda k, r, p: max(0, k - (p - r)), "one too old"),
        (lambda k, r, p: 7, "0 updates stand before it"),
        (
            lambda k, r, p: max(0, k - (3 - r)),
            "rank 0 of 3: you say version 0; it is 1. On 4 ranks",
        ),
        (lambda k, r, p: max(0, k - (p - 1 ^ r)), "rank 1 of 3: you say version 0; it is 1"),
        (lambda k, r, p: max(0, min(k, 8) - (p - 1 - r)), "mini-batch 9 on rank 0 of 4: you say"),
    ],
)
def test_version_seen_explains(version, sentence, capsys):
    answer = answer_to(lesson_04.version_seen, capsys, version)
    assert answer.startswith("Not yet: ") and sentence in answer


def even_counts(seconds, num_stages):
    return [last - first for first, last in cut_evenly(len(seconds), num_stages)]


def filled_to_the_average(seconds, num_stages):
    counts, filled = [0], 0
    for second in seconds:
        if filled and filled + second > sum(seconds) / num_stages and len(counts) < num_stages:
            counts, filled = [*counts, 0], 0
        counts[-1] += 1
        filled += second
    return counts


def test_an_array_of_numbers_is_a_cut_too(capsys):
    def cut(seconds, num_stages):
        cuts = lesson_04b._all_cuts(len(seconds), num_stages)
        return numpy.array(min(cuts, key=lambda counts: lesson_04b._slowest(seconds, counts)))

    assert answer_to(lesson_04b.best_cut, capsys, cut).startswith("Right: ")

    def list_of_tensors(seconds, num_stages):
        return [torch.tensor(count) for count in cut(seconds, num_stages)]

    def deque_of_whole_floats(seconds, num_stages):
        return deque(map(float, cut(seconds, num_stages)))

    for others in (list_of_tensors, deque_of_whole_floats):
        assert answer_to(lesson_04b.best_cut, capsys, others).startswith("Right: ")

    def without_one_layer_per_stage(seconds, num_stages):
        return cut(seconds, num_stages) if num_stages < len(seconds) else [0] * num_stages

    answer = answer_to(lesson_04b.best_cut, capsys, without_one_layer_per_stage)
    assert answer.startswith("Not yet: layers of [2, 5, 1, 3] s in 4 stages: you say [0, 0, 0, 0]")


def test_only_a_cut_filled_to_the_average_leaves_something_over(capsys):
    def longest_first(seconds, num_stages):
        loads, counts = [0] * num_stages, [0] * num_stages
        for second in sorted(seconds, reverse=True):
            stage = loads.index(min(loads))
            loads[stage] += second
            counts[stage] += 1
        return counts

    answer = answer_to(lesson_04b.best_cut, capsys, longest_first)
    assert answer.startswith("Not yet: ") and "have left over" not in answer


def test_only_a_cut_that_counts_the_layers_is_told_to_look_at_their_seconds(capsys):
    def least_squares(seconds, num_stages):
        def squares(counts):
            return sum(load**2 for load in lesson_04b._seconds_of(seconds, counts))

        return min(lesson_04b._all_cuts(len(seconds), num_stages), key=squares)

    answer = answer_to(lesson_04b.best_cut, capsys, least_squares)
    assert "you say [1, 2, 2, 2]" in answer
    assert "their seconds count" not in answer and "have left over" not in answer


def best_in_whole_seconds(seconds, num_stages):
    def filled(limit):
        counts, load = [], math.inf
        for left, second in zip(range(len(seconds), 0, -1), seconds):
            if load + second > limit or left <= num_stages - len(counts):
                counts, load = [*counts, 0], 0
            counts[-1] += 1
            load += second
        return counts

    limit = math.ceil(max(seconds))
    while len(filled(limit)) > num_stages:
        limit += 1
    return filled(limit)


def nearest_to_the_average_of_the_rest(seconds, num_stages):
    counts, first = [], 0
    for left in range(num_stages, 1, -1):
        average = sum(seconds[first:]) / left
        choices = range(1, len(seconds) - first - left + 2)
        loads = {count: sum(seconds[first : first + count]) for count in choices}
        counts.append(min(choices, key=lambda count: (abs(loads[count] - average), -count)))
        first += counts[-1]
    return [*counts, len(seconds) - first]


def in_rounded_seconds(seconds, num_stages):
    def slowest(counts):
        return lesson_04b._slowest(list(map(int, seconds)), counts)

    return min(lesson_04b._all_cuts(len(seconds), num_stages), key=slowest)


def halved_again_and_again(seconds, num_stages):
    if num_stages == 1:
        return [len(seconds)]
    half = num_stages // 2

    def slower(k):
        return max(sum(seconds[:k]) / half, sum(seconds[k:]) / (num_stages - half))

    k = min(range(half, len(seconds) - (num_stages - half) + 1), key=slower)
    others = halved_again_and_again(seconds[k:], num_stages - half)
    return halved_again_and_again(seconds[:k], half) + others


def with_a_limit_in_tenths(seconds, num_stages):
    limit = max(seconds)
    while True:
        counts, filled = [0], 0
        for number, second in enumerate(seconds):
            must_leave = len(seconds) - number <= num_stages - len(counts)
            if counts[-1] and (filled + second > limit or must_leave):
                counts, filled = [*counts, 0], 0
            counts[-1] += 1
            filled += second
        if len(counts) == num_stages:
            return counts
        limit += 0.1


def best_for(numbers_of_stages):
    """A cut that is the best for these numbers of stages, and for others puts one in each stage."""

    def cut(seconds, n):
        if n not in numbers_of_stages:
            return [1] * (n - 1) + [len(seconds) - n + 1]
        return min(lesson_04b._all_cuts(len(seconds), n), key=partial(lesson_04b._slowest, seconds))

    return cut


@pytest.mark.parametrize(
    ("cut", "sentence"),
    [
        (
            even_counts,
            "8 s; 7 s is possible. Your stages have about the same number of layers",
        ),
        (lambda seconds, n: [*numpy.int64(even_counts(seconds, n))], "you say [2, 2, 2], and"),
        (filled_to_the_average, "12 s; 8 s is possible. Your last stage gets what the others"),
        (lambda seconds, n: [len(seconds)] + [0] * (n - 1), "each stage needs a layer"),
        (lambda seconds, n: [1] * n, "which are 4 layers of 8"),
        (best_in_whole_seconds, "[3, 1, 1], and the slowest stage takes 6.0 s; 5.5 s is possible"),
        (
            nearest_to_the_average_of_the_rest,
            "you say [1, 3, 2, 1], and the slowest stage takes 11",
        ),
        (in_rounded_seconds, "the slowest stage takes 6.6875 s; 6.125 s is possible"),
        (
            lambda seconds, n: min(
                lesson_04b._all_cuts(len(seconds), n), key=partial(lesson_04b._slowest, seconds)
            )[::-1],
            "[3, 1, 3, 1], and the slowest stage takes 13 s; 9 s is possible. That is stage 2",
        ),
        (halved_again_and_again, "[1, 3, 1], and the slowest stage takes 7.0 s; 5.5 s is possible"),
        (lambda seconds, n: len(seconds) // n, "a list with one whole number per stage"),
        (lambda seconds, n: [len(seconds)], "4 stages: you say [8], 1 number for 4 stages"),
        (lambda seconds, n: [len(seconds) / n] * n, "of [1, 1, 1, 1, 1, 7] s in 3 stages: you say"),
        (lambda seconds, n: [len(seconds) / 3] * n, "such as [3, 2, 1], not [2.6666"),
        (lambda seconds, n: [True] * n, "a list with one whole number per stage"),
        (with_a_limit_in_tenths, "takes 9.1875 s; 9.125 s is possible"),
        (best_for([1, 3, 4, 5]), " s in 2 stages: you say [1, 2], and the slowest"),
    ],
)
def test_best_cut_explains(cut, sentence, capsys):
    answer = answer_to(lesson_04b.best_cut, capsys, cut)
    assert answer.startswith("Not yet: ") and sentence in answer


def all_to_the_slowest(seconds, num_ranks):
    spare = num_ranks - len(seconds)
    return [1 + spare * (stage == seconds.index(max(seconds))) for stage in range(len(seconds))]


def apportioned(divisor, divided=truediv):
    """One rank more for the stage with the most seconds per `divisor(ranks so far)`, and so on."""

    def ranks(seconds, num_ranks):
        counts = [1] * len(seconds)
        for _ in range(num_ranks - len(seconds)):
            stages = range(len(seconds))
            counts[
                max(stages, key=lambda stage: divided(seconds[stage], divisor(counts[stage])))
            ] += 1
        return counts

    return ranks


def halved_at_each_rank(seconds, num_ranks):
    counts, left = [1] * len(seconds), list(seconds)
    for _ in range(num_ranks - len(seconds)):
        stage = left.index(max(left))
        counts[stage] += 1
        left[stage] /= 2
    return counts


def with_largest_remainders(seconds, num_ranks):
    shares = [(num_ranks - len(seconds)) * each / sum(seconds) for each in seconds]
    counts = [1 + int(share) for share in shares]
    left = num_ranks - sum(counts)
    for stage in sorted(range(len(seconds)), key=lambda stage: -(shares[stage] % 1))[:left]:
        counts[stage] += 1
    return counts


def test_spare_ranks_calls_no_stage_the_slowest_that_is_not(capsys):
    answer = answer_to(
        lesson_04b.spare_ranks, capsys, lambda s, n: [n - len(s) + 1, *[1] * (len(s) - 1)]
    )
    assert "[30, 60, 20] s on 6 ranks: you say [4, 1, 1]" in answer
    assert "All spare ranks" not in answer


def test_only_ranks_that_are_always_spread_evenly_are_called_so(capsys):
    def to_the_fastest(seconds, num_ranks):
        return [1 + (stage == seconds.index(min(seconds))) for stage in range(len(seconds))]

    answer = answer_to(lesson_04b.spare_ranks, capsys, to_the_fastest)
    assert "you say [1, 2, 1], and a mini-batch comes every 60 s; every 30 s is" in answer
    assert "Stage 0 sets the pace" in answer
    assert "evenly" not in answer
    answer = answer_to(lesson_04b.spare_ranks, capsys, apportioned(int, floordiv))
    assert "[2, 3] s on 5 ranks: you say [3, 2]" in answer and "evenly" not in answer


@pytest.mark.parametrize(
    ("ranks", "sentence"),
    [
        (all_to_the_slowest, "every 20 s is possible. All spare ranks are on stage 1"),
        (lambda s, n: even_counts(range(n), len(s)), "your ranks are spread evenly"),
        (lambda s, n: [1] * len(s), "which are 3 ranks"),
        (apportioned(lambda count: count + 1), "every 25 s; every 23.3333 s is possible"),
        (apportioned(lambda count: 2 * count + 1), "every 25 s; every 23.3333 s is possible"),
        (
            halved_at_each_rank,
            "you say [3, 2, 4], and a mini-batch comes every 22.5 s; every 18 s is",
        ),
        (with_largest_remainders, "every 25 s; every 23.3333 s is possible"),
        (lambda s, n: [round(n * each / sum(s)) for each in s], "each stage needs a rank"),
        (
            lambda s, n: apportioned(int)(s, n) if len(s) < 4 else [n - 3, 1, 1, 1],
            "every 1.225 s is possible. All spare ranks are on stage 0",
        ),
        (
            lambda s, n: apportioned(int)(s, n) if len(s) > 1 else [1],
            "[2] s on 2 ranks: you say [1]",
        ),
    ],
)
def test_spare_ranks_explains(ranks, sentence, capsys):
    answer = answer_to(lesson_04b.spare_ranks, capsys, ranks)
    assert answer.startswith("Not yet: ") and sentence in answer


WRITE = ["write", "sync", "wait for all ranks", "rename", "move latest", "remove the oldest"]


def moved(call, to):
    order = [other for other in WRITE if other != call]
    order.insert(to, call)
    return order


def test_an_untouched_order_is_not_attempted_yet(capsys):
    assert answer_to(lesson_07.order_of_a_save, capsys, ...) == NOT_ATTEMPTED


@pytest.mark.parametrize(
    ("order", "sentence"),
    [
        (moved("rename", 2), "after 'rename': the new checkpoint has its name, and rank 1 has not"),
        (moved("sync", 3), "after 'rename': the new checkpoint has its name, and what rank 0"),
        (moved("move latest", 3), "latest names a checkpoint that does not have its name yet"),
        (moved("remove the oldest", 0), "the old checkpoint is gone, and the new one does not"),
        (moved("remove the oldest", 4), "latest still names the old checkpoint, which is gone"),
        (moved("rename", 0), "rank 0 has not written its file"),
        (moved("sync", 0), "what rank 0 syncs it has not written yet"),
        (["write", "rename"], "use each of these once: write, sync, wait for all ranks"),
        (7, "write the six calls as strings in a list"),
    ],
)
def test_order_of_a_save_explains(order, sentence, capsys):
    answer = answer_to(lesson_07.order_of_a_save, capsys, order)
    assert answer.startswith("Not yet: ") and sentence in answer


@pytest.mark.parametrize(
    "form",
    [list, tuple, iter, dict.fromkeys, deque, numpy.array, ", ".join, "\n".join, " -> ".join],
)
def test_order_of_a_save_knows_the_right_one_in_any_form(form, capsys):
    assert answer_to(lesson_07.order_of_a_save, capsys, form(WRITE)).startswith("Right: ")


def overlapping(rank, num_ranks, saved_by, layers):
    first, last = cut_evenly(layers, num_ranks)[rank]
    saved = enumerate(cut_evenly(layers, saved_by))
    return [other for other, (low, high) in saved if low < last and first < high]


def proportional(rank, num_ranks, saved_by, layers):
    first, last = cut_evenly(layers, num_ranks)[rank]
    return range(first * saved_by // layers, (last - 1) * saved_by // layers + 1)


def as_if_all_had_as_many_as_the_first(rank, num_ranks, saved_by, layers):
    (first, last), each = cut_evenly(layers, num_ranks)[rank], -(-layers // saved_by)
    return range(first // each, (last - 1) // each + 1)


def of_both_ends(rank, num_ranks, saved_by, layers):
    ranks = overlapping(rank, num_ranks, saved_by, layers)
    return sorted({ranks[0], ranks[-1]}) if num_ranks > 1 else ranks


def test_files_to_open_knows_the_right_ones(capsys):
    assert answer_to(lesson_07.files_to_open, capsys, overlapping).startswith("Right: ")


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (lambda r, n, s, k: [r], "you open [0]: in the file of rank 1 lie layers 2 to 3"),
        (lambda r, n, s, k: list(range(s)), "that is every file"),
        (
            lambda r, n, s, k: range(*cut_evenly(k, n)[r]),
            "the file of rank 2 has none of its layers",
        ),
        (
            lambda r, n, s, k: [each in overlapping(r, n, s, k) for each in range(s)],
            "return a list of ranks, not [True, True, False, False]",
        ),
        (lambda r, n, s, k: [f"rank-{r}.pt"], "return a list of ranks, not ['rank-0.pt']"),
        (
            lambda r, n, s, k: overlapping(r, n, s, k)[-1:],
            "in the file of rank 0 lie layers 0 to 1",
        ),
        (lambda r, n, s, k: overlapping(r, n, s, k) + [3], "the file of rank 3 has none of its"),
        (
            lambda r, n, s, k: range(r * s // n, (r + 1) * s // n),
            "you open []: in the file of rank 0",
        ),
        (lambda r, n, s, k: 4, "return a list of ranks, not 4"),
        (proportional, "rank 2 of 5 has layers 4 to 5, and you open [1, 2]"),
        (as_if_all_had_as_many_as_the_first, "rank 4 of 5 has layers 8 to 9, and you open [2, 3]"),
        (lambda r, n, s, k: range(r * s // n, -(-(r + 1) * s // n)), "rank 2 of 5 has layers 4"),
        (of_both_ends, "in the file of rank 1 lie layers 2 to 3"),
        (
            lambda r, n, s, k: overlapping(r, n, s, k) if k % 2 == 0 else range(s),
            "rank 0 of 2 has layers 0 to 1, and you open",
        ),
        (
            lambda r, n, s, k: overlapping(r, n, s, k)[: 2 if r % 2 else 24],
            "in the file of rank",
        ),
    ],
)
def test_files_to_open_explains(files, sentence, capsys):
    answer = answer_to(lesson_07.files_to_open, capsys, files)
    assert answer.startswith("Not yet: ") and sentence in answer


def most_waited_for(waits):
    waited = [peer for peer in waits.values() if peer is not None]
    return max(waited, key=waited.count)


def end_of_chain(waits):
    rank = 0
    while waits[rank] is not None:
        rank = waits[rank]
    return rank


def whoever_waits_for_nobody(waits):
    free = [rank for rank, peer in waits.items() if peer is None]
    return free[0] if free else "deadlock"


def end_of_copied_chain(waits):
    return end_of_chain(dict(waits))


def ends_of_recursion(waits):
    def end(rank):
        return rank if waits[rank] is None else end(waits[rank])

    try:
        return {end(rank) for rank in waits}.pop()
    except RecursionError:
        return "deadlock"


def test_a_ring_of_waits_may_be_known_by_a_recursion_without_end(capsys):
    assert answer_to(lesson_11.to_blame, capsys, ends_of_recursion).startswith("Right: ")


def end_of_last_chain(waits):
    rank = max(waits)
    for _ in waits:
        rank = rank if waits[rank] is None else waits[rank]
    return rank if waits[rank] is None else "deadlock"


def end_of_a_short_chain(waits, hops=4):  # enough for the four ranks of the lesson
    ends = set(waits)
    for _ in range(hops):
        ends = {end if waits[end] is None else waits[end] for end in ends}
    return "deadlock" if any(waits[end] is not None for end in ends) else ends.pop()


def whoever_is_in_no_pair(waits):
    is_pair = any(peer is not None and waits[peer] == rank for rank, peer in waits.items())
    return "deadlock" if is_pair else next(r for r, peer in waits.items() if peer is None)


@pytest.mark.parametrize(
    ("to_blame", "sentence"),
    [
        (lambda waits: 0, "waits for rank 1: follow the chain to its end"),
        (most_waited_for, "for whom most wait; but rank 1 itself waits for 3"),
        (end_of_chain, "a ring of waits has no end"),
        (lambda waits: "deadlock", "rank 2 waits for nobody"),
        (
            lambda waits: next((r for r, peer in waits.items() if peer is None), 0),
            "none of them can go on first",
        ),
        (end_of_copied_chain, "computed for 2 s; does this loop end?"),
        (end_of_last_chain, "4: 3}: you say 3, and not all others wait for it"),
        (whoever_is_in_no_pair, "4: 3}: you say 3, and not all others wait for it"),
        (
            end_of_a_short_chain,
            "9: 6, 10: 9}: you say 'deadlock', but rank 0 waits for nobody",
        ),
        (
            partial(end_of_a_short_chain, hops=12),
            "12: 11, 13: None}: you say 'deadlock', but rank 13",
        ),
        (
            partial(end_of_a_short_chain, hops=100),
            "120 ranks, each of which waits for the next: you say 'deadlock', but rank 119",
        ),
        (lambda waits: 9, "neither a rank nor"),
        (lambda waits: [2], "neither a rank nor"),
        (whoever_waits_for_nobody, "not all others wait for it"),
        (lambda waits: whoever_waits_for_nobody(waits) or "deadlock", "rank 0 waits for nobody"),
    ],
)
def test_to_blame_explains(to_blame, sentence, capsys):
    answer = answer_to(lesson_11.to_blame, capsys, to_blame)
    assert answer.startswith("Not yet: ") and sentence in answer
