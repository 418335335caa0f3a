"""PipeDream's real weight stashing follows the papers' own update rules, and can be seen to fail.

Mini-batches and stages are counted from 1 in the names of facts, as in the papers, and from 0 in
the code.
"""

import functools
import json
import os
import shlex
import sys
from unittest import mock

import pipedream
import pytest
import torch
from further import first_of, further
from ranks import run_on_ranks

from course.failed_run import RunFailed
from course.launch import run
from extensions.asynchronous import asynchronous_reference, weight_stash
from extensions.asynchronous.pipedream_flags import add_pipedream_flags, losses_of_steps
from extensions.asynchronous.weight_stash import forward_version
from lab.simulator import Costs, simulate
from pipeline.collectives import open_groups
from pipeline.one_process import train_one_process
from pipeline.schedule import Action
from pipeline.schedules import one_f_one_b
from pipeline.schedules import pipedream as pipedream_schedule
from pipeline.training import (
    cut_layers,
    microbatches_of,
    parse_arguments,
    start_job,
    training_parser,
)
from pipeline.worker import Worker

SMALL = "--layers 4 --dim 16 --heads 4 --kv-heads 2 --seq-len 8 --device cpu --steps 8"
MODES = {
    "stashed": "--batch-size 4",
    "latest": "--batch-size 4",
    "vertical-sync": "--batch-size 4",
    "double-buffered": "--batch-size 8 --microbatches 4",
}


def arguments_of(flags, num_ranks=None):
    """What the script makes of its flags, on this rank or for `num_ranks` of them."""
    ranks = {"RANK": "0", "WORLD_SIZE": str(num_ranks)} if num_ranks else {}
    parser = training_parser(pipedream.__doc__)
    add_pipedream_flags(parser)
    with mock.patch.object(sys, "argv", ["pipedream.py", *shlex.split(flags)]):
        with mock.patch.dict(os.environ, ranks):
            return parse_arguments(parser)


def train(rank, flags, fault=None, by_hand=True):
    """Train on this rank with the script's loop, or the worker; `fault` plants one."""
    arguments = arguments_of(flags)
    if fault:
        FAULTS[fault]()
    schedule = pipedream.build_whole_schedule(arguments)
    job = start_job(arguments, schedule.pairs)
    open_groups(job, [ranks for ranks in schedule.ranks_of_stage.values() if len(ranks) > 1])
    stage = pipedream.build_stashing_stage(
        arguments, job, schedule, cut_layers(arguments, schedule.num_stages)
    )
    if by_hand:
        losses = pipedream.run_training(arguments, job, stage, schedule)
    else:
        losses = by_the_worker(arguments, job, stage, schedule)
    losses = losses_of_steps(job, arguments.microbatches, losses)
    job.leave()
    return {
        "losses": [loss.item() for loss in losses],
        "used": stage.used,
        "peak": stage.stash.peak,
        "live": stage.stash.num_live(),
    }


def by_the_worker(arguments, job, stage, schedule):
    """Perform the whole training run as one schedule; {micro-batch: its share of a loss}."""
    batches = [microbatches_of(arguments, job.device, step) for step in range(arguments.steps)]
    inputs, targets = ([one for batch in half for one in batch] for half in zip(*batches))
    worker = Worker(job, schedule, {stage.index: stage})
    worker.run_step(inputs, targets)
    return worker.losses


@functools.cache
def performed(mode, num_ranks=4, optimizer="sgd"):
    """What real ranks did under a mode, and the flags that they were given."""
    flags = f"{SMALL} {MODES[mode]} --weights {mode} --optimizer {optimizer}"
    return run_on_ranks(train, num_ranks, flags), flags


ROUND_ROBIN = {"2-1-1": 12, "3-1": 13, "1-2": 9, "2-2": 8, "1-2-1": 11, "4": 8}


@functools.cache
def performed_round_robin(replicas, optimizer="sgd"):
    """What real ranks did with stages on several of them; the steps leave some groups incomplete."""
    flags = f"{SMALL} --batch-size 4 --optimizer {optimizer} --replicas {replicas}"
    flags += f" --steps {ROUND_ROBIN[replicas]}"
    return run_on_ranks(train, sum(map(int, replicas.split("-"))), flags), flags


def use_versions_one_too_old():
    right = weight_stash.forward_version
    weight_stash.forward_version = lambda mode, k, *rest: right(mode, max(0, k - 1), *rest)
    weight_stash.StashingStage.oldest_needed = lambda stage: 0  # else it would not be there


def do_not_average():
    weight_stash.StashingStage.average = lambda stage, gradients: None


def do_not_keep_versions():
    original = weight_stash.WeightStash.__init__

    def without_stash(self, parameters, keep=True):
        original(self, parameters, keep=False)

    weight_stash.WeightStash.__init__ = without_stash


FAULTS = {
    "a version too old": use_versions_one_too_old,
    "no stash": do_not_keep_versions,
    "no averaging": do_not_average,
}


def largest_difference_from_rule(results, flags):
    losses = results[0]["losses"]
    rule = asynchronous_reference.train_by_rule(arguments_of(flags, len(results)))
    assert len(losses) == len(rule) >= 8
    return max(abs(ours - theirs) for ours, theirs in zip(losses, rule))


@pytest.mark.parametrize("num_ranks", first_of([4, 1, 2], 1))
@pytest.mark.parametrize("mode", MODES)
def test_losses_follow_the_modes_update_rule_to_1e_10(mode, num_ranks):
    assert largest_difference_from_rule(*performed(mode, num_ranks)) <= 1e-10


@pytest.mark.parametrize(
    "optimizer", first_of(["adamw --learning-rate 0.01", "momentum --learning-rate 0.05"], 1)
)
@pytest.mark.parametrize("mode", MODES)
def test_momentum_and_adamw_follow_the_rule_too(mode, optimizer):
    assert largest_difference_from_rule(*performed(mode, 4, optimizer)) <= 1e-10


@pytest.mark.parametrize("mode", first_of(MODES, 2))
def test_the_worker_performs_the_same_training_to_the_last_bit(mode):
    results, flags = performed(mode)
    assert run_on_ranks(train, 4, flags, None, False) == results


def test_so_it_does_with_a_stage_on_two_ranks():
    results, flags = performed_round_robin("2-1-1")
    assert run_on_ranks(train, 4, flags, None, False) == results


@pytest.mark.parametrize("fault", ["a version too old", "no stash"])
def test_a_planted_fault_breaks_the_rule(fault):
    flags = f"{SMALL} {MODES['stashed']}"
    results = run_on_ranks(train, 4, flags, fault)
    assert largest_difference_from_rule(results, flags) > 1e-4


def test_the_four_modes_are_four_different_rules():
    losses = {
        mode: asynchronous_reference.train_by_rule(
            arguments_of(f"{SMALL} --batch-size 8 --weights {mode} {cut}", 4)
        )[-1]
        for mode, cut in [("stashed", ""), ("latest", ""), ("vertical-sync", "")]
        + [("double-buffered", "--microbatches 4")]
    }
    assert len({round(loss, 6) for loss in losses.values()}) == 4


@functools.cache
def deep_losses(num_ranks, mode, seed, shift=0.0):
    """The losses by the rule, from starting weights that are moved by `shift` times a draw."""
    flags = "--steps 40 --batch-size 8 --dim 16 --layers 8 --learning-rate 0.4 --device cpu"
    arguments = arguments_of(f"{flags} --weights {mode} --seed {seed}", num_ranks)
    build = asynchronous_reference.build_model

    def moved(*rest):
        model, draw = build(*rest), torch.Generator().manual_seed(1)
        for weight in model.parameters():
            weight.data *= 1 + shift * torch.randn(weight.shape, generator=draw, dtype=weight.dtype)
        return model

    with mock.patch.object(asynchronous_reference, "build_model", moved):
        return asynchronous_reference.train_by_rule(arguments)


def last_five(num_ranks, mode, seed):
    return sum(deep_losses(num_ranks, mode, seed)[-5:]) / 5


@pytest.mark.further
@further
def test_without_a_stash_eight_ranks_end_far_above_those_with_one_and_four_ranks_do_not():
    # Of seed 1; lesson 04 trains from three seeds, on real ranks.
    assert last_five(8, "latest", 1) - last_five(8, "stashed", 1) > 0.3
    assert abs(last_five(4, "latest", 1) - last_five(4, "stashed", 1)) < 0.1


@pytest.mark.further
def test_only_without_a_stash_does_the_13th_digit_of_the_weights_decide_the_losses():
    apart = {}
    for mode in ("stashed", "latest"):
        pairs = zip(deep_losses(8, mode, 1), deep_losses(8, mode, 1, shift=1e-13))
        apart[mode] = max(abs(ours - moved) for ours, moved in pairs)
    assert apart["stashed"] < 1e-12
    assert apart["latest"] > 1


def test_one_stage_without_delay_is_plain_gradient_descent():
    flags = f"{SMALL} {MODES['stashed']}"
    arguments = arguments_of(flags, 1)
    rule = asynchronous_reference.train_by_rule(arguments)
    assert rule == pytest.approx(train_one_process(arguments), abs=1e-12)


def test_forward_of_minibatch_k_at_stage_s_sees_max_0_k_minus_1_minus_n_minus_s():
    for s in range(1, 5):
        for k in range(1, 9):
            seen = forward_version("stashed", k - 1, s - 1, [1, 1, 1, 1])
            assert seen == max(0, k - 1 - (4 - s))


def test_minibatch_5_of_four_stages_uses_versions_1_2_3_4_pipedream_section_3_3():
    results = performed("stashed")[0]
    assert [result["used"][4].forward for result in results] == [1, 2, 3, 4]
    assert [result["used"][4].backward for result in results] == [1, 2, 3, 4]


def test_vertical_sync_gives_minibatch_5_version_1_on_every_stage():
    results = performed("vertical-sync")[0]
    assert [result["used"][4].forward for result in results] == [1, 1, 1, 1]


def test_without_a_stash_backward_k_uses_version_k_minus_1_everywhere():
    results = performed("latest")[0]
    for result in results:
        assert [use.backward for use in result["used"]] == list(range(8))
    assert [result["used"][4].forward for result in results] == [1, 2, 3, 4]


def test_double_buffered_microbatch_k_uses_version_floor_k_minus_1_over_m_minus_1_2bw():
    for result in performed("double-buffered")[0]:
        versions = [use.forward for use in result["used"]]
        assert versions == [max((k - 1) // 4 - 1, 0) for k in range(1, 33)]


@pytest.mark.parametrize(
    ("mode", "most"),
    [
        ("stashed", [4, 3, 2, 1]),
        ("latest", [1, 1, 1, 1]),
        ("vertical-sync", [4, 4, 4, 4]),
        ("double-buffered", [2, 2, 2, 2]),
    ],
)
def test_live_versions_are_as_few_as_the_mode_needs(mode, most):
    results = performed(mode)[0]
    assert [result["peak"] for result in results] == most


def test_stashed_versions_are_freed_as_soon_as_no_minibatch_needs_them():
    results = performed("stashed")[0]
    assert [result["live"] for result in results] == [1, 1, 1, 1]


def test_an_update_follows_each_backward_in_the_order_of_1f1b():
    for order, plain in zip(pipedream_schedule(4, 8).orders, one_f_one_b(4, 8).orders):
        assert tuple(action for action in order if action.kind != "U") == plain
        for action, following in zip(order, order[1:] + (None,)):
            if action.kind == "B":
                assert following == Action(action.stage, "U", action.microbatch)


def test_after_the_warm_up_one_minibatch_ends_every_forward_plus_backward():
    timeline = simulate(pipedream_schedule(4, 40), Costs(10, 20))
    ends = [e.end for e in timeline.by_rank[0] if e.action.kind == "B"]
    assert {b - a for a, b in zip(ends, ends[1:])} == {30.0}
    assert timeline.makespan == 40 * 30 + 3 * 30


@pytest.mark.parametrize("replicas", first_of(ROUND_ROBIN, 3))
def test_1f1b_rr_updates_once_for_r_minibatches_with_their_mean_gradient(replicas):
    assert largest_difference_from_rule(*performed_round_robin(replicas)) <= 1e-10


@pytest.mark.parametrize("optimizer", first_of(["adamw --learning-rate 0.01", "momentum"], 1))
def test_1f1b_rr_follows_its_rule_with_momentum_and_adamw(optimizer):
    assert largest_difference_from_rule(*performed_round_robin("2-1-1", optimizer)) <= 1e-10


def test_a_stage_whose_replicas_do_not_average_breaks_the_rule():
    results, flags = performed_round_robin("2-1-1")
    faulty = run_on_ranks(train, 4, flags, "no averaging")
    assert largest_difference_from_rule(results, flags) <= 1e-10
    assert largest_difference_from_rule(faulty, flags) > 1e-4


def test_1f1b_rr_gives_each_minibatch_to_replica_k_modulo_r_pipedream_section_3_2():
    results = performed_round_robin("2-1-1")[0]
    assert [use.minibatch for use in results[0]["used"]] == [0, 2, 4, 6, 8, 10]
    assert [use.minibatch for use in results[1]["used"]] == [1, 3, 5, 7, 9, 11]
    for result in results:
        assert all(use.forward == use.backward for use in result["used"])


def test_1f1b_rr_counts_versions_by_updates_and_keeps_warm_up_plus_one():
    results = performed_round_robin("2-1-1")[0]
    # Warm-up: floor(3 / 2) on the two replicas of the first stage, then 1 and 0.
    assert [use.forward for use in results[0]["used"]] == [0, 0, 1, 2, 3, 4]
    assert [use.forward for use in results[2]["used"]] == [0, *range(11)]
    assert [use.forward for use in results[3]["used"]] == list(range(12))
    assert [result["peak"] for result in results] == [2, 2, 2, 1]


def test_one_stage_on_four_ranks_is_data_parallel_training():
    """Four mini-batches from one version and then their mean gradient: one batch four times as large."""
    results, flags = performed_round_robin("4")
    losses = results[0]["losses"]
    assert [use.forward for result in results for use in result["used"]] == [0, 1] * 4
    rule = asynchronous_reference.train_by_rule(arguments_of(flags, 4))
    assert losses == pytest.approx(rule, abs=1e-12)


def test_the_script_prints_the_rule_and_the_versions(tmp_path):
    file = tmp_path / "losses"
    result = run(f"pipedream.py {SMALL} --verify --losses {file}", warm=True, show=False)
    assert "as promised" in result.output
    assert "stage 0: at most 4 live versions" in result.output
    assert "stage 3: at most 1 live version" in result.output
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [round(row["loss"], 6) for row in rows] == result.losses


@pytest.mark.parametrize(
    ("flags", "sentence"),
    first_of(
        [
            ("--weights stashed --microbatches 2", "has no use for --microbatches"),
            (
                "--weights double-buffered --microbatches 2",
                "needs --microbatches of at least the 4",
            ),
            ("--weights double-buffered", "needs --microbatches of at least the 4"),
            (
                "--replicas 2-1",
                "--replicas 2-1 adds up to 3 ranks, and this job has 4; name as many",
            ),
            ("--replicas 2-2 --weights latest", "has no rule for stages with several --replicas"),
            ("--replicas 2-0-2", "must be a whole number of at least 1, not '0'"),
            ("--replicas 2-2 --cut 4,3,1", "--cut 4,3,1 must name 2 stages with 8 layers in all"),
            ("--steps 3", "--steps 3 is less than the warm-up of 4 ranks"),
        ],
        3,
    ),
)
def test_flags_that_contradict_each_other_are_refused(flags, sentence):
    with pytest.raises(RunFailed) as failure:
        run(f"pipedream.py {flags}", warm=True, show=False)
    assert sentence in str(failure.value)
    assert "Traceback" not in str(failure.value)
