"""A pipeline of real processes takes the step that one process takes with the whole model.

The promise, in float64: losses and gradients differ by at most 1e-12 over the first ten steps,
losses by 1e-9 of themselves over 200. Whatever the cut, the number of micro-batches, the schedule
and the optimizer, and whether the worker or the loop written by hand takes the step.
"""

import functools
import importlib
import shlex
import sys
from unittest import mock

import naive_model_parallelism
import pytest
import torch
from further import first_of, further
from observed import attach_instruments
from ranks import run_on_ranks

from lab.activation_memory import ActivationMemory
from pipeline import schedules
from pipeline.model import token_loss
from pipeline.one_process import build_model, build_optimizer, train_one_process
from pipeline.training import (
    build_stage,
    cut_layers,
    microbatches_of,
    parse_arguments,
    start_job,
    training_parser,
)
from pipeline.worker import Worker

# Batches of 48 sequences can be cut into 1, 2, 3, 8 and 16 micro-batches.
SMALL = "--layers 8 --dim 16 --heads 4 --kv-heads 2 --seq-len 8 --batch-size 48 --device cpu"
SGD = f"{SMALL} --steps 3 --learning-rate 0.2"
ADAMW = f"{SMALL} --steps 3 --learning-rate 0.01 --optimizer adamw"


# One rank of a pipeline, and one process without a pipeline


def arguments_of(flags):
    with mock.patch.object(sys, "argv", ["test", *shlex.split(flags)]):
        return parse_arguments(training_parser("a test"))


def train(rank, script, flags, by_hand=True, worker_class=Worker):
    """Train on this rank with the loop of a lesson's script; report all that can be compared.

    `script` is `gpipe`, `one_f_one_b` or `naive_model_parallelism`; `flags` are its flags. The
    worker, too, takes the script's schedule, so that it is compared with all loops.
    """
    lesson = importlib.import_module(script)
    arguments = arguments_of(flags)
    job = start_job(arguments)
    stage = build_stage(arguments, job.rank, cut_layers(arguments, job.num_ranks), job.device)
    memory = ActivationMemory(every_pass=True)
    attach_instruments(job, [stage], memory)
    schedule = schedule_of(script, job.num_ranks, arguments.microbatches)
    worker = worker_class(job, schedule, {stage.index: stage})

    def run_step(inputs, targets):
        if not by_hand:
            return worker.run_step(inputs, targets)
        return lesson.run_step(job, stage, inputs, targets)

    optimizer = build_optimizer(
        arguments.optimizer, stage.part.parameters(), arguments.learning_rate
    )
    losses, gradients = [], None
    for step in range(arguments.steps):
        optimizer.zero_grad()
        loss = run_step(*microbatches_of(arguments, job.device, step))
        losses.append(None if loss is None else loss.item())
        if gradients is None:
            gradients = gradients_of(stage.part)
        optimizer.step()
    job.leave()
    return {"losses": losses, "gradients": gradients, "held": memory.peak}


def schedule_of(script, num_ranks, num_microbatches):
    makers = {"gpipe": schedules.gpipe, "one_f_one_b": schedules.one_f_one_b}
    return makers.get(script, schedules.naive)(num_ranks, num_microbatches)


def gradients_of(part):
    return {name: parameter.grad.clone() for name, parameter in part.named_parameters()}


@functools.cache
def one_process(flags):
    """The losses of every step, and the gradients of the first, of the whole model at once."""
    torch.set_num_threads(1)
    arguments = arguments_of(flags)
    model = build_model(arguments)
    inputs, targets = arguments.text.batch(0, arguments.batch_size, arguments.seq_len)
    token_loss(model(inputs), targets).backward()
    return {"losses": train_one_process(arguments), "gradients": gradients_of(model)}


# The comparison


def differences(ranks, reference):
    """What `train` reported on all ranks and one process do not have in common, as a set.

    `("gradient", rank)` for a rank with a gradient that is off in the first step, `("loss", step)`
    for a loss that is off. The last rank has the losses, each rank the gradients of its layers.
    """
    assert all(loss is None for rank in ranks[:-1] for loss in rank["losses"])
    assert len(ranks[-1]["losses"]) == len(reference["losses"])
    names = sorted(name for rank in ranks for name in rank["gradients"])
    assert names == sorted(reference["gradients"])
    found = set()
    for rank, result in enumerate(ranks):
        for name, gradient in result["gradients"].items():
            if not (gradient - reference["gradients"][name]).abs().max() <= 1e-12:
                found.add(("gradient", rank))
    for step, (ours, theirs) in enumerate(zip(ranks[-1]["losses"], reference["losses"])):
        if not abs(ours - theirs) <= (1e-12 if step < 10 else 1e-9 * abs(theirs)):
            found.add(("loss", step))
    return found


@functools.cache
def trained(num_ranks, script, flags, *, by_hand):
    """What `train` reports on each rank. Each run is made once, for all that is said about it."""
    return run_on_ranks(train, num_ranks, script, flags, by_hand)


def flags_of(base, cut, num_microbatches):
    return f"{base} --microbatches {num_microbatches}" + (f" --cut {cut}" if cut else "")


NAIVE = "naive_model_parallelism"
# (ranks, layers of each stage or None for an even cut, micro-batches)
GPIPE_BY_WORKER = [
    (1, None, 16),
    (2, "7,1", 3),
    (4, "1,4,2,1", 3),
    (1, None, 1),
    (2, None, 2),
    (3, None, 8),
    (3, "1,1,6", 1),
    (4, None, 8),
    (4, "1,4,2,1", 16),
    (8, None, 1),
    (8, None, 8),
]
GPIPE_BY_HAND = [
    (2, None, 16),
    (4, "1,4,2,1", 8),
    (1, None, 3),
    (3, "2,5,1", 2),
    (4, None, 1),
    (8, None, 3),
]
NAIVE_BY_HAND = [(2, None, 16), (4, "1,4,2,1", 8), (1, None, 2), (3, None, 3), (8, None, 1)]
NAIVE_BY_WORKER = [(4, "1,4,2,1", 3)]

ONE_F_ONE_B_BY_WORKER = [
    (2, "7,1", 8),
    (4, "1,4,2,1", 16),
    (1, None, 3),
    (3, None, 2),
    (8, None, 8),
]
ONE_F_ONE_B_BY_HAND = [(2, None, 1), (4, None, 8), (4, "1,4,2,1", 3), (8, None, 16)]

by_cut_and_microbatches = functools.partial(
    pytest.mark.parametrize, "num_ranks, cut, num_microbatches"
)


@by_cut_and_microbatches(first_of(GPIPE_BY_WORKER, 2))
def test_gpipe_by_the_worker_equals_one_process_to_1e_12(num_ranks, cut, num_microbatches):
    ranks = trained(num_ranks, "gpipe", flags_of(SGD, cut, num_microbatches), by_hand=False)
    assert differences(ranks, one_process(SGD)) == set()


@by_cut_and_microbatches(first_of(GPIPE_BY_HAND, 2))
def test_gpipe_by_hand_equals_one_process_to_1e_12(num_ranks, cut, num_microbatches):
    ranks = trained(num_ranks, "gpipe", flags_of(SGD, cut, num_microbatches), by_hand=True)
    assert differences(ranks, one_process(SGD)) == set()


@by_cut_and_microbatches(first_of(ONE_F_ONE_B_BY_WORKER, 2))
def test_1f1b_by_the_worker_equals_one_process_to_1e_12(num_ranks, cut, num_microbatches):
    ranks = trained(num_ranks, "one_f_one_b", flags_of(SGD, cut, num_microbatches), by_hand=False)
    assert differences(ranks, one_process(SGD)) == set()


@by_cut_and_microbatches(first_of(ONE_F_ONE_B_BY_HAND, 3))
def test_1f1b_by_hand_equals_one_process_to_1e_12(num_ranks, cut, num_microbatches):
    ranks = trained(num_ranks, "one_f_one_b", flags_of(SGD, cut, num_microbatches), by_hand=True)
    assert differences(ranks, one_process(SGD)) == set()


def test_1f1b_holds_the_bytes_of_min_m_p_minus_rank_microbatches_and_gpipe_of_m():
    all_of_them = trained(4, "gpipe", flags_of(SGD, None, 8), by_hand=False)
    few = trained(4, "one_f_one_b", flags_of(SGD, None, 8), by_hand=False)
    for rank in range(4):
        each, rest = divmod(all_of_them[rank]["held"], 8)
        assert rest == 0 and each > 0
        assert few[rank]["held"] == min(8, 4 - rank) * each


@by_cut_and_microbatches(first_of(NAIVE_BY_HAND, 2))
def test_naive_by_hand_equals_one_process_to_1e_12(num_ranks, cut, num_microbatches):
    ranks = trained(num_ranks, NAIVE, flags_of(SGD, cut, num_microbatches), by_hand=True)
    assert differences(ranks, one_process(SGD)) == set()


@by_cut_and_microbatches(NAIVE_BY_WORKER)
def test_naive_by_the_worker_equals_one_process_to_1e_12(num_ranks, cut, num_microbatches):
    ranks = trained(num_ranks, NAIVE, flags_of(SGD, cut, num_microbatches), by_hand=False)
    assert differences(ranks, one_process(SGD)) == set()


@pytest.mark.parametrize(
    "script, by_hand, cut, num_microbatches",
    [("gpipe", False, "5,3", 8), ("gpipe", True, None, 3), (NAIVE, True, "1,7", 2)],
)
def test_with_adamw_2_ranks_equal_one_process_to_1e_12(script, by_hand, cut, num_microbatches):
    ranks = trained(2, script, flags_of(ADAMW, cut, num_microbatches), by_hand=by_hand)
    assert differences(ranks, one_process(ADAMW)) == set()


@further
def test_200_steps_equal_one_process_to_1e_9_of_the_loss():
    flags = (
        "--layers 4 --dim 16 --heads 2 --kv-heads 1 --seq-len 8 --batch-size 8 --device cpu "
        "--steps 200 --learning-rate 0.2"
    )
    ranks = trained(2, "gpipe", flags_of(flags, "3,1", 4), by_hand=False)
    assert differences(ranks, one_process(flags)) == set()
    losses = ranks[-1]["losses"]
    assert len(losses) == 200 and losses[-1] < 0.7 * losses[0]  # and something has been learnt


@pytest.mark.parametrize("script", first_of(["gpipe", NAIVE], 1))
def test_the_same_cut_run_twice_is_equal_to_the_last_bit(script):
    flags = flags_of(SGD, "1,4,2,1", 8)
    once = trained(4, script, flags, by_hand=True)
    again = run_on_ranks(train, 4, script, flags, True)
    for ours, theirs in zip(once, again):
        assert ours["losses"] == theirs["losses"]
        assert ours["gradients"].keys() == theirs["gradients"].keys()
        for name, gradient in ours["gradients"].items():
            assert torch.equal(gradient, theirs["gradients"][name]), name


def test_the_reference_has_the_loss_and_the_gradients_of_the_definition():
    """One process is itself compared: with a derivative taken by finite differences."""
    reference = one_process(SGD)
    arguments = arguments_of(SGD)
    model = build_model(arguments)
    inputs, targets = arguments.text.batch(0, arguments.batch_size, arguments.seq_len)

    @torch.no_grad()
    def loss_along(directions, distance):
        for parameter, direction in zip(model.parameters(), directions):
            parameter += distance * direction
        loss = -model(inputs).log_softmax(-1).gather(-1, targets[..., None]).mean().item()
        for parameter, direction in zip(model.parameters(), directions):
            parameter -= distance * direction
        return loss

    generator = torch.Generator().manual_seed(0)
    directions = [
        torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
        for parameter in model.parameters()
    ]
    slope = sum(
        (reference["gradients"][name] * direction).sum().item()
        for (name, _), direction in zip(model.named_parameters(), directions)
    )
    assert reference["losses"][0] == pytest.approx(loss_along(directions, 0), abs=1e-13)
    measured = (loss_along(directions, 1e-6) - loss_along(directions, -1e-6)) / 2e-6
    assert measured == pytest.approx(slope, rel=1e-6)


def test_sgd_takes_to_the_last_bit_the_steps_of_torch_optim_sgd():
    # The pipeline and the one process update with the same code: only this tells if it is right.
    weights = [torch.full((3, 2), 0.7, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    optimizers = [
        build_optimizer("sgd", [weights[0]], 0.2),
        torch.optim.SGD([weights[1]], lr=0.2),
    ]
    for _ in range(3):
        for weight, optimizer in zip(weights, optimizers):
            optimizer.zero_grad()
            weight.pow(3).sum().backward()
            optimizer.step()
        assert torch.equal(*weights)
    assert not torch.equal(weights[0], torch.full_like(weights[0], 0.7))


@pytest.mark.parametrize("num_stages", [1, 3])
def test_naive_with_several_devices_in_one_process_prints_the_losses_of_one_process(
    num_stages, capsys
):
    argv = ["naive_model_parallelism", *shlex.split(SGD), "--single-process", str(num_stages)]
    with mock.patch.object(sys, "argv", argv):
        assert naive_model_parallelism.main() == 0
    printed = [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:]]
    assert printed == [f"{loss:.6f}" for loss in one_process(SGD)["losses"]]
