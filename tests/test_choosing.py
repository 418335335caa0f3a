"""What data, sharded, tensor and pipeline parallelism cost on paper, by the papers' formulas."""

import pytest

from extensions.planning.choosing import mixes, ways
from extensions.planning.forecast import BYTES_PER_PARAMETER, Machine, Model

MODEL = Model(layers=32, hidden=4096, length=2048, vocabulary=32_000, batch=256)
MACHINE = Machine(gpus=32)


def of_name(found):
    return {way.name: way for way in found}


def test_data_parallelism_keeps_all_of_the_model_and_sends_its_gradient_nearly_twice():
    way = of_name(ways(MODEL, MACHINE))["data parallel"]
    assert way.memory > BYTES_PER_PARAMETER * MODEL.parameters
    assert way.sent == pytest.approx(2 * 31 / 32 * 2 * MODEL.parameters)
    assert way.problem == "106 GB do not fit"


def test_sharding_sends_half_as_much_again_and_keeps_a_share():
    found = of_name(ways(MODEL, MACHINE))
    assert found["sharded"].sent == pytest.approx(1.5 * found["data parallel"].sent)
    assert found["sharded"].memory < found["data parallel"].memory / 10
    # Where activations leave no room for the whole share at once, weights are gathered more often.
    small = Machine(gpus=32, memory=6e9)
    assert of_name(ways(MODEL, small))["sharded"].sent > 2 * found["sharded"].sent


def test_tensor_parallelism_sends_8_b_s_h_values_a_layer_megatron_section_3_2():
    way = of_name(ways(MODEL, MACHINE))["tensor parallel"]
    assert way.sent == pytest.approx(2 * 32 * 8 * 256 * 2048 * 4096 * 31 / 32)


def test_a_pipeline_sends_b_s_h_values_each_way_and_has_a_bubble_of_p_minus_1_over_m():
    way = of_name(ways(MODEL, MACHINE))["pipeline of 32"]
    assert way.sent == 2 * 2 * 256 * 2048 * 4096
    assert way.bubble == pytest.approx(31 / 256)


def test_more_replicas_of_shorter_pipelines_have_less_bubble_and_need_more_memory():
    found = [way for way in mixes(MODEL, MACHINE) if not way.problem]
    assert [way.name for way in found] == ["1 x 32", "2 x 16", "4 x 8", "8 x 4", "16 x 2"]
    for one, other in zip(found, found[1:]):
        assert other.bubble < one.bubble and other.memory > one.memory


def test_on_one_node_nothing_that_fits_beats_sharding_and_on_a_slow_network_a_pipeline_does():
    node = ways(MODEL, Machine(gpus=8)) + mixes(MODEL, Machine(gpus=8))
    assert min((w for w in node if not w.problem), key=lambda w: w.seconds).name == "sharded"
    slow = Machine(gpus=32, bandwidth=3e9)
    best = min(
        (w for w in ways(MODEL, slow) + mixes(MODEL, slow) if not w.problem),
        key=lambda way: way.seconds,
    )
    assert best.name == "4 x 8"
    assert of_name(ways(MODEL, slow))["sharded"].seconds > 2 * best.seconds


def test_what_cannot_be_cut_says_so():
    found = of_name(mixes(Model(layers=8, hidden=64, batch=4), Machine(gpus=16)))
    assert found["1 x 16"].problem == "8 layers are too few for 16 stages"
    assert found["8 x 2"].problem == "a batch of 4 for 8 replicas"
