"""The planner against the figures of PipeDream's profile, and against all plans there are."""

import dataclasses
import itertools
import json
import math
import os
import random
import sys
from pathlib import Path

import plan_partition
import pytest
import torch

from pipeline.model import ModelConfig, build_part, cut_as
from pipeline.training import cut_layers, parse_arguments, training_parser
from planning.partition import (
    LayerProfile,
    PartitionError,
    Profile,
    plan_stages,
    profile_model,
    read_profile,
    stage_seconds,
)

ROOT = Path(__file__).resolve().parents[1]
VGG16 = ROOT / "source_code" / "profiles" / "vgg16.json"
BANDWIDTH = 1e9
MODES = [
    {"overlap": overlap, "straight": straight}
    for overlap in (True, False)
    for straight in (False, True)
]
SMALL = ModelConfig(layers=5, dim=16, heads=4, kv_heads=2, seq_len=8)


def ranges(plan):
    return [(stage.first_layer, stage.last_layer, stage.replicas) for stage in plan.stages]


# PipeDream's VGG-16 on 4 workers at 1e9 bytes a second


def test_vgg16_profile_is_the_published_one_and_names_its_source():
    assert "PipeDream (Narayanan et al., SOSP 2019)" in json.loads(VGG16.read_text())["source"]
    layers = read_profile(VGG16).layers
    assert len(layers) == 39
    assert sum(layer.seconds for layer in layers) == pytest.approx(0.672535, rel=1e-12)
    assert sum(layer.parameter_bytes for layer in layers) == 553_430_176


def test_vgg16_by_section_3_1_is_17_layers_on_3_workers_and_22_on_1_in_0_205520896_s():
    plan = plan_stages(read_profile(VGG16), 4, BANDWIDTH)
    assert ranges(plan) == [(0, 16, 3), (17, 38, 1)]
    assert plan.seconds_per_minibatch == pytest.approx(0.205520896, abs=5e-10)
    assert plan.stages[0].boundary_seconds == plan.seconds_per_minibatch  # the slowest part
    # All workers as replicas, in the paper's form: exchanging the weights outlasts computing.
    assert plan.data_parallel_seconds == pytest.approx(2 * 3 / 4 * 0.553430176 / 4, rel=1e-12)


def test_vgg16_by_the_authors_code_is_15_layers_on_3_workers_and_24_on_1_in_0_175732624_s():
    plan = plan_stages(read_profile(VGG16), 4, BANDWIDTH, overlap=False)
    assert ranges(plan) == [(0, 14, 3), (15, 38, 1)]
    assert plan.seconds_per_minibatch == pytest.approx(0.175732624, abs=5e-10)
    assert [stage.boundary_seconds for stage in plan.stages] == [0, 0]


def test_vgg16_with_data_parallelism_takes_0_583206_s_in_the_sum_form_of_the_authors_code():
    plan = plan_stages(read_profile(VGG16), 4, BANDWIDTH, overlap=False)
    assert plan.data_parallel_seconds == pytest.approx(0.583206, abs=5e-7)


def test_vgg16_straight_by_the_authors_code_takes_0_21645_s():
    plan = plan_stages(read_profile(VGG16), 4, BANDWIDTH, overlap=False, straight=True)
    assert [stage.replicas for stage in plan.stages] == [1, 1, 1, 1]
    assert plan.seconds_per_minibatch == pytest.approx(0.21645, abs=5e-10)


def test_a_replicated_stage_costs_the_slower_of_the_two_or_the_sum_with_the_messages_twice():
    # 3 replicas, 0.6 s of computing, 900 MB of weights: 2 * 2/3 * 0.9 s of messages.
    assert stage_seconds(0.6, 900e6, 3, BANDWIDTH) == pytest.approx(1.2 / 3)
    assert stage_seconds(0.6, 900e6, 3, BANDWIDTH, overlap=False) == pytest.approx((0.6 + 2.4) / 3)
    for overlap in (True, False):
        assert stage_seconds(0.6, 900e6, 1, BANDWIDTH, overlap) == 0.6


# Against all plans


def all_plans(num_layers, workers):
    """Every cut with every way to give exactly `workers` workers to its stages."""
    for num_stages in range(1, min(num_layers, workers) + 1):
        for cuts in itertools.combinations(range(1, num_layers), num_stages - 1):
            edges = [0, *cuts, num_layers]
            for shares in itertools.combinations(range(1, workers), num_stages - 1):
                marks = [0, *shares, workers]
                replicas = [after - before for before, after in zip(marks, marks[1:])]
                yield list(zip(edges, edges[1:], replicas))


def slowest_part(layers, plan, overlap):
    """Seconds a mini-batch, straight from the formulas; `plan` as in `all_plans`."""
    parts = []
    for first, end, m in plan:
        compute = sum(layer.seconds for layer in layers[first:end])
        weights = sum(layer.parameter_bytes for layer in layers[first:end])
        if overlap:
            parts.append(max(compute, 2 * (m - 1) / m * weights / BANDWIDTH) / m)
        else:
            parts.append((compute + 4 * (m - 1) / m * weights / BANDWIDTH) / m)
        if overlap and end < len(layers):
            parts.append(2 * layers[end - 1].activation_bytes / BANDWIDTH)
    return max(parts)


def fits(layers, plan, memory):
    for index, (first, end, replicas) in enumerate(plan):
        behind = sum(later[2] for later in plan[index + 1 :])
        held = sum(layer.activation_bytes + layer.parameter_bytes for layer in layers[first:end])
        if math.ceil(behind / replicas) * held > memory:
            return False
    return True


def brute_force(layers, workers, overlap, straight, memory=math.inf):
    """Seconds of the best plan, or None where none fits."""
    return min(
        (
            slowest_part(layers, plan, overlap)
            for plan in all_plans(len(layers), workers)
            if fits(layers, plan, memory)
            and (not straight or all(replicas == 1 for _, _, replicas in plan))
        ),
        default=None,
    )


def random_profile(draw):
    """Up to 7 layers whose times, messages and weights are of the same size, some of them 0."""
    layers = []
    for index in range(draw.randint(1, 7)):
        activation, parameters = (draw.choice([0, draw.randint(1, 10**9)]) for _ in range(2))
        times = draw.choice([0.0, draw.random()]), draw.uniform(0.001, 2)
        layers.append(LayerProfile(f"layer {index}", *times, activation // 4, parameters))
    return Profile("random", tuple(layers))


def check_plan(profile, workers, overlap, straight, memory=None):
    """Assert that the planner finds the best plan. Returns whether there is a plan at all."""
    limit = math.inf if memory is None else memory
    best = brute_force(profile.layers, workers, overlap, straight, limit)
    options = {"overlap": overlap, "straight": straight, "memory": memory}
    if best is None:
        with pytest.raises(PartitionError, match="^--memory"):
            plan_stages(profile, workers, BANDWIDTH, **options)
        return False
    plan = plan_stages(profile, workers, BANDWIDTH, **options)
    assert plan.seconds_per_minibatch == pytest.approx(best, rel=1e-12)

    # The stages it returns are a plan, and one that takes as long as it says.
    stages = [(first, last + 1, replicas) for first, last, replicas in ranges(plan)]
    assert [first for first, _, _ in stages] + [len(profile.layers)] == [
        0,
        *(end for _, end, _ in stages),
    ]
    assert all(first < end and replicas >= 1 for first, end, replicas in stages)
    assert sum(replicas for _, _, replicas in stages) == workers
    assert slowest_part(profile.layers, stages, overlap) == pytest.approx(best, rel=1e-12)
    assert fits(profile.layers, stages, limit)
    parts = [max(stage.seconds, stage.boundary_seconds) for stage in plan.stages]
    assert max(parts) == plan.seconds_per_minibatch
    whole = [(0, len(profile.layers), workers)]
    assert plan.data_parallel_seconds == pytest.approx(slowest_part(profile.layers, whole, overlap))
    if straight:
        assert [replicas for _, _, replicas in stages] == [1] * workers
    return True


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_the_plan_is_the_best_of_all_that_use_exactly_the_workers(mode):
    draw = random.Random(0)
    for _ in range(150):
        profile = random_profile(draw)
        most = len(profile.layers) if mode["straight"] else 6
        assert check_plan(profile, draw.randint(1, most), **mode)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_with_a_memory_limit_the_plan_is_the_best_of_those_within_it(mode):
    draw = random.Random(1)
    planned = []
    for _ in range(150):
        profile = random_profile(draw)
        most = len(profile.layers) if mode["straight"] else 6
        workers = draw.randint(1, most)
        total = sum(layer.activation_bytes + layer.parameter_bytes for layer in profile.layers)
        planned.append(check_plan(profile, workers, **mode, memory=draw.random() * total + 1))
    # Without --straight all workers can replicate the whole model, which the filter never counts.
    assert any(planned)
    assert all(planned) == (not mode["straight"])


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_vgg16_on_4_workers_is_planned_as_well_as_by_trying_all_plans(mode):
    assert check_plan(read_profile(VGG16), 4, **mode)


def test_a_memory_limit_counts_a_copy_for_each_minibatch_under_way_behind_a_stage():
    # Authors' filter: 4 equal layers of 3 + 2 bytes. With 4 workers in line 3, 2, 1, 0 copies.
    layers = tuple(LayerProfile(f"layer {index}", 1.0, 2.0, 3, 2) for index in range(4))
    profile = Profile("even", layers)
    in_line = plan_stages(profile, 4, BANDWIDTH, straight=True, memory=15)
    assert in_line.cut == [1, 1, 1, 1]
    with pytest.raises(PartitionError, match="^--memory 14.*allow more bytes$"):
        plan_stages(profile, 4, BANDWIDTH, straight=True, memory=14)


# Malformed profiles


GOOD = {"forward_ms": 1, "backward_ms": 2, "activation_bytes": 3, "parameter_bytes": 4}

MALFORMED = {
    "[]": "a list 'layers' with at least one layer",
    '{"layers": []}': "a list 'layers' with at least one layer",
    '{"layers": {}}': "a list 'layers' with at least one layer",
    '{"layers": [3]}': "layer 0 is not an object with the fields forward_ms, ",
    "{": r"is not JSON \(.*\); name a JSON file",
    "[" * 100_000: "is not JSON",
    '{"layers": [{"forward_ms": NaN}]}': r"is not JSON \(NaN is not a number\)",
    json.dumps(
        {"model": "\33[2J", "layers": [GOOD]}
    ): "'model' is not a name of at most 80 letters",
    json.dumps(
        {"model": "a" * 81, "layers": [GOOD]}
    ): "'model' is not a name of at most 80 letters",
}


@pytest.mark.parametrize("text", MALFORMED, ids=lambda text: text[:20])
def test_a_file_that_is_no_profile_is_refused_in_a_sentence(text, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(PartitionError, match=f"^--profile .*{MALFORMED[text]}") as refusal:
        read_profile(path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("field", GOOD)
def test_a_missing_or_wrong_figure_is_refused_with_its_layer_and_field(field, tmp_path):
    path = tmp_path / "profile.json"

    def refusal_of(layer):
        path.write_text(json.dumps({"layers": [GOOD, layer]}))
        with pytest.raises(PartitionError) as refusal:
            read_profile(path)
        return str(refusal.value)

    assert refusal_of({key: GOOD[key] for key in GOOD if key != field}).endswith(
        f"profile.json: layer 1 has no {field}"
    )
    for value in (-1, "7", None, True, [], 10**400):
        assert f"profile.json: layer 1: {field} " in refusal_of(GOOD | {field: value})


def test_layers_that_take_no_time_are_refused(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"layers": [GOOD | {"forward_ms": 0, "backward_ms": 0}]}))
    with pytest.raises(PartitionError, match="every forward_ms and backward_ms is 0"):
        read_profile(path)


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "bytes"])
def test_a_file_that_cannot_be_read_is_refused(kind, tmp_path):
    path = tmp_path / kind
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "bytes":
        path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(PartitionError, match=f"^--profile .*{kind} (is not|cannot) .*name a"):
        read_profile(path)


def test_more_stages_than_layers_and_more_plans_than_can_be_compared_are_refused():
    profile = read_profile(VGG16)
    with pytest.raises(PartitionError, match="^--straight: 40 workers .* at most 39 workers"):
        plan_stages(profile, 40, BANDWIDTH, straight=True)
    with pytest.raises(PartitionError, match="^--workers 1000000 and 39 layers make too many"):
        plan_stages(profile, 1_000_000, BANDWIDTH)


# The course's own model


def test_the_profile_of_the_courses_model_has_all_its_weights_and_the_size_of_its_messages():
    profile = profile_model(SMALL, batch_size=4, repeats=1)
    assert len(profile.layers) == SMALL.layers
    weights = sum(parameter.nbytes for parameter in build_part(SMALL, 0, 5).parameters())
    assert sum(layer.parameter_bytes for layer in profile.layers) == weights
    messages = [layer.activation_bytes for layer in profile.layers]
    assert messages == [4 * 8 * 16 * 8] * 4 + [4 * 8 * 256 * 8]  # the last one makes scores
    for layer in profile.layers:
        assert layer.forward_seconds > 0 and layer.backward_seconds > 0


def test_a_layer_of_the_courses_model_can_be_first_and_last_and_of_less_precision():
    one_layer = dataclasses.replace(SMALL, layers=1)
    (layer,) = profile_model(one_layer, 4, torch.float32, repeats=1).layers
    weights = sum(parameter.nbytes for parameter in build_part(one_layer, 0, 1).parameters())
    assert layer.parameter_bytes == weights / 2


def test_a_training_script_takes_the_cut_of_a_straight_plan(monkeypatch):
    plan = plan_stages(profile_model(SMALL, 4, repeats=1), 3, BANDWIDTH, straight=True)
    cut = ",".join(map(str, plan.cut))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr(sys, "argv", ["gpipe.py", "--layers", "5", "--cut", cut])
    arguments = parse_arguments(training_parser("a test"))
    assert cut_layers(arguments, arguments.num_ranks) == cut_as(plan.cut)
    assert [(first, last - 1) for first, last in cut_as(plan.cut)] == [
        (stage.first_layer, stage.last_layer) for stage in plan.stages
    ]


# The script


def call(monkeypatch, capsys, *flags):
    """Run the script in this process. Returns exit status, standard output, standard error."""
    monkeypatch.setattr(sys, "argv", ["plan_partition.py", *map(str, flags)])
    try:
        status = plan_partition.main()
    except SystemExit as leaving:
        status = leaving.code
    return status, *capsys.readouterr()


def test_as_json_the_plan_has_exactly_these_keys(monkeypatch, capsys):
    flags = ["--profile", VGG16, "--workers", 4, "--bandwidth", "1e9", "--no-overlap", "--json"]
    status, output, _ = call(monkeypatch, capsys, *flags)
    plan = json.loads(output)
    assert status == 0
    assert list(plan) == ["stages", "seconds_per_minibatch", "data_parallel_seconds"]
    assert [list(stage) for stage in plan["stages"]] == [
        ["first_layer", "last_layer", "replicas", "seconds"]
    ] * 2
    assert [stage["last_layer"] for stage in plan["stages"]] == [14, 38]
    assert plan["seconds_per_minibatch"] == plan["stages"][0]["seconds"]


def test_in_words_a_plan_ends_with_the_flags_for_a_training_script(monkeypatch, capsys):
    flags = ["--layers", 5, "--dim", 16, "--seq-len", 8, "--workers", 5, "--bandwidth", "1e9"]
    status, output, _ = call(monkeypatch, capsys, *flags, "--straight")
    assert status == 0
    assert output.splitlines()[-1].split() == "for pipedream.py --cut 1,1,1,1,1".split()
    flags = ["--profile", VGG16, "--workers", 4, "--bandwidth", "1e9", "--memory", "1e12"]
    status, output, _ = call(monkeypatch, capsys, *flags)
    assert status == 0
    assert output.splitlines()[-1].split() == "for pipedream.py --replicas 3-1 --cut 17,22".split()
    assert output.splitlines()[2].split() == ["0", "0", "16", "3", "171.413", "205.521"]


REFUSED = {
    "--workers 0": "--workers: must be a whole number of at least 1, not '0'; --help lists the",
    "--bandwidth 0": "--bandwidth: must be a positive number, not '0'",
    "--bandwidth 0.5": "--bandwidth 0.5 must be at least 1 byte per second",
    "--memory -1": "--memory: ",
    "--straight": "--straight: 9 workers need a layer each; use at most 8 workers",
    "--workers 1000000": "--workers 1000000 and 8 layers make too many plans",
    "--heads 3": "--heads 3 does not cut --dim 32",
    "--dim 10000000": "--dim, --layers and --batch-size need more than",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_bad_flags_are_refused_in_one_sentence(flags, monkeypatch, capsys):
    given = ["--workers", 9, "--bandwidth", "1e9", *flags.split()]
    status, output, error = call(monkeypatch, capsys, *given)
    assert status == 2 and output == ""
    assert error.startswith(REFUSED[flags]) and error.count("\n") == 1


def test_a_malformed_profile_is_refused_in_one_sentence(tmp_path, monkeypatch, capsys):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"layers": [GOOD, GOOD | {"forward_ms": "fast"}]}))
    flags = ["--profile", path, "--workers", 2, "--bandwidth", "1e9"]
    sentence = f'--profile {path}: layer 1: forward_ms "fast" is not a number from 0 to 1e18\n'
    assert call(monkeypatch, capsys, *flags) == (2, "", sentence)
