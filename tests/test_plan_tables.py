"""What plan.py prints fits into 80 columns, and --wide has what this leaves out."""

import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import plan as plan_script
import pretrain_llama
import pytest
from further import first_of

from extensions.pretraining.weight_count import count_weights
from pipeline.model import ModelConfig
from pipeline.one_process import LEARNING_RATES
from planning.candidates import all_plans, check_precision, forecasts
from planning.expected_error import expected_error
from planning.forecast import forecast
from planning.known_models import NAMED, find_model
from planning.machine import Link, Machine, read_machine
from planning.narrow import WIDTH, command_lines
from planning.plan_commands import MINUTES, RATE, STEPS, start_of
from planning.plan_memory import memory_per_rank
from planning.plan_tables import close_lines, error_lines, reason_lines, table_lines
from planning.reasons import limit_in_words, limit_of, parts_of
from planning.training_plan import Plan
from planning.transformer import Model

MODEL = Model(16, 1024, batch=64)
TRAIN = Path(plan_script.__file__).parents[1] / "slurm/train.sbatch"


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


TOO_LARGE = "--layers 40 --dim 5120 --heads 40 --vocabulary 64000 --dtype bfloat16 --replicas 8"


def test_a_run_that_does_not_fit_is_forecast_and_refused(capsys):
    words = f"pretrain_llama.py --gpus 16 --machine h100 {TOO_LARGE} --batch-size 64 --seq-len 512"
    with mock.patch.object(sys, "argv", ["plan.py", *shlex.split(words)]):
        with mock.patch("guard.one_sentence.keep_running_unheard"):
            status = plan_script.main()
    said = " ".join(capsys.readouterr().out.split())
    needed, has = re.search(
        r"does not fit: ([\d.]+) GB, and a GPU of h100 has ([\d.]+)$", said
    ).groups()
    assert status == 1 and f"GiB ({needed} GB), and what" in said and " s per update (" in said
    assert float(needed) > float(has) == 80


def test_a_gated_model_without_inner_is_the_one_that_pretrain_llama_builds(capsys):
    sizes = "layers=4,hidden=208,heads=4,kv_heads=2,vocabulary=300,gated=1,tied=0"
    model = find_model(sizes, 128, 16)
    assert model.parameters == count_weights(ModelConfig(4, 208, 4, 2, 128, 300))[0]
    assert find_model(f"{sizes},inner=832", 128, 16).inner == 832
    assert "--layers 4 --dim 208" in printed(f"{sizes} --gpus 2 --seq-len 128 --count 1", capsys)


def test_below_a_command_is_how_much_it_trains_and_what_to_add(capsys):
    defaults = pretrain_llama.program_parser().parse_args([])
    assert (STEPS, RATE) == (defaults.steps, LEARNING_RATES[defaults.optimizer])
    assert f"--time=00:{MINUTES}:00" in TRAIN.read_text()
    said = " ".join(printed("1m --gpus 16 --seq-len 128 --count 1", capsys).split())
    assert f"{STEPS} steps, in at most {MINUTES} minutes" in said and "checkpointed.sbatch" in said
    said = " ".join(printed("llama-3-8b --gpus 8 --seq-len 512 --count 1", capsys).split())
    assert f"1e-5 This trains {STEPS} steps. For more" in said and ".sbatch" not in said
    # The only plan that can be started with a saved model has a range and a size, too.
    assert re.search(
        r" takes [\d.]+ s per update \(expect [\d.]+ to [\d.]+ s\) and [\d.]+ GB", said
    )


def test_of_plans_that_take_the_same_time_the_leanest_is_first():
    model, machine = find_model("1b", 2048, 512), read_machine("h100", 64)
    plans = [Plan(replicas=64, microbatch=size) for size in (8, 2, 4)]
    found = forecasts(model, machine, plans)
    assert len({one.update for one in found}) == 1
    assert [one.plan.microbatch for one in found] == [2, 4, 8]
    assert forecasts(model, machine, plans, count=1)[0].plan.microbatch == 2
    with mock.patch("planning.candidates.lower_bound", lambda *words: -words[2].microbatch):
        assert forecasts(model, machine, plans)[0].plan.microbatch == 2  # played last


def test_the_plans_that_can_be_started_are_also_told_apart_or_not():
    machine = Machine(8)
    one = forecast(MODEL, machine, Plan(ranks=8))

    def timed(*seconds):
        return [replace(one, update=update) for update in seconds]

    whole = "Plans {} cannot be told apart by a forecast."
    for ours, others, said in (
        ((10, 10.1, 10.2), (1, 1.01, 1.02), [whole.format("4 to 6"), "Nor can plans 1 to 3."]),
        ((10, 10.1), (1,), [whole.format("1, 2")]),
        ((1, 1.01), (1.02,), [whole.format("1 to 3")]),
        ((1, 10), (5,), []),
    ):
        assert close_lines(machine, timed(*ours), timed(*others)) == said


def test_a_limit_has_its_share_and_stands_behind_the_work_where_that_is_more():
    machine = Machine(16)
    slow = replace(machine, between=Link(1e7, 14e-6, 1))
    for where, name, first in (
        (machine, "optimizer", "work, then "),
        (slow, "sums of gradients", ""),
    ):
        found = forecast(MODEL, where, Plan(replicas=16))
        share = parts_of(MODEL, where, found)[name] / found.update
        assert limit_in_words(MODEL, where, found) == f"{first}{name} ({share:.0%})"
    found = forecast(MODEL, machine, Plan(ranks=16))
    assert limit_in_words(MODEL, machine, found) == limit_of(MODEL, machine, found)


def test_the_first_line_names_the_network_between_nodes_if_there_are_several(capsys):
    text = printed("1m --gpus 16 --machine h100 --seq-len 128 --count 1", capsys)
    assert "8 per node and 8 x 46 GB/s between nodes, 128" in " ".join(text.split())
    assert "cannot be started with pretrain_llama.py:" in text
    flags = "pretrain_llama.py --machine h100 --batch-size 64"
    text = " ".join(printed(f"{flags} --gpus 16 --replicas 2", capsys).split())
    assert "8 per node and 8 x 46 GB/s between nodes: " in text
    assert "8 per node: " in " ".join(printed(f"{flags} --gpus 8", capsys).split())


def test_an_update_shorter_than_all_published_ones_is_said_to_need_kernels():
    machine, model = Machine(8), replace(MODEL, length=64)
    long, short = (forecast(one, machine, Plan(ranks=8)) for one in (MODEL, model))
    assert long.update > 0.4 > short.update
    for found, said in (([long], False), ([long, short], True)):
        assert ("starting kernels" in " ".join(error_lines(machine, found))) == said


def test_one_layer_and_one_micro_batch_are_singular(capsys):
    flags = "pretrain_llama.py --gpus 1 --layers 1 --batch-size 1 --microbatches 1"
    text = printed(flags, capsys)
    for words in ("1 layer of", "1 sequence of", "1 micro-batch of 1", "1 GPU of"):
        assert words in text
    model, machine = replace(MODEL, layers=8), Machine(8)
    plan = Plan(ranks=8, cut=(1,) * 8)
    lines = reason_lines(model, machine, forecast(model, machine, plan))
    assert any(re.search(r"with 1 layer( and the head)?$", line) for line in lines)
    assert not any("even cut" in line for line in lines)  # the plan's cut is that


@pytest.mark.parametrize("ranks", [4, 8])
def test_sharding_within_a_node_is_one_step_away_if_a_node_has_several_replicas(ranks):
    machine = Machine(16)
    found = forecast(MODEL, machine, Plan(ranks=ranks, replicas=16 // ranks))
    lines = reason_lines(MODEL, machine, found)
    assert any("sharding hybrid" in line for line in lines) == (ranks == 4)


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
