# SPDX-License-Identifier: Apache-2.0
"""Checks of lesson 09: a backward in two halves, and a schedule whose weights' halves move."""

from course.building import in_words
from course.building.endless_loops import endless_loops_ended
from course.checks.answer import WrongAnswer, call, checked, first_complaint, read_rows
from lab.simulator import Costs, simulate
from lab.story import waits_of
from pipeline.schedule import ScheduleError
from pipeline.schedules import one_f_one_b, zb_h1
from pipeline.schedules.legal import check_legal

EQUAL = Costs(forward=1, backward=2, backward_weight=1)
ROUNDED = 1e-4  # largest difference of a gradient that was a float32
TOO_FEW_DIGITS = "has too few digits: was it rounded to float32 on the way?"

LAYERS = {"": (3, 4), "with 5 numbers in x and 2 in g: ": (5, 2)}  # the widths of x and g

TOO_EARLY = (
    "the first half computes the product gᵀ x, too, and only its addition is deferred: the whole "
    "backward runs in I; store the weight, x and g, and multiply in the second half"
)


@checked("the half that somebody waits for comes first, and the other one loses nothing.")
def split_backward(input_half, weight_half):
    """Check the halves of the backward of y = x Aᵀ with three micro-batches, in each of LAYERS.

    They are `input_half(gradient, inputs, weight, deferred)` and `weight_half(deferred)`; their
    gradients are compared with those of autograd in float64, to 1e-12.
    """
    return first_complaint(lambda widths: _halves_of(input_half, weight_half, widths), LAYERS)


def _halves_of(input_half, weight_half, widths):
    """The error in the two halves of a layer with these widths, or None."""
    import torch

    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(widths[::-1], dtype=torch.float64))
    weight.grad = torch.randn_like(weight)  # of micro-batches before
    wanted, deferred = [], [[], [], []]
    first, before = weight.detach().clone(), weight.grad.clone()
    for k in range(3):
        length = (5, 2, 4)[k]  # independent of the other sizes
        x, g = (torch.randn(2 + k, length, n, dtype=torch.float64) for n in widths)
        wanted.append(torch.einsum("blo,bli->oi", g, x))
        given = g.clone(), x.clone()
        made = call(input_half, g, x, weight, deferred[k])
        if not (torch.equal(g, given[0]) and torch.equal(x, given[1])):
            return "the first half changes the numbers of g or x, which are still needed: copy them"
        if not isinstance(made, torch.Tensor):
            return f"the first half returns the gradient of x, a tensor; yours returns a {type(made).__name__}"
        if made.shape != x.shape:
            shape = tuple(made.shape)
            return f"the gradient of x has the shape of x, {tuple(x.shape)}; you return {shape}"
        if not (made - g @ weight).abs().max() <= 1e-12:
            if (made - g @ weight).abs().max() <= ROUNDED:
                return f"the gradient of x {TOO_FEW_DIGITS}"
            return "that is not the gradient of x: y = x Aᵀ, so each g is multiplied with A"
        if weight.grad is None or not torch.equal(weight.grad, before):
            return (
                "the first half changes weight.grad, which has the gradients of other micro-batches: "
                "defer what is added to it"
            )
        if not deferred[k]:
            return "nothing is deferred: the second half will need the weight, x and g"
    for k in (1, 0, 2):  # neither the oldest nor the newest first
        said = _half_of_weights(weight_half, weight, deferred[k], wanted, k)
        if said:
            return said
    if not torch.equal(weight, first):
        return (
            "the two halves have changed the weight itself: the update comes later, and only once"
        )
    if computes_product(input_half, g, x, weight):
        return TOO_EARLY
    return _first_gradient(input_half, weight_half, widths)


def numbers_of(input_half, gradient, inputs, weight):
    """All numbers of the tensors that `input_half` computes, and of what it defers."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    computed, deferred = [], []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            made = function(*arguments, **(options or {}))
            computed.extend([made] if isinstance(made, torch.Tensor) else [])
            return made

    with Watch():
        call(input_half, gradient, inputs, weight, deferred)
    return numbers_in([computed, deferred])


def computes_product(input_half, gradient, inputs, weight):
    """Whether `input_half` computes or defers a number that doubles with g and also with x, but not
    with the weight."""
    found = []
    for of_g, of_x, of_a in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)):
        weight.data *= of_a
        found.append(numbers_of(input_half, of_g * gradient, of_x * inputs, weight))
    return any(one and 2 * one == g == x and a == one for one, g, x, a in zip(*found))


def numbers_in(value):
    """The numbers of tensors, arrays, lists, tuples and dictionaries in each other."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [number for each in value for number in numbers_in(each)]
    return [value] if isinstance(value, float) else []


def _half_of_weights(weight_half, weight, deferred, wanted, k):
    """The error in the half W of micro-batch `k`, or None; micro-batch 1 runs before 0 and 2."""
    import torch

    before = weight.grad.clone()
    try:
        with endless_loops_ended():
            weight_half(deferred)
            again = weight.grad.clone()
            if deferred:  # not with an emptied list, whose first entry the half may need
                weight_half(deferred)
    except Exception as error:
        raise WrongAnswer(f"weight_half raised {in_words(error)}") from None
    twice = not torch.equal(again, weight.grad)
    weight.grad.copy_(again)  # in place, because the reader may have stored this tensor
    if again.shape != wanted[k].shape:
        return f"after the second half weight.grad has the shape {tuple(again.shape)}, not the weight's"
    if torch.equal(again, before):
        return "the second half adds nothing to weight.grad"
    if (again - wanted[k]).abs().max() <= 1e-12:
        return "the gradient of another micro-batch is gone: add to weight.grad"
    more = again - before
    factor = ((more * wanted[k]).sum() / (wanted[k] * wanted[k]).sum()).item()
    others = [sum(wanted), *wanted[:k], *wanted[k + 1 :]]
    if any((more - other).abs().max() <= 1e-9 for other in others):
        return (
            f"the second half of micro-batch {k} adds the gradient of another one: keep in "
            "`deferred` itself all that was deferred, and nowhere else"
        )
    if 1e-12 < (more - wanted[k]).abs().max() <= ROUNDED:
        return f"the gradient of A {TOO_FEW_DIGITS}"
    if not (more - factor * wanted[k]).abs().max() <= 1e-9:
        return "that is not the gradient of A: sum gᵀ x over all positions of all sequences"
    if abs(factor - 1) > 1e-9:
        return f"the gradient of micro-batch {k} counts {factor:.4g} times"
    if twice:
        return "what was deferred is still there: a second call would count it twice"


def _first_gradient(input_half, weight_half, widths):
    """The error in the first gradient of another weight, or None."""
    import torch

    weight = torch.nn.Parameter(torch.randn(widths[::-1], dtype=torch.float64))
    x, g = (torch.randn(2, 5, width, dtype=torch.float64) for width in widths)
    deferred = []
    try:
        with endless_loops_ended():
            input_half(g, x, weight, deferred)
            weight_half(deferred)
    except Exception:  # `weight.grad += ...` loses nothing in silence, and may want zeros there
        return None
    wanted = torch.einsum("blo,bli->oi", g, x)
    if weight.grad is None or not (weight.grad - wanted).abs().max() <= 1e-9:
        return "a weight whose .grad is None, as after zero_grad, does not get its gradient"


@checked("the weights' halves fill the end, where 1F1B's ranks had nothing to do.")
def fill_the_bubble(rows):
    """Check `rows`, one text for each of three ranks: four micro-batches, only the W have moved."""
    schedule = read_rows(rows)
    try:
        check_legal(schedule)
    except ScheduleError as error:
        raise WrongAnswer(str(error)) from None
    start = one_f_one_b(3, 4)
    if schedule.num_ranks != 3 or schedule.num_microbatches != 4 or schedule.num_stages != 3:
        return "keep three ranks with a stage each, and four micro-batches"
    for rank, (yours, original) in enumerate(zip(schedule.orders, start.orders)):
        if any(action.kind == "B" for action in yours):
            return f"rank {rank} still has a whole backward (B); write I and W"
        without = [(a.kind.replace("I", "B"), a.microbatch) for a in yours if a.kind != "W"]
        if without != [(action.kind, action.microbatch) for action in original]:
            return f"rank {rank}: leave the order of F and I as it was and move the W only"
    timeline, best = simulate(schedule, EQUAL), simulate(zb_h1(3, 4), EQUAL).makespan
    if timeline.makespan > best:
        return (
            f"legal, {timeline.makespan:g} units long, and {best:g} are possible: "
            f"{_where_time_is_lost(timeline)}"
        )


def _where_time_is_lost(timeline):
    """The sentence about a W that fits into a wait, or about one that delays another rank."""
    waits = {wait.event: wait for wait in waits_of(timeline)}
    event = last = max(timeline.events, key=lambda event: event.end)
    order = timeline.by_rank[last.rank]
    for waited in order:
        free = waits[waited].free
        done = {before.action for before in order if before.end <= free}
        for kept in order:
            is_ready = kept.action._replace(kind="I") in done and kept.action not in done
            if waited.start > free and kept.action.kind == "W" and is_ready:
                return (
                    f"rank {last.rank} waits from {free:g} to {waited.start:g} and could run "
                    f"{kept.action} there, which it keeps until {kept.start:g}"
                )
    # From the end backwards, each time to the event that kept the action from starting earlier.
    waiting = None  # the event of another rank that the path visited last
    while event.start > timeline.start:
        order, source = timeline.by_rank[event.rank], waits[event].source
        before = order[order.index(event) - 1] if event is not order[0] else None
        if source and source.end == event.start != (before and before.end):
            event, waiting = source, event
            continue
        if waiting and before.action.kind == "W" != event.action.kind:
            return (
                f"rank {event.rank} runs {before.action} before {event.action}, and so rank "
                f"{waiting.rank} has to wait with {waiting.action}"
            )
        event = before
