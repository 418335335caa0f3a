"""A machine is measured, fitted, kept as a file, and forecasts what was not measured."""

import itertools
import json
import math
import random
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from ranks import run_on_ranks

from files.inputs import InputError
from pipeline.model import ModelConfig, build_part
from planning import machine_timing, performed_runs
from planning.forecast import forecast, stage_costs
from planning.known_models import of_the_course
from planning.machine import Machine, machine_from
from planning.performed_runs import measure_machine, perform_here
from planning.plan_commands import flags_of
from planning.time_coefficients import (
    KINDS,
    REST,
    TERMS,
    TimeCoefficients,
    as_text,
    embedding_quantities,
    head_quantities,
    layer_quantities,
)
from planning.training_plan import Plan

pytestmark = pytest.mark.further  # it measures this machine

MODEL = replace(of_the_course(8, 96, 4, 2, 256), length=64, batch=16)
# Seconds of each term; a backward twice a forward, its halves half of that.
FORWARD = (1e-4, 2e-4, 3e-11, 1e-10, 5e-5, 2e-10, 3e-4, 4e-11, 2e-10)
ACTIONS = tuple(tuple(factor * one for one in FORWARD) for factor in (1, 2, 1, 1))
MEASURED = TimeCoefficients(ACTIONS, 1e-3, 1e-5, 1e-8, 2e-4, 3e-10, 5e-4, 0.0)
HERE = Machine(2, gpus_per_node=2, memory=1e10, measured=MEASURED, bytes_per_value=4)


def seconds_of(**amounts):
    return sum(dict(zip(TERMS, FORWARD))[term] * amount for term, amount in amounts.items())


def test_a_stage_costs_its_action_its_layers_and_its_ends():
    plan = Plan("1f1b", 2, microbatch=2, cut=(5, 3))
    costs = stage_costs(MODEL, HERE, plan)
    first = seconds_of(action=1, **layer_quantities(MODEL, 2, 5), **embedding_quantities(MODEL, 2))
    last = seconds_of(action=1, **layer_quantities(MODEL, 2, 3), **head_quantities(MODEL, 2))
    assert costs.forward == pytest.approx([first, last], rel=1e-12)
    assert costs.backward == pytest.approx([2 * first, 2 * last], rel=1e-12)
    again = stage_costs(MODEL, HERE, replace(plan, recompute="full")).recompute
    assert again[1] == pytest.approx(seconds_of(**layer_quantities(MODEL, 2, 3)), rel=1e-12)
    split = stage_costs(MODEL, HERE, replace(plan, schedule="zb-h1"))
    assert split.backward_weight == pytest.approx([first, last], rel=1e-12)


def test_a_message_takes_its_time_from_both_of_its_ranks_and_a_turn_of_a_v_has_none():
    busy = replace(HERE, measured=replace(MEASURED, message=1e-3))
    for plan, ends in (
        (Plan("1f1b", 2, microbatch=2), (1, 1)),
        (Plan("interleaved-1f1b", 2, 2, microbatch=2), (1, 2, 2, 1)),
        (Plan("zb-v", 2, 2, microbatch=2), (1, 1, 1, 1)),
    ):
        free, costs = stage_costs(MODEL, HERE, plan), stage_costs(MODEL, busy, plan)
        later = [1e-3 * count for count in ends]
        for ours, before in ((costs.forward, free.forward), (costs.backward, free.backward)):
            gained = [one - other for one, other in zip(ours, before)]
            assert gained == pytest.approx(later, rel=1e-9)
        if plan.schedule == "zb-v":
            assert costs.backward_weight == free.backward_weight


def test_a_size_has_run_forward_and_backward_before_its_times_count(monkeypatch):
    numbers = itertools.count()

    def number_of(job, function, *arguments):
        function(*arguments)
        return next(numbers)

    monkeypatch.setattr(machine_timing, "time_of", number_of)
    job = SimpleNamespace(device=torch.device("cpu"), num_ranks=1)
    config, held = ModelConfig(8, 32, 2, 1, 8, 256), machine_timing.HELD
    part = build_part(config, 3, 4, 0, torch.float32)
    times = machine_timing.time_stage(job, config, part, 1, 2, torch.float32)
    unmeasured = 2 * held
    assert times["F"] == list(range(unmeasured, unmeasured + held))
    assert {kind: len(seconds) for kind, seconds in times.items()} == dict.fromkeys(KINDS, held)


def test_three_trainings_tell_what_a_step_and_what_a_message_take(monkeypatch):
    """Performed by a machine that takes 5 ms more per step and 0.7 ms more per end of a message."""
    busy = replace(MEASURED, step=MEASURED.step + 5e-3, message=0.7e-3)

    def perform(model, machine, plan, steps):
        seconds = forecast(model, replace(machine, measured=busy), plan).update
        return performed_runs.Performed(0.0, seconds, [], [])

    monkeypatch.setattr(performed_runs, "perform_here", perform)
    step, message = performed_runs.besides(HERE, 64)
    assert step == pytest.approx(5e-3, rel=0.02) and message == pytest.approx(0.7e-3, rel=0.05)
    for gpus in (3, 5, 6, 12):  # any number of ranks divides the batch
        assert performed_runs.besides(replace(HERE, gpus=gpus), 64)[0] == pytest.approx(
            5e-3, rel=0.02
        )
    step, message = performed_runs.besides(replace(HERE, gpus=1), 64)
    assert step == pytest.approx(5e-3, rel=1e-9) and message == 0


def test_a_step_adds_sums_update_and_what_it_takes_besides():
    alone = forecast(MODEL, replace(HERE, gpus=1), Plan(microbatch=4))
    actions = stage_costs(MODEL, HERE, Plan(microbatch=4))
    work = 4 * (actions.forward[0] + actions.backward[0])
    weights = MODEL.parameters
    update = 1e-3 + 1e-5 * 9 * 8 + 1e-8 * weights + 5e-4
    assert alone.update == pytest.approx(work + update, rel=1e-3)
    two = forecast(replace(MODEL, batch=32), HERE, Plan(replicas=2, microbatch=4))
    assert two.update - alone.update == pytest.approx(2e-4 + 3e-10 * 4 * weights, rel=1e-2)


def rows(noise=0.0, seed=0):
    """Rows as measure_stages gives them, of a machine with these terms."""
    draw = random.Random(seed)
    found = []
    for width in (64, 128, 256):
        model = machine_timing.of_the_course_at(width, 64)
        for count in (1, 4, 16):
            ends = ({}, head_quantities(model, count), embedding_quantities(model, count))
            for layers, end in ((1, 0), (3, 0), (1, 1), (1, 2)):
                quantities = {"action": 1, **layer_quantities(model, count, layers), **ends[end]}
                for kind in KINDS:
                    seconds = MEASURED.seconds(kind, quantities)
                    seconds *= 1 + noise * draw.uniform(-1, 1)
                    found.append((width, count, kind, quantities, seconds))
    return found


def test_the_fit_finds_the_machine_again_and_forecasts_sizes_that_it_has_not_seen():
    fitted = TimeCoefficients(machine_timing.fit_actions(rows()))
    unseen = {"action": 1, **layer_quantities(machine_timing.of_the_course_at(192, 64), 6, 2)}
    for kind in KINDS:
        expected = MEASURED.seconds(kind, unseen)
        assert fitted.seconds(kind, unseen) == pytest.approx(expected, rel=1e-6)
    assert max(machine_timing.left_out_errors(rows())) < 1e-6
    noisy = sorted(machine_timing.left_out_errors(rows(noise=0.05)))
    assert 0.002 < noisy[len(noisy) // 2] < 0.05  # of sums over stages, so less than of one action


def test_no_coefficient_is_below_0():
    found = machine_timing.least_squares([[1.0, 1.0], [1.0, 2.0], [1.0, 4.0]], [3.0, 2.0, 1.0])
    assert min(found) >= 0


def text_of_here():
    text = {
        "gpus_per_node": 2,
        "memory_gigabytes": 10,
        "teraflops": 0.05,
        "peak_teraflops": 0.05,
        "memory_gigabytes_per_second": 10,
        "inside": {"gigabytes_per_second": 2, "microseconds": 50},
        "between": {"gigabytes_per_second": 2, "microseconds": 50},
        "error": 0.1,
        "bytes_per_value": 4,
        "measured": as_text(MEASURED),
    }
    return json.loads(json.dumps(text))


def test_what_was_measured_is_read_back_as_it_was():
    machine = machine_from(text_of_here(), 2, "file")
    assert machine.measured == MEASURED and machine.bytes_per_value == 4


DAMAGE = [
    (lambda text: text.pop("error"), "file has no 'error'"),
    (lambda text: text.update(measured=3), "'measured' of file is not a JSON object"),
    (lambda text: text["measured"].pop("actions"), "has no 'actions' with F, B, I, W"),
    (lambda text: text["measured"]["actions"].pop("W"), "has no 'actions' with F, B, I, W"),
    (lambda text: text["measured"]["actions"].update(F=[]), "F is not a JSON object"),
    (lambda text: text["measured"]["actions"]["B"].pop("layer"), "B of file has no 'layer'"),
    (lambda text: text["measured"]["actions"]["I"].update(head=-1), "I of file has no 'head'"),
    (lambda text: text["measured"]["actions"].update(F=dict.fromkeys(TERMS, 0)), "takes no time"),
    (lambda text: text["measured"].update(step=math.inf), "file has no 'step'"),
    (lambda text: text.update(peak_teraflops=0.04), "'peak_teraflops' below its 'teraflops'"),
    (lambda text: text.update(bytes_per_value=3), "'bytes_per_value' of file is not 2, 4 or 8"),
    *((lambda text, term=term: text["measured"].pop(term), f"has no '{term}'") for term in REST),
]


@pytest.mark.parametrize(("damage", "sentence"), DAMAGE, ids=[words for _, words in DAMAGE])
def test_a_malformed_measured_machine_is_rejected_in_one_sentence(damage, sentence):
    text = text_of_here()
    damage(text)
    with pytest.raises(InputError, match=sentence) as error:
        machine_from(text, 2, "file")
    assert "\n" not in str(error.value)


def measure_less(rank, words):
    """Fewer sizes than plan.py --this-machine measures; no time is left after the first round."""
    less = {"WIDTHS": (64, 128, 256), "ROWS": (1, 4), "ROUNDS": 10**6, "LONGEST": 0}
    with (
        mock.patch.multiple(machine_timing, **less),
        mock.patch.object(sys, "argv", ["machine_timing", *words]),
    ):
        machine_timing.main()


def launch_less(words, ranks, launch=performed_runs.launch):
    if words[1] != "planning.machine_timing":
        return launch(words, ranks)
    run_on_ranks(measure_less, ranks, words[2:])


@pytest.mark.processes
def test_this_machine_is_measured_by_two_ranks_at_once_and_a_plan_is_performed(monkeypatch):
    monkeypatch.setattr(
        performed_runs, "besides", lambda machine, length: (0.0, 0.0)
    )  # three runs less
    monkeypatch.setattr(performed_runs, "launch", launch_less)
    try:
        text = measure_machine(2, 16)
    except subprocess.SubprocessError as error:
        pytest.fail(str(error))
    machine = machine_from(json.loads(json.dumps(text)), 2, "this machine")
    assert machine.gpus_per_node == 2 and machine.error >= 0.1
    assert 0 < text["error_left_out"]["median"] <= text["error_left_out"]["nine_tenths"]
    model = replace(of_the_course(4, 80, 2, 1, 256), length=16, batch=8)
    plan = Plan("1f1b", 2, microbatch=2, cut=(3, 1))
    assert "--cut" in flags_of(model, machine, plan)
    performed = perform_here(model, machine, plan, steps=4)
    assert performed.seconds > 0 and len(performed.bytes_counted) == 2
    # A loaded machine may double a time, and hardly ever makes it a tenth.
    assert -0.9 < performed.error < 2
    for forecast_, counted in zip(performed.bytes_forecast, performed.bytes_counted):
        assert forecast_ == pytest.approx(counted, rel=0.02)


@pytest.mark.processes
def test_a_measurement_without_a_length_is_rejected_in_one_sentence():
    from planning.performed_runs import launch

    with pytest.raises(subprocess.SubprocessError, match="give the length of the sequences"):
        launch(["-m", "planning.machine_timing", "x", "y"], 1)
