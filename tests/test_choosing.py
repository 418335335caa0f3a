"""Which way for which machine: what the comparison of lesson 10 says, and what it must not say."""

import json
import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

from planning.bytes_sent import bytes_per_gpu
from planning.choosing import ways
from planning.machine import Link, Machine
from planning.transformer import Model

MODEL = Model(layers=32, hidden=4096, length=2048, vocabulary=32_000, batch=256)
SMALL = replace(MODEL, layers=24, hidden=2048)
CARDS = Machine(32)  # a card of 200 Gb/s for each GPU
NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
LESSONS = "10b_three_dimensions.ipynb", "11c_plan_a_training.ipynb"
ONE_CARD = replace(CARDS, between=Link(2.8e9, 30e-6, 1))  # one of 25 Gb/s for eight GPUs


@lru_cache
def of(model, machine):
    return {way.name: way for way in ways(model, machine)}


def fastest(found):
    return min((way for way in found.values() if not way.problem), key=lambda way: way.seconds)


def is_pipeline(way):
    return way.plan.ranks > 1


def test_data_parallelism_keeps_all_of_the_model_and_says_when_it_does_not_fit():
    way = of(MODEL, CARDS)["data parallel"]
    assert way.problem == "120 GB do not fit"
    assert way.memory > 18 * MODEL.parameters


def test_every_way_that_fits_stays_within_the_memory_and_chooses_its_own_micro_batch():
    for machine in (Machine(8), CARDS):
        for way in of(MODEL, machine).values():
            assert way.problem or way.memory <= machine.memory
    assert of(MODEL, CARDS)["sharded"].plan.microbatch > 1
    small = of(MODEL, replace(CARDS, memory=14e9))
    assert small["sharded"].plan.recompute == "full"


def test_with_a_card_per_gpu_nothing_that_fits_beats_sharding_by_more_than_the_error():
    """The lesson once said that a pipeline wins on four nodes: it charged a GPU's slow link for all."""
    for model in (MODEL, SMALL):
        for machine in (Machine(8), CARDS):
            found = of(model, machine)
            best = fastest(found)
            assert found["sharded"].seconds <= 1.005 * best.seconds
            assert machine == Machine(8) or not is_pipeline(best)


def test_hybrid_sharding_beats_full_sharding_and_all_pipelines_at_3_gb_per_second_and_gpu():
    """A1: the way that was missing from the table of four nodes."""
    found = of(MODEL, replace(CARDS, between=Link(3e9, 14e-6, 8)))
    assert found["hybrid"].seconds < 0.95 * found["sharded"].seconds
    assert found["hybrid"].leaving < found["sharded"].leaving / 2
    assert found["hybrid"].seconds <= 1.05 * fastest(found).seconds


def test_with_one_slow_card_per_node_a_pipeline_is_three_times_as_fast_as_any_sharding():
    found = of(MODEL, ONE_CARD)
    best = fastest(found)
    assert is_pipeline(best)
    others = min(found["hybrid"].seconds, found["sharded"].seconds)
    assert others > 3 * best.seconds
    assert best.leaving < found["hybrid"].leaving


def test_a_pipeline_has_work_where_a_batch_has_fewer_sequences_than_there_are_gpus():
    found = of(replace(MODEL, batch=16), CARDS)
    assert found["sharded"].problem == found["hybrid"].problem == "a batch of 16 for 32 replicas"
    assert not found["16 x 2"].problem and not found["2 x 16"].problem


def test_more_stages_need_less_memory_and_wait_longer():
    found = of(MODEL, CARDS)
    names = ["16 x 2", "8 x 4", "4 x 8", "2 x 16", "1 x 32"]
    memory = [found[name].memory for name in names]
    assert memory == sorted(memory, reverse=True)
    idle = [found[name].idle for name in names]
    assert idle == sorted(idle)


def test_messages_that_stay_in_a_node_are_not_charged_to_the_network():
    in_one_node = of(MODEL, replace(Machine(8), between=Link(1e6, 1.0, 1)))
    assert [way.seconds for way in in_one_node.values()] == [
        way.seconds for way in of(MODEL, Machine(8)).values()
    ]
    assert all(way.leaving == 0 for way in in_one_node.values())


def test_lesson_10b_quotes_the_seconds_of_one_node_in_the_table_of_lesson_11c():
    notebooks = [json.loads((NOTEBOOKS / name).read_text())["cells"] for name in LESSONS]
    prose, code = ("".join(sum((cell["source"] for cell in cells), [])) for cells in notebooks)
    quoted = re.search(r"forecasts (\S+) s per step when all eight.*? (\S+) s with", prose)
    found = of(MODEL, Machine(8))
    pipelines = min(way.seconds for way in found.values() if is_pipeline(way))
    assert "6.6 billion, one node" in code
    assert quoted.groups() == (f"{found['tensor 8'].seconds:.2f}", f"{pipelines:.2f}")


def test_what_cannot_be_cut_says_so():
    found = of(Model(layers=8, hidden=64, batch=4), Machine(16))
    assert found["1 x 16"].problem == "8 layers are too few for 16 stages"
    assert found["8 x 2"].problem == "a batch of 4 for 8 replicas"
    assert found["1 x 16"].seconds == pytest.approx(float("inf"))
    found = of(Model(layers=12, hidden=64, batch=12), Machine(12))
    by_node = ["hybrid", "tensor 8, sharded", "tensor 8, 1 stages"]
    assert {found[name].problem for name in by_node} == {"12 GPUs do not fill nodes of 8"}
    assert not found["1 x 12"].problem


def test_a_pipeline_sends_with_the_tokens_of_a_batch_and_sharding_with_the_weights():
    """A8: lesson 00 once said that of all ways a pipeline sends least."""
    machine, longer = Machine(8), replace(MODEL, batch=16 * MODEL.batch)
    found = of(MODEL, machine)
    plans = {
        "pipeline": replace(found["1 x 8"].plan, schedule="1f1b", chunks=1, cut=(4,) * 8),
        "sharded": replace(found["sharded"].plan, microbatch=MODEL.batch // 8),
    }
    sent = {name: bytes_per_gpu(MODEL, machine, plan) for name, plan in plans.items()}
    plans["sharded"] = replace(plans["sharded"], microbatch=longer.batch // 8)
    later = {name: bytes_per_gpu(longer, machine, plan) for name, plan in plans.items()}
    assert later["pipeline"] == 16 * sent["pipeline"]
    assert later["sharded"] == sent["sharded"]
    assert sent["pipeline"] < sent["sharded"] and later["pipeline"] > later["sharded"]
