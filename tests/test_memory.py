"""What the memory model predicts is what tensors and hooks count, on every rank: 15 % are promised.

All bytes are deterministic: nothing here depends on the machine or on time.
"""

import dataclasses
import itertools
import re
from unittest import mock

import pytest
import torch
from further import first_of
from observed import attach_instruments
from ranks import run_on_ranks

from course.launch import run
from extensions.optimization.mixed_precision import computing_copy, hand_over_deferred
from extensions.pretraining.cut_by_work import head_in_layers
from extensions.pretraining.padding import ShareOfLoss
from extensions.pretraining.weight_count import count_weights, sizes_of
from extensions.real_models.saved_part import SavedSettings, fill_part, lay_out
from extensions.recompute import recomputing
from lab.activation_memory import ActivationMemory
from pipeline import model
from pipeline.model import ModelConfig, build_part, cut_evenly
from pipeline.schedules import build_schedule, chunked_schedules
from pipeline.split_stage import stage_class_for
from planning.counted_memory import ActivationSizes, most_held, predict_memory

SIZES = {
    "narrow": ModelConfig(8, 16, 4, 2, 8, 256),
    "wide": ModelConfig(8, 48, 6, 6, 16, 300),
    "long, many tokens": ModelConfig(8, 16, 4, 1, 64, 500),
}
IN_A_V = ["zb-v", "v-half", "v-min", "dualpipe-v"]
SCHEDULES = ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", *IN_A_V]
WAYS = [("none", 1), ("stage", 1), ("stage", 2), ("layer", 1), ("selective", 1)]


def layers_of(config, schedule):
    return cut_evenly(config.layers, schedule.num_stages)


def build_saved_part(settings, first, last, dtype):
    layout = lay_out(settings, first, last)
    weights = {name: torch.ones(weight.shape) for name, weight in layout.named_parameters()}
    return fill_part(layout, weights.get, dtype, "cpu")


def play(schedule, config, dtype, mode, pieces, build_part=build_part):
    """The bytes that each rank of `schedule` holds at most, all of them played by this process."""
    memories = [ActivationMemory(every_pass=True) for _ in range(schedule.num_ranks)]
    share_of_loss = ShareOfLoss()
    share_of_loss.real_tokens = 1
    stages, results = {}, {}
    for index, (first, last) in enumerate(layers_of(config, schedule)):
        master = build_part(config, first, last, dtype=torch.float32)
        part = computing_copy(master, dtype) if dtype != torch.float64 else master.to(dtype)
        stage = stage_class_for(schedule)(part, index, schedule.num_stages, share_of_loss)
        stages[index] = recomputing(stage, mode, pieces)
        hand_over_deferred(stages[index], master)
        attach_instruments(mock.Mock(), [stages[index]], memories[schedule.rank_of(index, 0)])
    tokens = torch.zeros(2, config.seq_len, dtype=torch.int64)
    for _, (stage, kind, microbatch), _ in schedule.playable_order:
        at = stages[stage]
        if kind == "F":
            inputs = tokens if at.is_first else results.pop((stage, "F", microbatch))
            results[stage + 1, "F", microbatch] = at.forward(microbatch, inputs, tokens)
        elif kind == "W":
            at.backward_weight(microbatch)
        else:
            gradient = None if at.is_last else results.pop((stage, "B", microbatch))
            backward = at.backward if kind == "B" else at.backward_input
            results[stage - 1, "B", microbatch] = backward(microbatch, gradient)
    return [memory.peak for memory in memories]


def measured(rank, size, dtype, every):
    """{(schedule, mode, pieces): bytes of each rank} of every so-manieth, in a process of its own."""
    torch.set_num_threads(1)
    found = {}
    for name, (mode, pieces) in list(itertools.product(SCHEDULES, WAYS))[::every]:
        schedule = build_schedule(name, 2 if name in chunked_schedules() else 4, 6)
        found[name, mode, pieces] = play(schedule, SIZES[size], getattr(torch, dtype), mode, pieces)
    return found


@pytest.mark.parametrize(
    ("size", "dtype", "every"),  # a third has every schedule and every way
    first_of(
        [("narrow", "float64", 1), ("long, many tokens", "bfloat16", 3), ("wide", "float32", 3)], 2
    ),
)
def test_activations_are_within_1_percent_for_9_schedules_and_5_ways_to_recompute(
    size, dtype, every
):
    config, width = SIZES[size], getattr(torch, dtype).itemsize
    (found,) = run_on_ranks(measured, 1, size, dtype, every, timeout=120)
    assert len(found) == 45 // every
    assert {case[0] for case in found} == set(SCHEDULES) and {case[1:] for case in found} == set(
        WAYS
    )
    for (name, mode, pieces), peaks in found.items():
        schedule = build_schedule(name, len(peaks), 6)
        predicted = predict_memory(
            config, schedule, layers_of(config, schedule), 2, width, "adamw", mode, pieces
        )
        for rank, (memory, peak) in enumerate(zip(predicted, peaks)):
            case = f"{name} {mode} {pieces} rank {rank}: {memory.activations} for {peak}"
            assert abs(memory.activations - peak) <= 0.01 * peak, case


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_norms_of_a_saved_model_keep_their_input_as_float32(dtype):
    settings = SavedSettings(8, 16, 4, 2, 8, 256, head_dim=4, hidden_dim=48)
    schedule = build_schedule("1f1b", 4, 6)
    for mode, pieces in WAYS[::2]:
        peaks = play(schedule, settings, dtype, mode, pieces, build_saved_part)
        layers, width = layers_of(settings, schedule), dtype.itemsize
        predicted = predict_memory(settings, schedule, layers, 2, width, "adamw", mode, pieces)
        for memory, peak in zip(predicted, peaks):
            assert memory.activations == pytest.approx(peak, rel=0.01), mode


TABLE = re.compile(r"^rank (\d+) +(measured|predicted) +(.*)$", re.M)


@pytest.mark.parametrize(
    ("ranks", "flags"),
    first_of(
        [
            (4, "--schedule 1f1b --recompute none --dtype float64"),
            (4, "--schedule zb-h1 --recompute layer --dtype bfloat16 --accumulate 2"),
            (
                4,
                "--schedule interleaved-1f1b --chunks 2 --replicas 2 --recompute stage --vocabulary 300",
            ),
            (2, "--schedule dualpipe-v --recompute selective --optimizer sgd --shuffle"),
            (1, "--schedule gpipe --optimizer momentum"),
        ],
        2,
    ),
)
def test_a_run_measures_what_was_predicted_on_each_rank(ranks, flags):
    sizes = "--dim 32 --seq-len 16 --batch-size 16 --microbatches 4 --steps 2 --device cpu"
    warm = {"warm": True, "show": False}
    output = run(f"plan.py pretrain_llama.py --gpus {ranks} {sizes} {flags}", None, **warm).output
    output += run(f"pretrain_llama.py {sizes} {flags}", ranks, **warm).output
    rows = {}
    for rank, title, numbers in TABLE.findall(output):
        rows[int(rank), title] = [float(number) for number in numbers.split()]
    planned = ranks // 2 if "--replicas 2" in flags else ranks  # one replica is planned
    assert len(rows) == ranks + planned
    for rank in range(ranks):
        weights, gradients, optimizer, activations, total = rows[rank, "measured"]
        predicted = rows[rank % planned, "predicted"]
        assert predicted[:3] == [weights, gradients, optimizer]
        assert predicted[3] == pytest.approx(activations, rel=0.15)
        assert total == pytest.approx(weights + gradients + optimizer + activations, abs=0.005)
        assert weights > 0 and gradients > 0 and activations > 0


@pytest.mark.parametrize("size", SIZES)
def test_the_weights_are_those_of_the_model_and_add_up_over_any_cut(size):
    config = SIZES[size]
    parameters = list(build_part(config, 0, config.layers).parameters())
    whole = sum(p.numel() for p in parameters), len(parameters)
    assert count_weights(config) == whole
    for stages in (2, 4, 8):
        parts = [count_weights(config, *layers) for layers in cut_evenly(config.layers, stages)]
        assert tuple(map(sum, zip(*parts))) == whole


class TwoMatrices(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = torch.nn.Linear(config.dim, config.hidden_dim)
        self.down = torch.nn.Linear(config.hidden_dim, config.dim)


def test_the_weights_of_layers_that_somebody_has_changed_are_counted(monkeypatch):
    monkeypatch.setattr(model, "FeedForward", TwoMatrices)
    config = ModelConfig(layers=5, dim=48)
    parameters = list(build_part(config, 0, 5).parameters())
    assert count_weights(config) == (sum(p.numel() for p in parameters), len(parameters))
    products = sum(p.numel() for p in build_part(config, 1, 2).parameters() if p.dim() > 1)
    assert head_in_layers(config) == 256 * 48 / (products + 32 * 48)
    sizes_of.cache_clear()


@pytest.mark.parametrize("bias", ["query_bias", "output_bias", "feed_forward_bias"])
def test_the_biases_of_a_saved_model_are_counted(bias):
    settings = SavedSettings(8, 16, 4, 2, 8, 256, head_dim=4, hidden_dim=48, **{bias: True})
    parameters = list(lay_out(settings).parameters())
    assert count_weights(settings) == (sum(p.numel() for p in parameters), len(parameters))


def test_1f1b_holds_p_minus_r_micro_batches_and_gpipe_all_of_them():
    config = dataclasses.replace(SIZES["narrow"], vocabulary=0)
    kept = ActivationSizes(config, 16, 8)
    one = kept.inside(2, 4)
    for name, waiting in {"1f1b": [4, 3, 2], "gpipe": [6, 6, 6]}.items():
        schedule = build_schedule(name, 4, 6)
        layers = layers_of(config, schedule)
        assert [most_held(order, layers, kept) for order in schedule.orders[:3]] == [
            k * one for k in waiting
        ]


def test_16_bits_a_weight_cost_18_bytes_a_weight_with_adamw_and_32_bits_16():
    config = SIZES["wide"]
    schedule = build_schedule("1f1b", 1, 1)
    for width, expected in ((2, 18), (4, 16)):
        (memory,) = predict_memory(config, schedule, [(0, 8)], 1, width)
        numbers, tensors = count_weights(config)
        assert memory.total - memory.activations - 4 * tensors == expected * numbers
