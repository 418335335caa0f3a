"""plan.py as it is called, and what its search and its models must hold."""

import json
import re
import shlex
import sys
import time
from dataclasses import replace
from unittest import mock

import plan as plan_script
import pretrain_llama
import pytest
import torch
from further import first_of
from saved_models import write_model

from extensions.pretraining.weight_count import count_weights
from extensions.real_models.saved_settings import read_settings
from files.inputs import InputError
from pipeline.model import ModelConfig, cut_evenly
from pipeline.schedule import ScheduleError
from pipeline.schedules import one_f_one_b
from planning.candidates import DEEPEST, all_plans, divisors, forecasts, search_plans
from planning.counted_memory import predict_memory
from planning.forecast import forecast, stage_costs
from planning.known_models import NAMED, find_model
from planning.machine import Link, Machine, read_machine
from planning.narrow import command_lines
from planning.partition import Profile, plan_stages
from planning.plan_commands import OF_THE_COURSE, command_of
from planning.plan_memory import memory_per_rank
from planning.plan_tables import remark, table_lines
from planning.reasons import changes, limit_of, parts_of
from planning.training_plan import Plan, balanced_cut
from planning.transformer import Model

SMALL = Model(8, 1024, batch=16, vocabulary=32_000)
MACHINE = Machine(8)


def run(flags, capsys):
    """(exit status, what is printed) of plan.py."""
    with mock.patch.object(sys, "argv", ["plan.py", *shlex.split(flags)]):
        with mock.patch("guard.one_sentence.keep_running_unheard"):
            status = plan_script.main()
    return status, capsys.readouterr().out


def rejected(flags, capsys):
    with mock.patch.object(sys, "argv", ["plan.py", *shlex.split(flags)]):
        with pytest.raises(SystemExit) as end:
            plan_script.main()
    captured = capsys.readouterr()
    assert end.value.code not in (0, None)
    return captured.err or str(end.value.code)


def test_a_million_microbatches_are_forecast_by_a_few_rounds_of_them(capsys):
    status, said = run("1b --gpus 2 --batch-size 1048576", capsys)
    assert status == 0 and "--batch-size 1048576" in said


def test_more_plans_than_can_be_compared_are_rejected_with_the_numbers_that_make_them(capsys):
    with mock.patch("planning.candidates.MOST_PLANS", 50):
        said = rejected("llama-3-8b --gpus 64 --batch-size 64", capsys)
    assert said.startswith("--gpus 64 and --batch-size 64")
    assert "more than 50 plans; use" in said


def test_the_divisors_of_a_number_come_in_order_and_each_once():
    for number in range(1, 200):
        assert divisors(number) == tuple(n for n in range(1, number + 1) if number % n == 0)


# Models.


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-7b", 6.738),
        ("llama-3-8b", 8.030),
        ("llama-3-70b", 70.55),
        ("llama-3.1-405b", 405.9),
        ("qwen2.5-0.5b", 0.494),
        ("qwen2.5-7b", 7.616),
        ("mistral-7b-v0.1", 7.242),
        ("gpt-3", 174.6),
    ],
)
def test_named_models_have_the_published_number_of_weights(name, billions):
    assert NAMED[name].parameters / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize("name", OF_THE_COURSE)
def test_the_course_s_models_are_those_of_pretrain_llama(name):
    layers, dim, heads, kv_heads, vocabulary = pretrain_llama.MODELS[name]
    config = ModelConfig(layers, dim, heads, kv_heads, 128, vocabulary)
    numbers, _ = count_weights(config)
    assert NAMED[name].parameters == numbers


def test_a_config_json_of_transformers_gives_the_sizes_of_its_name(tmp_path):
    config = {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    }
    folder = tmp_path / "hidden=4096"  # which is not taken for a size
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    expected = replace(NAMED["llama-3-8b"], length=512, batch=8, norms_in_float32=True)
    assert find_model(str(folder), 512, 8) == expected
    assert find_model(str(folder / "config.json"), 512, 8) == expected
    gpt2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257,
            "n_positions": 1024}  # fmt: skip
    (tmp_path / "gpt2.json").write_text(json.dumps(gpt2))
    model = find_model(str(tmp_path / "gpt2.json"), 1024, 8)
    assert model.parameters == 124_439_808


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("nothing", "nothing is not a model's name"),
        ("layers=4", "does not say hidden, vocabulary"),
        ("layers=4,hidden=x,vocabulary=9", "'hidden=x' is not a size"),
        ("layers=٤,hidden=64,vocabulary=9", "'layers=٤' is not a size"),
        ("layers=257,hidden=64,vocabulary=9", "257 layers, and plans are compared for up to 256"),
        ("layers=4,hidden=64,vocabulary=9,heads=5", "5 heads do not divide a width of 64"),
        ("layers=4,hidden=64,vocabulary=9,heads=4,kv_heads=3", "3 heads for keys do not divide"),
        ("layers=99999999,hidden=64,vocabulary=9", "layers of .* is 99999999; "),
    ],
)
def test_a_model_that_cannot_be_is_rejected_in_one_sentence(text, sentence):
    with pytest.raises(InputError, match=sentence):
        find_model(text, 128, 8)


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"hidden_size": true}', '{"n_layer": -1}', "{}", None]
)
def test_a_malformed_config_is_rejected_in_one_sentence_with_a_fix(text, tmp_path):
    path = tmp_path / "config.json"
    path.mkdir() if text is None else path.write_text(text)
    with pytest.raises(InputError) as error:
        find_model(str(path), 128, 8)
    assert "\n" not in str(error.value) and "; " in str(error.value)


def test_a_size_of_a_config_is_called_by_its_key(tmp_path):
    path, config = tmp_path / "gpt2.json", {"model_type": "gpt2", "n_layer": 2, "n_positions": 8}
    for more, sentence in (
        ({"n_embd": 0}, "n_embd of .* is 0; "),
        ({}, "does not say hidden_size"),
    ):
        path.write_text(json.dumps({**config, "vocab_size": 9, **more}))
        with pytest.raises(InputError, match=sentence):
            find_model(str(path), 8, 8)


@pytest.mark.parametrize("key", ["tie_word_embeddings", "multi_query", "parallel_attn"])
def test_a_switch_of_a_config_in_quotes_is_not_taken_for_true(key, tmp_path):
    config = {"model_type": "falcon", "num_hidden_layers": 2, "hidden_size": 16, "vocab_size": 64}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "num_attention_heads": 2, key: "false"}))
    with pytest.raises(InputError, match=f'{key} is "false" in quotes'):
        find_model(str(path), 128, 8)


@pytest.mark.parametrize("norms", ["x", [1], -5, 1e308, 1.5])
def test_a_falcon_with_another_number_of_norms_is_rejected_in_one_sentence(norms, tmp_path):
    config = {"model_type": "falcon", "num_hidden_layers": 2, "hidden_size": 16, "vocab_size": 64}
    config |= {"num_attention_heads": 2, "new_decoder_architecture": True}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "num_ln_in_parallel_attn": norms}))
    with pytest.raises(InputError, match="num_ln_in_parallel_attn is .*, and not 1 or 2"):
        find_model(str(path), 128, 8)


# The search.


@pytest.mark.parametrize("bandwidth", first_of([2e9, 100e9], 1))
def test_the_search_finds_what_playing_every_plan_finds(bandwidth):
    machine = Machine(8, between=Link(bandwidth, 14e-6, 1), gpus_per_node=4, memory=6e9)
    plans = list(all_plans(SMALL, machine))
    assert len(plans) > 500
    everything = forecasts(SMALL, machine, plans)
    found = search_plans(SMALL, machine, plans, count=5)
    assert found.proven
    assert [one.update for one in found.best] == [one.update for one in everything[:5]]
    assert found.best[0].update < everything[-1].update / 2


def test_every_plan_uses_all_gpus_once_and_all_layers():
    machine = Machine(16)
    plans = list(all_plans(SMALL, machine))
    assert len(set(plans)) == len(plans)
    assert {plan.gpus for plan in plans} == {16}
    assert all(sum(plan.layers_of(SMALL)) == 8 for plan in plans)
    assert {plan.sharding for plan in plans} == {"none", "optimizer", "gradients", "hybrid", "full"}
    assert {plan.recompute for plan in plans} == {"none", "operator", "full"}
    assert {plan.tensor for plan in plans} == {1, 2, 4, 8}


@pytest.mark.parametrize(("gpus", "in_node"), [(4, 8), (8, 8), (16, 2)])
def test_replicas_fill_a_node_only_where_that_is_another_plan_than_stages(gpus, in_node):
    machine = Machine(gpus, gpus_per_node=in_node)
    plans = list(all_plans(SMALL, machine))
    alike = [plan for plan in plans if gpus <= in_node or plan.tensor == in_node]
    assert {plan.neighbours for plan in alike} == {"stages"}
    both = [plan for plan in alike if plan.ranks > 1 < plan.replicas][::40]
    for plan in both:  # nothing is lost
        other = replace(plan, neighbours="replicas")
        assert forecasts(SMALL, machine, [plan])[0].update == (
            forecasts(SMALL, machine, [other])[0].update
        )
    assert both
    rest = {plan.neighbours for plan in plans if plan not in alike}
    assert rest == ({"stages", "replicas"} if rest else set())


def test_plans_that_differ_in_no_column_differ_in_a_remark():
    plan = Plan(ranks=4, replicas=2, cut=(3, 2, 2, 1))
    assert remark(plan) == remark(Plan()) == ""
    assert remark(replace(plan, cut=())) == "even cut"
    found = forecast(SMALL, Machine(8), Plan(ranks=4, replicas=2))
    for share, tight in ((0.89, False), (0.91, True)):
        table = table_lines(SMALL, Machine(8, memory=found.memory / share), [found])
        assert ("memory is tight" in "\n".join(table)) == tight
    assert "replicas of one stage" in remark(replace(plan, neighbours="replicas"))


def test_the_parts_of_a_forecast_add_up_and_the_largest_is_its_limit():
    machine = Machine(16)
    slow = replace(machine, between=Link(1e8, 14e-6, 1))
    for where, limit in [(machine, None), (slow, "link of ranks 7 and 8")]:
        found = forecast(SMALL_16, where, Plan(ranks=16))
        parts = parts_of(SMALL_16, where, found)
        assert sum(parts.values()) == pytest.approx(found.update)
        assert min(parts.values()) >= -1e-9
        assert limit is None or limit_of(SMALL_16, where, found) == limit
    heavy = replace(SMALL_16, vocabulary=1_000_000)
    found = forecast(heavy, machine, Plan(ranks=16, microbatch=1))
    assert limit_of(heavy, machine, found) == "work of rank 15"
    apart = replace(Machine(8), inside=Link(1e8, 14e-6))
    for plan, limit in [
        (Plan(replicas=8, sharding="full"), "gathers of sharded weights"),
        (Plan(tensor=8), "messages within layers"),
    ]:
        assert limit_of(SMALL_16, apart, forecast(SMALL_16, apart, plan)) == limit


SMALL_16 = replace(SMALL, layers=16, batch=64)


def test_a_long_update_of_gpipe_takes_what_playing_all_of_it_takes():
    long, cut = replace(SMALL, batch=1511), (3, 2, 2, 1)
    for machine in (MACHINE, Machine(8, between=Link(1e8, 14e-6, 1), gpus_per_node=2)):
        plan = Plan("gpipe", 4, cut=cut, recompute="full")
        found = forecast(long, machine, plan)
        with mock.patch("planning.forecast.STEADY", ()):
            assert found.update == pytest.approx(forecast(long, machine, plan).update, rel=1e-9)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_memory_of_many_microbatches_of_gpipe_is_what_counting_all_of_them_gives(recompute):
    model, plan = find_model("1m", 128, 77), Plan("gpipe", 4, recompute=recompute)
    found = memory_per_rank(model, MACHINE, plan)
    with mock.patch("planning.plan_memory.ROUNDS", 100):
        assert found == memory_per_rank(model, MACHINE, plan)


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h2", "v-half"])
def test_the_parts_of_an_update_of_131071_microbatches_need_only_a_few_of_them(schedule):
    long, plan = replace(SMALL, batch=131_071), Plan(schedule, 4, 2 if schedule[0] == "v" else 1)
    with mock.patch("pipeline.schedules.MOST_ACTIONS", 50_000):
        found = forecast(long, MACHINE, plan)
        assert sum(parts_of(long, MACHINE, found).values()) == pytest.approx(found.update)


def test_what_is_one_step_away_differs_in_that_step():
    machine = Machine(8)
    plan = Plan(ranks=4, replicas=2)
    found = {what: one.plan for what, one, _ in changes(SMALL_16, machine, plan)}
    assert found["layers recomputed"] == replace(plan, recompute="full")
    assert found["schedule zb-h1"] == replace(plan, schedule="zb-h1")
    assert found["sharding optimizer"] == replace(plan, sharding="optimizer")
    by_work = replace(plan, cut=balanced_cut(SMALL_16, 4))  # another schedule keeps such a cut
    found = {what: one.plan for what, one, _ in changes(SMALL_16, machine, by_work)}
    assert found["schedule zb-h1"] == replace(by_work, schedule="zb-h1")
    assert found["schedule interleaved-1f1b"].cut == balanced_cut(SMALL_16, 8)


# The program.


def test_plan_prints_a_table_and_a_reason(capsys):
    flags = "1b --gpus 8 --batch-size 64 --seq-len 2048 --count 4 --why 1"
    status, text = run(flags, capsys)
    assert status == 0
    rows = re.findall(r"^ *\d  \d+ x \d+ x \d+ ", text, re.M)
    assert len(rows) == 8  # four to start, four on paper
    assert "work (" in text and "one step away" in text
    assert (
        re.search(r"data parallel +-\d+% to \+\d+%", text) and "published runs of this kind" in text
    )


def test_plan_says_in_json_what_it_says_in_words(capsys):
    status, text = run("1b --gpus 4 --batch-size 32 --seq-len 1024 --json", capsys)
    found = json.loads(text)
    assert status == 0
    first = found["plans"][0]
    assert first["seconds_range"][0] < first["seconds"] < first["seconds_range"][1]
    assert first["tokens_per_second"] == pytest.approx(32 * 1024 / first["seconds"])
    assert found["started_by_the_course"][0]["command"].startswith("torchrun ")
    updates = [one["seconds"] for one in found["plans"]]
    assert updates == sorted(updates)


def test_the_command_of_a_plan_needs_and_takes_what_its_forecast_says(capsys):
    model = find_model("1m", 128, 32)
    for plan in (
        Plan("interleaved-1f1b", 2, 2, 2, microbatch=2),
        Plan("zb-v", 4, 2, 1, microbatch=4, recompute="full"),
        Plan(replicas=4, microbatch=8),
        Plan("1f1b", 2, replicas=2, microbatch=2),
    ):
        words = shlex.split(command_of("1m", model, MACHINE, plan))
        at = words.index("source_code/pretrain_llama.py")
        flags = [*words[at:], "--gpus", str(plan.gpus)]
        status, printed = run(shlex.join(flags), capsys)
        assert status == 0
        found = forecast(model, Machine(plan.gpus), plan)
        assert f"{found.update:.3g} s per update (" in printed
        table = [float(row) for row in re.findall(r"^rank .* ([\d.]+)$", printed, re.M)]
        assert max(table) * 2**20 == pytest.approx(found.memory, rel=1e-3)
    nodes = command_of("1m", model, Machine(64), Plan("1f1b", 8, replicas=8))
    assert nodes.startswith("sbatch --nodes=8 --gres=gpu:8 slurm/train.sbatch pretrain_llama.py ")
    for plan in (Plan(tensor=4), Plan(replicas=4, sharding="optimizer")):
        assert command_of("1m", model, MACHINE, plan) is None
    assert command_of("llama-3-8b", NAMED["llama-3-8b"], MACHINE, Plan(ranks=4)) is None


@pytest.mark.further
def test_if_nothing_fits_the_answer_says_what_would_have_to_change(capsys):
    status, text = run("gpt-3 --gpus 16 --batch-size 64 --seq-len 2048", capsys)
    assert status == 1 and max(map(len, text.splitlines())) <= 80
    assert re.search(r"needs \d+\.\d GB, and a GPU has 80.0\nit fits on \d+ GPUs", text)
    status, text = run("1m --gpus 1 --memory 0.000001 --batch-size 1 --seq-len 128", capsys)
    assert status == 1 and "more GPUs alone do not help" in text


def test_where_nothing_fits_the_memory_of_each_plan_is_computed_once(capsys, monkeypatch):
    computed = []

    def noted(*plan):
        computed.append(plan)
        return memory_per_rank(*plan)

    monkeypatch.setattr("planning.bound.memory_per_rank", noted)
    status, text = run("gpt-3 --gpus 1 --memory 0.25 --batch-size 4", capsys)
    assert status == 1 and "more GPUs alone do not help" in text
    assert len(computed) == len(set(computed)) and {plan[1].gpus for plan in computed} >= {1, 32}
    assert all(plan[2].microbatch == 1 for plan in computed if plan[1].gpus > 1)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("", "a model is missing"),
        ("gpt-5", "gpt-5 is not a model's name"),
        ("sizes", "sizes such as layers=32,hidden=4096,vocabulary=32000"),
        ("1b --machine nowhere", "nowhere is neither a file nor one of"),
        ("1b --gpus 12", "--gpus 12 are not whole nodes of 8"),
        ("1b --why 17", "--why 17: 16 plans are shown"),
        ("1b --gpus 2000000000", "--gpus 2e+09: 1,000,000 are the most"),
        ("1b --count 200", "--count 200: 50 are the most"),
        ("1b --memory 1e308", "--memory 1e+308: 1,000,000 are the most"),
        ("1b --this-machine --machine a", "name two machines; use one of them"),
        ("1b --confirm 1", "add --this-machine"),
        ("pretrain_llama.py --machine nowhere", "nowhere is neither a file nor one of"),
        ("pretrain_llama.py --cut auto", "a plan starts none; leave it out"),
        ("pretrain_llama.py --gpus 2000000", "1,000,000 are the most"),
        ("pretrain_llama.py --gpus 16", "--layers 8 is too few for 16 stages"),
        ("pretrain_llama.py --plan 8", "unrecognized arguments: --plan 8"),
        ("1b --gpus 0", "--gpus"),
        ("1b --json --why 1", "--why prints a table"),
        ("1b --published", "MODEL"),
        ("--published --json", "--json"),
    ],
)
def test_bad_input_is_rejected_in_one_sentence(flags, sentence, capsys):
    assert sentence in rejected(flags, capsys)


def test_plans_that_the_schedule_does_not_allow_are_left_out():
    plan = Plan("1f1b", 4, 2)  # one stage per rank, not two
    with pytest.raises(ScheduleError):
        forecast(SMALL_16, Machine(4), plan)
    assert forecasts(SMALL_16, Machine(4), [plan]) == []


# Measured profiles.


def profile_of(layers, **further):
    fields = ("forward_ms", "backward_ms", "activation_bytes", "parameter_bytes")
    return {"layers": [dict(zip(fields, one)) for one in layers], **further}


def test_a_saved_model_of_the_course_s_sizes_keeps_its_norms_in_float32(tmp_path):
    """As pretrain_llama.py and finetune.py compute it, in 16 bits."""
    folder = write_model(tmp_path / "saved model", torch.bfloat16, layers=8, hidden_dim=48)
    settings, _ = read_settings(folder, 64)
    predicted = predict_memory(settings, one_f_one_b(4, 8), cut_evenly(8, 4), 2, 2)
    model = find_model(str(folder), 64, 16)
    found = memory_per_rank(model, Machine(1), Plan(ranks=4, microbatch=2))
    assert found == [rank.total for rank in predicted]
    command = command_of(str(folder), model, Machine(4), Plan(ranks=4, microbatch=2))
    assert str(folder) in shlex.split(command)
    assert any(f"'{folder}'" in line for line in command_lines(command))
    ours = replace(model, norms_in_float32=False)
    assert memory_per_rank(ours, Machine(1), Plan(ranks=4, microbatch=2))[0] < found[0]


LAYERS = [(10, 20, 4e6, 4e7), (20, 40, 4e6, 8e7), (10, 20, 4e6, 4e7), (10, 30, 0, 8e7)]


def test_a_measured_profile_is_cut_played_and_counted_as_it_says(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile_of(LAYERS, rows=2, length=16)))
    model = find_model(str(path), 128, 16)
    assert (model.layers, model.length, model.parameters) == (4, 16, 60_000_000)
    plans = list(all_plans(model, Machine(2)))
    assert {plan.microbatch for plan in plans} == {2} and {plan.tensor for plan in plans} == {1}
    plan = Plan("gpipe", 2, microbatch=2, cut=balanced_cut(model, 2))
    assert plan.cut == (2, 2)
    costs = stage_costs(model, Machine(2), plan)
    assert costs.forward == pytest.approx([0.03, 0.02])
    assert costs.backward == pytest.approx([0.06, 0.05])
    # Weights, gradients and two moments of 4 bytes each; 8 micro-batches of two layers' outputs.
    assert memory_per_rank(model, Machine(2), plan)[0] == 4 * 1.2e8 + 8 * 8e6
    assert command_of(str(path), model, Machine(2), plan) is None


def test_plan_ranks_a_profile_s_plans_as_paper_only(tmp_path, capsys):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile_of(LAYERS)))
    status, text = run(f"{path} --gpus 4 --batch-size 16 --count 2 --why 1", capsys)
    assert status == 0 and "Paper only" in text and "torchrun" not in text
    assert "docs/your-own-model.md" in text
    status, text = run(f"{path} --gpus 4 --batch-size 16 --count 2 --json", capsys)
    found = json.loads(text)
    assert status == 0 and not found["started_by_the_course"]
    assert all(one["paper_only"] for one in found["plans"])


def test_a_profile_whose_cuts_would_take_minutes_is_rejected_in_one_sentence(tmp_path, capsys):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile_of([*LAYERS, *LAYERS])))
    with mock.patch("planning.partition.MOST_COMPARISONS", 10):
        said = rejected(f"{path} --gpus 4 --batch-size 16", capsys)
    assert "layers is too long for" in said and "use fewer --gpus" in said


def test_all_cuts_of_a_profile_together_take_seconds_and_are_those_of_plan_partition(tmp_path):
    """A search of its own for each of these numbers of stages takes a minute in all."""
    path = tmp_path / "profile.json"
    times = [(number * 37 % 101, number * 53 % 97, 4e6, 4e7) for number in range(140)]
    path.write_text(json.dumps(profile_of(times)))
    model = find_model(str(path), 64, 16)
    began = time.process_time()
    cuts = {stages: balanced_cut(model, stages) for stages in [90, *range(1, 141)]}
    assert time.process_time() - began < 6
    for stages in (1, 2, 7, 40):
        plan = plan_stages(Profile("profile", model.profile), stages, 1e18, straight=True)
        assert list(cuts[stages]) == plan.cut


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (profile_of([]), "a list 'layers' with at least one layer"),
        (profile_of([(1, 2, 3)]), "layer 0 has no parameter_bytes"),
        (profile_of([(1, -2, 3, 4)]), "layer 0: backward_ms -2 is not a number"),
        (profile_of(LAYERS, rows=0), "rows 0 is not a whole number from 1"),
        (profile_of(LAYERS, rows=3), "3 rows at a time, which do not divide a batch of 16"),
        (profile_of(LAYERS, bytes_per_value=3), "bytes_per_value 3 is not 2, 4 or 8"),
    ],
)
def test_a_malformed_profile_is_rejected_in_one_sentence(content, sentence, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=sentence) as error:
        find_model(str(path), 128, 16)
    assert "\n" not in str(error.value)


# Models and machines by other names.


def test_a_named_model_s_flags_start_with_its_files(capsys):
    status, text = run("llama-3-8b --gpus 16 --count 1 --seq-len 512", capsys)
    text = text.replace("\\\n", "")  # as a shell reads it
    words = shlex.split(re.search(r"pretrain_llama\.py .*$", text, re.M)[0])
    assert status == 0 and words[1:3] == ["--checkpoints", "NEW_FOLDER"]
    assert words[-4:] == ["--data", "TOKENS", "--learning-rate", "1e-5"]
    tokens = "prepare_data.py --data FILE --tokenizer FOLDER/tokenizer.json --out TOKENS"
    assert tokens in " ".join(text.split())
    known = {word for word in words if word.startswith("--")}
    parser = pretrain_llama.program_parser()
    assert known <= set(parser._option_string_actions)


def test_a_command_names_a_file_where_the_course_s_text_is_too_short(capsys):
    status, text = run("1b --gpus 8 --count 1", capsys)
    assert status == 0 and "--data FILE" in text and "FILE is a text of yours" in text
    status, text = run("1m --gpus 8 --count 1 --seq-len 128", capsys)
    assert status == 0 and "torchrun" in text and "--data" not in text


def test_a_folder_without_weights_gets_no_command_and_the_reason(tmp_path, capsys):
    config = {"model_type": "qwen2", "vocab_size": 96, "num_hidden_layers": 8, "hidden_size": 64,
              "num_attention_heads": 4, "num_key_value_heads": 2,
              "intermediate_size": 96}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    status, text = run(f"{tmp_path} --gpus 4 --batch-size 16 --seq-len 128 --count 1", capsys)
    said = " ".join(text.split())
    assert status == 0 and "torchrun" not in said
    assert "cannot read this folder" in said and "has neither model.safetensors" in said


def test_a_gpu_s_name_is_a_machine():
    assert read_machine("h100", 8) == read_machine("dgx-h100", 8)
    assert read_machine("A100-40GB", 8).memory == 40e9
    assert read_machine("a100", 8) == Machine(8)


def test_no_plan_has_a_pipeline_that_is_deeper_than_can_be_compared():
    model, machine = find_model("layers=256,hidden=64,vocabulary=100", 64, 1024), Machine(1024)
    depths = {plan.ranks for plan in all_plans(model, machine)}
    assert max(depths) == DEEPEST == 128
