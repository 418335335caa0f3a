"""A cut that counts the head: no other has a slowest stage with less work, and even stays even."""

from itertools import combinations

import pretrain_llama
import pytest

from extensions.pretraining.cut_by_work import cut_by_work, head_in_layers
from extensions.pretraining.training_flags import check_training_flags
from pipeline.model import ModelConfig


def config_of(layers, vocabulary, dim=64):
    return ModelConfig(layers, dim, 4, 2, 128, vocabulary)


def slowest(cut, head):
    return max(*cut[:-1], cut[-1] + head, 0)


@pytest.mark.parametrize("vocabulary", [256, 2048, 32_000, 128_256])
@pytest.mark.parametrize(("layers", "stages"), [(8, 1), (8, 2), (8, 4), (9, 4), (12, 5), (5, 5)])
def test_no_cut_of_all_has_a_slowest_stage_with_less_work(layers, stages, vocabulary):
    config = config_of(layers, vocabulary)
    head, ours = head_in_layers(config), cut_by_work(config, stages)
    assert sum(ours) == layers and len(ours) == stages and min(ours) >= 1
    for ends in combinations(range(1, layers), stages - 1):
        cut = [b - a for a, b in zip((0, *ends), (*ends, layers))]
        assert slowest(ours, head) <= slowest(cut, head)


def test_an_even_cut_stays_where_the_head_is_worth_less_than_a_layer():
    assert head_in_layers(config_of(8, 256)) < 1
    assert cut_by_work(config_of(8, 256), 4) == [2, 2, 2, 2]
    assert cut_by_work(config_of(9, 256), 4) == [3, 2, 2, 2]
    assert cut_by_work(config_of(3, 256), 4) is None


@pytest.mark.timeout(60)  # to list all cuts takes an hour
def test_a_cut_of_very_many_layers_is_found_without_a_look_at_each():
    cut = cut_by_work(config_of(100_000, 128_256), 8)
    assert sum(cut) == 100_000 and len(cut) == 8
    assert cut[-1] + head_in_layers(config_of(8, 128_256)) <= max(cut) < 100_000 / 8 + 50


def test_the_head_of_a_1b_model_at_2048_tokens_is_worth_1_4_layers():
    config = ModelConfig(20, 2048, 32, 4, 2048, 32_000)
    assert head_in_layers(config) == pytest.approx(1.39, abs=0.005)
    assert cut_by_work(config, 8) == [2, 2, 3, 3, 3, 3, 3, 1]


@pytest.mark.parametrize(
    ("flags", "ranks", "cut"),
    [
        ("--model 10m", 4, [2, 2, 3, 1]),
        ("--model 10m --cut 3,2,2,1", 4, [3, 2, 2, 1]),
        ("--model 1m", 4, [2, 2, 2, 2]),
        ("--model 10m --replicas 2", 4, [5, 3]),
    ],
)
def test_pretrain_llama_counts_the_head_unless_it_is_given_a_cut(flags, ranks, cut):
    parser = pretrain_llama.program_parser()
    parser.set_defaults(num_ranks=ranks)
    arguments = parser.parse_args(flags.split())
    schedule = pretrain_llama.complete_flags(parser, arguments, lambda _: None)
    check_training_flags(arguments, schedule)
    assert list(arguments.cut) == cut and schedule.num_stages == len(cut)
