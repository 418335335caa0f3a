# SPDX-License-Identifier: Apache-2.0
"""Checks of lesson 11c: a stage's cost model, the way to train on a machine, the number of GPUs."""

import math
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

from course.checks.answer import (
    NOT_ATTEMPTED,
    NotAttempted,
    WrongAnswer,
    call,
    call_for_number,
    checked,
    close,
    drawn,
    require_number,
)
from lab.simulator import Costs, simulate
from pipeline.model import cut_as, cut_evenly
from pipeline.schedules import one_f_one_b
from planning.choosing import ways
from planning.closed_forms import SECONDS_PER_DAY, training_days
from planning.confirming import perform_schedule
from planning.expected_error import expected_error
from planning.machine import Link, Machine
from planning.transformer import Model

GPUS_PER_NODE = 8


class Times(NamedTuple):
    """Measured times of a model, in milliseconds per micro-batch, as pairs (forward, backward).

    `layers` is the number of layers. With `recompute` a backward runs the layers' forwards again.
    """

    layers: int
    layer: tuple
    embedding: tuple
    head: tuple
    recompute: bool = False


def _drawn_times(choose):
    """Times of up to sixteen layers, in quarters of a millisecond."""
    pairs = ((choose.randint(1, 99) / 4, choose.randint(1, 99) / 4) for _ in range(3))
    return Times(choose.randint(1, 16), *pairs, recompute=choose.random() < 0.5)


# A model with a large vocabulary: its head takes as long as three layers, its embedding less than
# one layer.
MEASURED = Times(12, layer=(6, 12), embedding=(2, 4), head=(18, 36))
RANKS, MICROBATCHES = 4, 8
CASES = [
    Times(8, (10, 20), (0, 0), (0, 0)),
    Times(8, (10, 20), (0, 0), (15, 25)),
    Times(8, (10, 20), (3, 7), (15, 25)),
    Times(8, (10, 20), (3, 7), (15, 25), recompute=True),
    MEASURED,
    *drawn(_drawn_times, 30),
]


def right_times(times, first, last):
    """The right (forward, backward) in ms of a stage with the layers `first` to `last` - 1."""
    count = last - first
    forward, backward = count * times.layer[0], count * times.layer[1]
    if times.recompute:
        backward += forward
    for end, here in ((times.embedding, first == 0), (times.head, last == times.layers)):
        forward, backward = forward + here * end[0], backward + here * end[1]
    return forward, backward


def asked(stage_times, times, first, last):
    """The (forward, backward) that the reader's function returns. Raises WrongAnswer otherwise."""
    answer = call(stage_times, times, first, last)
    try:
        answer = list(answer)
    except TypeError:
        answer = []
    if len(answer) != 2:
        raise WrongAnswer("return two numbers, forward and backward")
    return tuple(require_number(value, "your function returned") for value in answer)


def step_of(cut, times_of):
    """Milliseconds of a step of 1F1B; `cut` has the layers per stage, `times_of(first, last)` the
    (forward, backward) of a stage."""
    both = [times_of(first, last) for first, last in cut_as(cut)]
    costs = Costs([forward for forward, _ in both], [backward for _, backward in both])
    return simulate(one_f_one_b(len(cut), MICROBATCHES), costs).makespan


def best_cut(times_of, layers=MEASURED.layers, ranks=RANKS):
    """The cut with the shortest step of all cuts; among equals, the first."""
    found = []
    for marks in combinations(range(1, layers), ranks - 1):
        ends = (0, *marks, layers)
        cut = [after - before for before, after in zip(ends, ends[1:])]
        found.append((step_of(cut, times_of), cut))
    return min(found)[1]


EVEN = [last - first for first, last in cut_evenly(MEASURED.layers, RANKS)]


def gain(stage_times):
    """The sentence that compares the cut chosen by the reader's cost model with the even cut."""
    chosen = best_cut(lambda first, last: asked(stage_times, MEASURED, first, last))
    steps = [step_of(cut, lambda *part: right_times(MEASURED, *part)) for cut in (EVEN, chosen)]
    names = [",".join(map(str, cut)) for cut in (EVEN, chosen)]
    return (
        f"your costs cut {names[1]}, and a step takes {steps[1]:.0f} ms in place of the "
        f"{steps[0]:.0f} ms of {names[0]}, {1 - steps[1] / steps[0]:.0%} less."
    )


@checked(gain)
def stage_cost(stage_times):
    """Check `stage_times(times, first, last)`: (forward, backward) in ms of a stage with the layers
    `first` to `last` - 1."""
    for times in CASES:
        even = cut_evenly(times.layers, min(RANKS, times.layers))
        every_stage = combinations(range(times.layers + 1), 2)
        for first, last in [*even, (0, times.layers), *every_stage]:
            answer, right = asked(stage_times, times, first, last), right_times(times, first, last)
            if all(map(close, answer, right)):
                continue
            layers = f"layers {first} to {last - 1}" if last - first > 1 else f"layer {first}"
            said = f"{layers} of {times.layers}: you say {answer[0]:g} and {answer[1]:g} ms"
            return f"{said}; {what_is_wrong(times, first, last, answer, right)}"


def what_is_wrong(times, first, last, answer, right):
    """The mistake that leads to this answer, as a question or a sentence."""
    count, is_last = last - first, last == times.layers
    forward, backward = answer
    if count > 1 and close(forward, count * times.layer[0] + times.layer[0]):
        return f"`last` is not one of them, so there are {count}"
    if is_last and close(forward, right[0] - times.head[0]) and times.head[0]:
        return f"this stage also makes the scores, which takes {times.head[0]:g} ms more"
    if not is_last and times.head[0] and close(forward, right[0] + times.head[0]):
        return "the head is on the last stage only"
    if first == 0 and times.embedding[0] and close(forward, right[0] - times.embedding[0]):
        return f"this stage also looks the tokens up, {times.embedding[0]:g} ms"
    if first > 0 and times.embedding[0] and close(forward, right[0] + times.embedding[0]):
        return "the embedding is on the first stage only"
    if close(forward, right[0]) and times.recompute:
        again = count * times.layer[0]
        if close(backward, right[1] - again):
            return f"its layers run forward a second time before their backward: {again:g} ms more"
        if close(backward, right[1] - again + right[0]):
            return "only the layers run forward again, neither the embedding nor the head"
    if close(forward, right[0]) and close(backward, 2 * forward):
        return "a backward was measured, too; it need not be two forwards"
    if close(forward, right[1]) and close(backward, right[0]):
        return "the forward comes first, and then the backward"
    told = f"its layers and ends add up to {right[0]:g} and {right[1]:g} ms"
    again = f", {count * times.layer[0]:g} of these {right[1]:g} in the layers' second forward"
    return told + again if times.recompute else told


def perform(stage_times):
    """Train with the even cut and with the reader's own on real ranks, and print both steps."""
    try:
        chosen = best_cut(lambda first, last: asked(stage_times, MEASURED, first, last))
    except NotAttempted:
        print(NOT_ATTEMPTED)
        return
    except WrongAnswer as error:
        print(f"Not yet: {error}")
        return
    print(
        "Four ranks train with each cut; on a busy machine this takes up to a minute.", flush=True
    )
    for name, cut in (("even", EVEN), ("yours", chosen)):
        both = [right_times(MEASURED, first, last) for first, last in cut_as(cut)]
        forward, backward = (list(column) for column in zip(*both))
        schedule = one_f_one_b(RANKS, MICROBATCHES)
        performed = perform_schedule(schedule, Costs(forward, backward))
        predicted = step_of(cut, lambda *part: right_times(MEASURED, *part))
        print(
            f"{name:5}  {','.join(map(str, cut)):9}  predicted {predicted:.0f} ms, "
            f"performed {performed:.0f} ms"
        )


MODELS = {
    "1.3 billion": Model(layers=24, hidden=2048, vocabulary=32_000, batch=256),
    "6.6 billion": Model(layers=32, hidden=4096, vocabulary=32_000, batch=256),
}
MACHINES = {
    "one node": Machine(gpus=8),
    "four nodes": Machine(gpus=32),
    "four nodes, one slow card each": Machine(gpus=32, between=Link(2.8e9, 30e-6, number=1)),
}


@lru_cache
def ways_of(name, where):
    """{name: Way} of all ways to train model `name` on machine `where`."""
    return {way.name: way for way in ways(MODELS[name], MACHINES[where])}


@checked(
    "only the slow card demands a pipeline; elsewhere, sharding is as fast as any layout, within the "
    "error of a forecast."
)
def choices(chosen):
    """Check `chosen`: {(model, machine): name of a way}. The way must be possible, and no other may
    be faster by more than the forecasts' error."""
    if not isinstance(chosen, dict):
        raise WrongAnswer("chosen is a dictionary, {(model, machine): name}")
    if chosen and all(pick is ... for pick in chosen.values()):
        raise NotAttempted
    for name in MODELS:
        for where in MACHINES:
            if (name, where) not in chosen:
                return f"nothing is chosen for {name}, {where}"
            pick = chosen[name, where]
            if pick is ... or pick is None:
                return f"{name}, {where} is still open"
            found = ways_of(name, where)
            if pick not in list(found):
                return f"{name}, {where}: there is no way called {pick!r:.60}; use {', '.join(map(repr, found))}"
            way = found[pick]
            if way.problem:
                return f"{name}, {where}: {pick} cannot be done, {way.problem}"
            best = min((w for w in found.values() if not w.problem), key=lambda w: w.seconds)
            if least_seconds(way, where) > most_seconds(best, where):
                return (
                    f"{name}, {where}: {pick} takes {way.seconds:.2f} s a step, and {best.name} "
                    f"takes {best.seconds:.2f} s; look at {reason(way, best)}"
                )


def least_seconds(way, where):
    """The seconds of a step if the forecast is as much too long as others of its kind were."""
    return expected_error(MACHINES[where], way.plan).seconds(way.seconds)[0]


def most_seconds(way, where):
    """The seconds of a step if the forecast is as much too short as others of its kind were."""
    return expected_error(MACHINES[where], way.plan).seconds(way.seconds)[1]


def reason(way, best):
    """The main reason why `way` is slower than `best`, as the end of a sentence."""
    if way.leaving > best.leaving:
        return f"the {way.leaving / 1e9:.0f} GB that leave each node"
    if way.plan.tensor > 1:
        return f"the {way.sent / 1e9:.0f} GB that each GPU sends within the layers"
    return "how long its ranks wait, and at the head on its last stage"


def _drawn_training(choose):
    """Parameters, tokens, days, and the operations per second that a GPU reaches."""
    parameters, tokens = (choose.randint(1, 99) * 10 ** choose.randint(8, 11) for _ in "PT")
    return parameters, 10 * tokens, choose.randint(2, 400) / 2, choose.randint(20, 900) * 10**12


TRAININGS = [
    (175e9, 300e9, 34, 140e12),
    (175e9, 300e9, 10, 140e12),
    (7e9, 1e12, 30, 200e12),
    # Whole nodes exactly, without rounding.
    *((nodes * 2**29, 86400 * 2**23, 32, 2**47) for nodes in range(1, 17)),
    *drawn(_drawn_training),
]


@checked("8 T P / (n X), turned round, and rounded up to nodes that can be rented whole.")
def gpus_needed(needed):
    """Check `needed(parameters, tokens, days, flops)`: the GPUs, in whole nodes of 8.

    The training time follows equation 4 of Megatron-LM (Narayanan et al. 2021).
    """
    for parameters, tokens, days, flops in TRAININGS:
        exact = training_days(parameters, tokens, 1, flops) / days
        right = GPUS_PER_NODE * math.ceil(exact / GPUS_PER_NODE)
        answer = call_for_number(needed, parameters, tokens, days, flops)
        if answer == right:
            continue
        case = f"{parameters:g} parameters, {tokens:g} tokens, {days:g} days: you say {answer:g}"
        if answer == right - GPUS_PER_NODE:
            return f"{case}, a node too few: that takes longer than {days:g} days"
        if answer == right + GPUS_PER_NODE:
            return f"{case}, a node too many: {right} GPUs are enough"
        if answer == right // GPUS_PER_NODE:
            return f"{case}, which is the number of nodes, or the 8 of 8 T P is missing"
        if abs(answer - exact) < 1:
            return f"{case} GPUs, which are not whole nodes of {GPUS_PER_NODE}; round up"
        without = GPUS_PER_NODE * math.ceil(exact * 6 / 8 / GPUS_PER_NODE)
        if answer == without:
            return f"{case}: that is 6 T P, without the second forward of recomputed activations"
        if answer > 1e6 * right:
            return f"{case}; the more operations per second a GPU reaches, the fewer GPUs it takes"
        if answer > 20 * right:
            seconds = f"{days:g} days have {days * SECONDS_PER_DAY:.0f}"
            raise WrongAnswer(f"{case}; a day has {SECONDS_PER_DAY} seconds, and {seconds}")
        return (
            f"{case}; 8 x {tokens:g} x {parameters:g} operations in {days:g} days are the work of "
            f"{right} GPUs"
        )
