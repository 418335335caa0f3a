"""What plan.py prints fits into 80 columns, and --wide has what this leaves out."""

import json
import re
import shlex
import sys
from dataclasses import replace
from unittest import mock

import plan as plan_script
import pytest
from further import first_of

from extensions.pretraining.weight_count import count_weights
from pipeline.model import ModelConfig
from planning.candidates import all_plans, check_precision, forecasts
from planning.expected_error import expected_error
from planning.forecast import forecast
from planning.known_models import NAMED, find_model
from planning.machine import Machine, read_machine
from planning.narrow import WIDTH, command_lines
from planning.plan_commands import start_of
from planning.plan_memory import memory_per_rank
from planning.plan_tables import table_lines
from planning.training_plan import Plan
from planning.transformer import Model

MODEL = Model(16, 1024, batch=64)


def printed(flags, capsys):
    with mock.patch.object(sys, "argv", ["plan.py", *shlex.split(flags)]):
        with mock.patch("guard.one_sentence.keep_running_unheard"):
            plan_script.main()
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "flags",
    first_of(
        [
            "llama-3-8b --gpus 16 --why 8",
            "1b --gpus 16 --batch-size 512 --seq-len 2048 --why 1 --count 12",
            "llama-2-7b --gpus 72 --batch-size 72 --machine gb200 --precision fp8 --count 4",
            "layers=12,hidden=1000,vocabulary=9000,heads=8 --gpus 8 --batch-size 7",
            "pretrain_llama.py --gpus 8 --model 1b --recompute layer --seq-len 2048",
            "--published",
        ],
        3,
    ),
)
def test_nothing_that_is_printed_is_wider_than_80_columns(flags, capsys):
    with mock.patch("planning.plan_tables.error_of", return_value=-0.123):  # of --published
        lines = printed(flags, capsys).splitlines()
    assert lines and max(map(len, lines)) <= WIDTH


def test_a_wide_table_has_every_column_of_every_plan(capsys):
    text = printed("1b --gpus 8 --batch-size 64 --seq-len 2048 --count 3 --wide", capsys)
    heading = next(line for line in text.splitlines() if line.lstrip().startswith("layout  "))
    columns = "layout schedule size recompute sharding seconds tokens/s MFU GB idle to expect limit remark"
    assert heading.split() == columns.split()
    assert "limited by" not in text


def test_what_all_plans_share_is_said_once_and_what_differs_in_each_row():
    machine = Machine(8)
    plans = [Plan(ranks=8, recompute="full"), Plan(ranks=8, microbatch=2, recompute="full")]
    found = [forecast(MODEL, machine, plan) for plan in plans]
    lines = table_lines(MODEL, machine, found)
    at = next(index for index, line in enumerate(lines) if "layout" in line)
    shared = " ".join(lines[:at])
    assert "schedule 1f1b" in shared and "recompute full" in shared and "sharding none" in shared
    assert "schedule" not in lines[at] and "size" in lines[at]
    rows = [line.split() for line in lines[at:] if re.match(r"\d  ", line)]
    assert [row[:7] for row in rows] == [
        [number, "1", "x", "8", "x", "1", size] for number, size in (("1", "1"), ("2", "2"))
    ]


def test_below_each_plan_are_the_seconds_that_the_error_of_its_kind_allows():
    machine = Machine(8)
    found = [
        forecast(MODEL, machine, plan)
        for plan in (Plan(ranks=8), Plan(replicas=8, sharding="full"))
    ]
    text = " ".join(" ".join(table_lines(MODEL, machine, found)).split())
    for one in found:
        least, most = expected_error(machine, one.plan).seconds(one.update)
        assert least < one.update < most and f"expect {least:.3g} to {most:.3g} s" in text


def test_a_column_that_does_not_fit_is_said_below_its_row():
    machine = replace(Machine(8192), gpus=8192)
    model = replace(MODEL, layers=128, batch=8192)
    one, other = (
        Plan("interleaved-1f1b", 16, 8, 64, 8, recompute="operator", sharding="optimizer"),
        Plan("1f1b", 16, 1, 64, 8, microbatch=2, recompute="none", sharding="gradients"),
    )
    found = [
        replace(forecast(model, machine, plan), update=seconds, memory=123.4e9)
        for plan, seconds in ((one, 1.23e-5), (other, 12345.6))
    ]
    lines = table_lines(model, machine, found)
    assert max(map(len, lines)) <= WIDTH
    for words in ("operator", "none", "optimizer", "gradients", "limited by"):
        assert any(words in line for line in lines), words


def test_a_command_over_several_lines_is_the_same_command():
    command = "torchrun --standalone source_code/pretrain_llama.py " + "--flag value " * 20
    lines = command_lines(command)
    assert len(lines) > 3 and max(map(len, lines)) <= WIDTH
    read = "\n".join(lines).replace("\\\n", "")  # as a shell does
    assert shlex.split(read) == shlex.split(command)


# What one can do with a plan.


def test_a_gated_model_without_inner_is_the_one_that_pretrain_llama_builds(capsys):
    sizes = "layers=4,hidden=208,heads=4,kv_heads=2,vocabulary=300,gated=1,tied=0"
    model = find_model(sizes, 128, 16)
    assert model.parameters == count_weights(ModelConfig(4, 208, 4, 2, 128, 300))[0]
    assert find_model(f"{sizes},inner=832", 128, 16).inner == 832
    assert "--layers 4 --dim 208" in printed(f"{sizes} --gpus 2 --seq-len 128 --count 1", capsys)


def test_of_plans_that_take_the_same_time_the_leanest_is_first():
    model, machine = find_model("1b", 2048, 512), read_machine("h100", 64)
    plans = [Plan(replicas=64, microbatch=size) for size in (8, 2, 4)]
    found = forecasts(model, machine, plans)
    assert len({one.update for one in found}) == 1
    assert [one.plan.microbatch for one in found] == [2, 4, 8]
    assert forecasts(model, machine, plans, count=1)[0].plan.microbatch == 2
    with mock.patch("planning.candidates.lower_bound", lambda *words: -words[2].microbatch):
        assert forecasts(model, machine, plans)[0].plan.microbatch == 2  # played last


# FP8, and one machine on which nothing was compared.


def test_fp8_is_faster_where_the_machine_has_it_and_refused_where_it_does_not(capsys):
    model = replace(NAMED["llama-3-8b"], length=4096, batch=64)
    machine = read_machine("h100", 8)
    plan = Plan(ranks=8, kernels="fused")
    eight = replace(plan, precision="fp8")
    ratio = forecast(model, machine, eight).update / forecast(model, machine, plan).update
    assert machine.flops / machine.fp8_flops < ratio < 1  # attention and the head stay as they are
    assert memory_per_rank(model, machine, eight)[0] < memory_per_rank(model, machine, plan)[0]
    ours = NAMED["1b"]  # counted exactly in 16 bits; no script of the course trains it in FP8
    assert memory_per_rank(ours, machine, eight)[0] < memory_per_rank(ours, machine, plan)[0]
    assert {one.precision for one in all_plans(model, machine, precision="fp8")} == {"fp8"}
    with pytest.raises(Exception, match="--precision fp8: this machine's file has no"):
        check_precision("fp8", model, Machine(8))
    text = printed("1b --gpus 8 --batch-size 64 --machine h100 --precision fp8 --json", capsys)
    assert not json.loads(text)["started_by_the_course"]  # no script of the course trains in FP8


def test_a_node_of_72_gpus_takes_a_tensor_group_that_no_node_of_8_can():
    model = replace(NAMED["llama-3.1-405b"], length=8192, batch=72)
    machine = read_machine("gb200", 64)
    plans = list(all_plans(model, machine))
    assert {plan.tensor for plan in plans} >= {8, 16, 32}
    machine = read_machine("gb200", 144)
    assert not any(Plan(ranks=72).is_far(machine, rank, rank + 1) for rank in range(71))
    assert Plan(ranks=144).is_far(machine, 71, 72)
    assert expected_error(machine, Plan(ranks=8)).rows == 0
    assert start_of(machine, Plan(ranks=72)).startswith("sbatch --nodes=18 --gres=gpu:4 ")
    assert start_of(machine, Plan(ranks=4)).startswith("torchrun --standalone --nproc-per-node 4 ")
