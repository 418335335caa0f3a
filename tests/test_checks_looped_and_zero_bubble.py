"""The checks of lessons 05 and 09 know a stub, the right answer and typical wrong ones."""

import re
from collections import deque
from random import Random

import numpy
import pytest
import torch

from course.checks import lesson_05, lesson_06, lesson_07, lesson_08, lesson_09
from course.checks.answer import NOT_ATTEMPTED
from lab.simulator import Costs, simulate
from pipeline.schedule import Schedule
from pipeline.schedules import interleaved_1f1b, one_f_one_b, zb_h1
from pipeline.schedules.text_form import to_csv
from small.split_backward import input_half, weight_half


def answer_to(check, capsys, answer):
    check(answer)
    return capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    "check",
    [
        lesson_05.best_chunks,
    ],
)
def test_an_untouched_stub_is_not_attempted_yet(check, capsys):
    assert answer_to(check, capsys, lambda *arguments: ...) == NOT_ATTEMPTED


def test_untouched_rows_are_not_attempted_yet(capsys):
    assert answer_to(lesson_09.fill_the_bubble, capsys, ...) == NOT_ATTEMPTED


def with_simulator(p, m, forward, backward, transfer):
    def seconds(v):
        schedule = one_f_one_b(p, m) if v == 1 else interleaved_1f1b(p, m, v)
        return simulate(schedule, Costs(forward / v, backward / v, transfer=transfer)).makespan

    return min((1, 2, 4), key=seconds)


def best_of(costs_of, choices=(1, 2, 4)):
    """The best of `choices` with the costs `costs_of(forward, backward, chunks)`."""

    def best(p, m, forward, backward, transfer):
        def milliseconds(v):
            schedule = one_f_one_b(p, m) if v == 1 else interleaved_1f1b(p, m, v)
            costs = Costs(*costs_of(forward, backward, v), transfer=transfer)
            return simulate(schedule, costs).makespan

        return min(choices, key=milliseconds)

    return best


@pytest.mark.parametrize(
    ("best", "sentence"),
    [
        (best_of(lambda f, b, v: (f // v, b // v)), "3 and 7.5 ms, 1 ms a message: you say 4"),
        (best_of(lambda f, b, v: [(f + b) / v / 2] * 2), "with 1 it is 178, since a rank waits"),
        (lambda *sizes: 4, "since a rank waits for fewer messages"),
        (lambda *sizes: 1, "since the bubble is shorter"),
        (lambda p, m, forward, backward, transfer: 4 if transfer < 3 else 2, "with 1 it is 480"),
        (lambda *sizes: 3, "choose from 1, 2 and 4"),
        (
            best_of(lambda f, b, v: (f / v, b / v), range(1, 5)),
            "say 3 chunks; choose from 1, 2 and",
        ),
        (
            lambda p, m, *times: with_simulator(4, 8, *times),
            "2 ranks, 2 micro-batches, 3 and 20 ms",
        ),
    ],
)
def test_best_chunks_explains(best, sentence, capsys):
    answer = answer_to(lesson_05.best_chunks, capsys, best)
    assert answer.startswith("Not yet: ") and sentence in answer


def split_at_once(schedule):
    """Every backward as I and, right behind it, W."""
    orders = []
    for order in schedule.orders:
        split = []
        for action in order:
            halves = "IW" if action.kind == "B" else "F"
            split += [action._replace(kind=kind) for kind in halves]
        orders.append(tuple(split))
    return Schedule("split", tuple(orders))


def rows_of(schedule):
    return to_csv(schedule).split()


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (rows_of(split_at_once(one_f_one_b(3, 4))), "16 units long, and 14 are possible: rank 2"),
        (rows_of(one_f_one_b(3, 4)), "rank 0 still has a whole backward (B)"),
        (rows_of(zb_h1(4, 4)), "keep three ranks"),
        ([row.replace("2F1,2I1,", "2F1,") for row in rows_of(zb_h1(3, 4))], "rank 2 never runs"),
        (
            [row.replace("0F0,0F1,0F2,0I0", "0F0,0F1,0I0,0F2") for row in rows_of(zb_h1(3, 4))],
            "rank 0: leave the order of F and I as it was",
        ),
        (17, "one string per rank"),
    ],
)
def test_fill_the_bubble_explains(rows, sentence, capsys):
    answer = answer_to(lesson_09.fill_the_bubble, capsys, rows)
    assert answer.startswith("Not yet: ") and sentence in answer


def moved_at_random(schedule, random):
    """`schedule`, whose W come anywhere behind their I."""
    orders = []
    for order in split_at_once(schedule).orders:
        moved = [action for action in order if action.kind != "W"]
        for action in (action for action in order if action.kind == "W"):
            behind = moved.index(action._replace(kind="I")) + 1
            moved.insert(random.randint(behind, len(moved)), action)
        orders.append(tuple(moved))
    return Schedule("moved", tuple(orders))


def test_a_rank_that_is_said_to_wait_does_wait(capsys):
    random, named = Random(9), 0
    for _ in range(300):
        schedule = moved_at_random(one_f_one_b(3, 4), random)
        answer = answer_to(lesson_09.fill_the_bubble, capsys, rows_of(schedule))
        if found := re.search(r"so rank (\d) has to wait with (\S+)", answer):
            events = simulate(schedule, lesson_09.EQUAL).by_rank[int(found[1])]
            [number] = [n for n, event in enumerate(events) if str(event.action) == found[2]]
            assert number == 0 or events[number - 1].end < events[number].start, answer
            named += 1
    assert named > 10


@pytest.mark.parametrize(
    ("check", "answer"),
    [
        (lesson_05.best_chunks, with_simulator),
        (lesson_09.fill_the_bubble, [row.split(",") for row in rows_of(zb_h1(3, 4))]),
        (lesson_09.fill_the_bubble, tuple(f" {row},\n" for row in rows_of(zb_h1(3, 4)))),
        (lesson_09.fill_the_bubble, deque(rows_of(zb_h1(3, 4)))),
        (lesson_09.fill_the_bubble, dict(enumerate(rows_of(zb_h1(3, 4))))),
    ],
)
def test_right_answers_are_right(check, answer, capsys):
    assert answer_to(check, capsys, answer).startswith("Right: ")


def moved(row, *moves):
    """`row` with each `(cell, behind)` of the moves made: the cell stands right behind the other."""
    cells = row.split(",")
    for cell, behind in moves:
        cells.remove(cell)
        cells.insert(cells.index(behind) + 1, cell)
    return ",".join(cells)


@pytest.mark.parametrize(
    ("moves", "sentence"),
    [
        ([("2W2", "2F3")], "rank 2 runs 2W2 before 2I3, and so rank 1 has to wait with 1I3"),
        ([], "rank 2 runs 2W2 before 2F3, and so rank 1 has to wait with 1I3"),
    ],
)
def test_fill_the_bubble_names_a_w_in_the_way_and_who_waits_for_it(moves, sentence, capsys):
    rows = rows_of(split_at_once(one_f_one_b(3, 4)))
    rows[2] = moved(rows[2], *moves)
    assert sentence in answer_to(lesson_09.fill_the_bubble, capsys, rows)


def test_fill_the_bubble_names_a_w_that_was_kept_while_its_rank_waited(capsys):
    rows = rows_of(zb_h1(3, 4))
    rows[0] = moved(rows[0], ("0W0", "0W3"))
    answer = answer_to(lesson_09.fill_the_bubble, capsys, rows)
    assert "15 units long" in answer
    assert "and could run 0W0 there, which it keeps until 14" in answer


@pytest.mark.parametrize("answer", ["x", 3, 2.5, [], [[1]], (None, 1), {}, float("nan"), "0F0"])
@pytest.mark.parametrize(
    "check",
    [
        lesson_05.best_chunks,
        lesson_06.held_with_recompute,
        lesson_07.files_to_open,
        lesson_08.placement,
    ],
)
def test_an_answer_of_another_form_is_told_so_and_raises_nothing(check, answer, capsys):
    assert answer_to(check, capsys, lambda *arguments: answer).startswith("Not yet: ")


@pytest.mark.parametrize("check", [lesson_07.order_of_a_save, lesson_09.fill_the_bubble])
@pytest.mark.parametrize("answer", ["x", 3, [], [[1]], (None,) * 6, {}, print])
def test_a_list_of_another_form_is_told_so_and_raises_nothing(check, answer, capsys):
    assert answer_to(check, capsys, answer).startswith("Not yet: ")


def test_a_function_that_forgets_to_return_is_not_called_a_stub(capsys):
    answer = answer_to(lesson_05.best_chunks, capsys, lambda *arguments: None)
    assert answer == (
        "Not yet: <lambda>(4, 8, 20, 40, 0.5) returned nothing; is there a return on every way through it?"
    )


def weights_at_once(gradient, inputs, weight, deferred):
    weight.grad += gradient.flatten(0, -2).T @ inputs.flatten(0, -2)
    deferred.append(None)
    return gradient @ weight


def replacing(deferred):
    while deferred:
        weight, inputs, gradient = deferred.pop()
        weight.grad = gradient.flatten(0, -2).T @ inputs.flatten(0, -2)


def half_as_much(deferred):
    while deferred:
        weight, inputs, gradient = deferred.pop()
        weight.grad += gradient.flatten(0, -2).T @ inputs.flatten(0, -2) / 2


def twice_as_much(deferred):
    while deferred:
        weight, inputs, gradient = deferred.pop()
        weight.grad += 2 * gradient.flatten(0, -2).T @ inputs.flatten(0, -2)


def never_forgetting(deferred):
    for weight, inputs, gradient in deferred:
        weight.grad += gradient.flatten(0, -2).T @ inputs.flatten(0, -2)


def one_entry(deferred):
    weight, inputs, gradient = deferred.pop()
    weight.grad += gradient.flatten(0, -2).T @ inputs.flatten(0, -2)


def storing_the_place(gradient, inputs, weight, deferred):
    deferred.append((weight.grad, inputs, gradient))
    return gradient @ weight


def adding_at_the_place(deferred):
    place, inputs, gradient = deferred.pop()
    place += gradient.flatten(0, 1).T @ inputs.flatten(0, 1)


def a_product_for_each_sequence(gradient, inputs, weight, deferred):
    deferred.append((weight, [g.T @ x for g, x in zip(gradient, inputs)]))
    return gradient @ weight


def a_product_of_numpy(gradient, inputs, weight, deferred):
    product = numpy.einsum("blo,bli->oi", gradient.numpy(), inputs.numpy())
    deferred.append((weight, [torch.from_numpy(product)]))
    return gradient @ weight


def a_sum(deferred):
    weight, products = deferred.pop()
    weight.grad += sum(products)


def rows_of_a_product(gradient, inputs, weight, deferred):
    flat = inputs.flatten(0, 1)
    deferred.append((weight, [gradient[..., out].flatten() @ flat for out in range(len(weight))]))
    return gradient @ weight


def from_rows(deferred):
    weight, rows = deferred.pop()
    weight.grad += torch.stack(rows)


def a_list_of_numbers(gradient, inputs, weight, deferred):
    product = numpy.einsum("blo,bli->oi", gradient.numpy(), inputs.numpy())
    deferred.append((weight, product.tolist()))
    return gradient @ weight


def from_a_list(deferred):
    weight, product = deferred.pop()
    weight.grad += torch.tensor(product, dtype=torch.float64)


def beginning_anew(gradient, inputs, weight, deferred):
    weight.grad = torch.zeros_like(weight)
    return input_half(gradient, inputs, weight, deferred)


def forgetting_before(gradient, inputs, weight, deferred):
    weight.grad = None
    return input_half(gradient, inputs, weight, deferred)


def never_ending(deferred):
    while deferred:
        weight, inputs, gradient = deferred[0]
        weight.grad += gradient.flatten(0, 1).T @ inputs.flatten(0, 1)


def side_by_side(gradient, inputs, weight, deferred):
    deferred.append((weight, torch.cat([gradient, inputs], -1)))
    return gradient @ weight


def apart(deferred):
    weight, both = deferred.pop()
    gradient, inputs = both.flatten(0, 1).split([*weight.shape], -1)
    weight.grad += gradient.T @ inputs


def of_one_width(deferred):
    weight, inputs, gradient = deferred.pop()
    weight.grad += gradient.reshape(-1, 4).T @ inputs.reshape(-1, 3)


def of_three_columns(deferred):
    weight, inputs, gradient = deferred.pop()
    for column in range(3):
        weight.grad[:, column] += torch.einsum("blo,bl->o", gradient, inputs[..., column])


def of_five_positions(deferred):
    weight, inputs, gradient = deferred.pop()
    weight.grad += sum(gradient[:, at].T @ inputs[:, at] for at in range(5))


def of_positions_by_width(deferred):
    weight, inputs, gradient = deferred.pop()
    weight.grad += sum(gradient[:, at].T @ inputs[:, at] for at in range(inputs.shape[2] + 2))


def doubling_g(gradient, inputs, weight, deferred):
    deferred.append((weight, inputs, gradient))
    return gradient.mul_(2) @ weight / 2


def updating(deferred):
    one_entry(deferred)
    torch.optim.SGD([ELSEWHERE[0][0]], lr=0.1).step()


ELSEWHERE = []


def kept_elsewhere(gradient, inputs, weight, deferred):
    ELSEWHERE.append((weight, inputs, gradient))
    deferred.append(None)
    return gradient @ weight


def added_from_elsewhere(deferred):
    deferred.clear()
    while ELSEWHERE:
        one_entry(ELSEWHERE)


def newest_from_elsewhere(deferred):
    deferred.clear()
    one_entry(ELSEWHERE)


def storing_twice(gradient, inputs, weight, deferred):
    ELSEWHERE[:] = [(weight, inputs, gradient)]
    deferred.append((weight, inputs, gradient))
    return gradient @ weight


def of_one_sequence(deferred):
    while deferred:
        weight, inputs, gradient = deferred.pop()
        weight.grad += gradient[0].T @ inputs[0]


def with_few_digits(deferred):
    while deferred:
        weight, inputs, gradient = deferred.pop()
        weight.grad += gradient.flatten(0, -2).float().T @ inputs.flatten(0, -2).float()


def added_to_what_is_there(deferred):
    weight, inputs, gradient = deferred.pop()
    if weight.grad is not None:
        weight.grad += gradient.flatten(0, 1).T @ inputs.flatten(0, 1)


def into_the_first_weight():
    weights = []

    def half(deferred):
        weight, inputs, gradient = deferred.pop()
        weights.append(weight)
        weights[0].grad += gradient.flatten(0, 1).T @ inputs.flatten(0, 1)

    return half


@pytest.mark.parametrize(
    ("halves", "sentence"),
    [
        ((weights_at_once, weight_half), "the first half changes weight.grad"),
        ((lambda g, x, w, d: g @ w, weight_half), "nothing is deferred"),
        (
            (lambda g, x, w, d: g, weight_half),
            "has the shape of x, (2, 5, 3); you return (2, 5, 4)",
        ),
        ((input_half, replacing), "the gradient of another micro-batch is gone"),
        ((input_half, half_as_much), "the gradient of micro-batch 1 counts 0.5 times"),
        ((input_half, twice_as_much), "the gradient of micro-batch 1 counts 2 times"),
        ((input_half, never_forgetting), "a second call would count it twice"),
        ((a_product_for_each_sequence, a_sum), "the first half computes the product gᵀ x, too"),
        ((a_product_of_numpy, a_sum), "the first half computes the product gᵀ x, too"),
        ((rows_of_a_product, from_rows), "the first half computes the product gᵀ x, too"),
        ((a_list_of_numbers, from_a_list), "the first half computes the product gᵀ x, too"),
        ((beginning_anew, weight_half), "the first half changes weight.grad, which has"),
        ((forgetting_before, weight_half), "the first half changes weight.grad, which has"),
        ((input_half, never_ending), "weight_half raised TimeoutError"),
        ((side_by_side, apart), "Right: "),
        ((doubling_g, one_entry), "the first half changes the numbers of g or x"),
        ((storing_twice, updating), "the two halves have changed the weight itself"),
        ((kept_elsewhere, added_from_elsewhere), "of micro-batch 1 adds the gradient of another"),
        ((kept_elsewhere, newest_from_elsewhere), "of micro-batch 1 adds the gradient of another"),
        ((input_half, of_one_sequence), "sum gᵀ x over all positions"),
        ((input_half, with_few_digits), "the gradient of A has too few digits"),
        (
            (lambda g, x, w, d: input_half(g, x, w, d).float(), weight_half),
            "the gradient of x has too few",
        ),
        (
            (lambda g, x, w, d: (input_half(g, x, w, d),), weight_half),
            "a tensor; yours returns a tuple",
        ),
        ((input_half, lambda deferred: None), "adds nothing to weight.grad"),
        (
            (input_half, of_one_width),
            "with 5 numbers in x and 2 in g: weight_half raised RuntimeError",
        ),
        (
            (input_half, of_three_columns),
            "with 5 numbers in x and 2 in g: that is not the gradient of A",
        ),
        (
            (input_half, of_five_positions),
            "weight_half raised IndexError",
        ),
        ((input_half, weight_half), "Right: "),
        ((input_half, one_entry), "Right: "),
        ((storing_the_place, adding_at_the_place), "Right: "),
        ((input_half, lambda deferred: deferred.pop()), "adds nothing to weight.grad"),
        ((input_half, added_to_what_is_there), "whose .grad is None, as after zero_grad"),
        ((input_half, into_the_first_weight()), "whose .grad is None, as after zero_grad"),
        ((input_half, of_positions_by_width), "weight_half raised IndexError"),
    ],
)
def test_split_backward_explains(halves, sentence, capsys):
    lesson_09.split_backward(*halves)
    assert sentence in capsys.readouterr().out
