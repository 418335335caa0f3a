"""The forecast of large training runs: what it counts, by the papers' formulas."""

import json
from dataclasses import replace

import pytest

from files.inputs import InputError
from lab.simulator import simulate
from pipeline.model import ModelConfig, cut_as
from pipeline.schedules import SCHEDULES, build_schedule, synchronous_schedules
from planning import forecast as forecasting
from planning.bound import lower_bound, memory_bound, work_bound
from planning.bytes_sent import bytes_per_gpu, bytes_per_node
from planning.candidates import PLANNED, all_plans
from planning.counted_memory import predict_memory
from planning.forecast import (
    forecast,
    stage_costs,
)
from planning.known_models import NAMED, find_model
from planning.machine import MACHINES, Link, Machine, machine_names, read_machine
from planning.microbatches_held import counted, held_by
from planning.plan_memory import memory_per_rank, weights_of
from planning.stage_times import stages_of
from planning.traffic import all_reduce_time, bus_bandwidth, gather_time, message_costs
from planning.training_plan import Plan, balanced_cut
from planning.transformer import Model, kept_bytes, passing_bytes

GPT3 = Model(layers=96, hidden=12288, batch=1536)
LLAMA_3_8B = Model(
    32, 4096, 8192, 128_256, 16, heads=32, kv_heads=8, inner=14336, gated=True, tied=False
)
FREE = Link(1e30, 0.0)
NO_NETWORK = {"inside": FREE, "between": FREE, "memory_speed": 1e30, "memory": 1e15}


def test_parameters_are_those_of_megatron_equation_2_and_of_llama_3_8b():
    l, h, v, s = 96, 12288, 51_200, 2048  # noqa: E741
    formula = 12 * l * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * l * h))
    assert GPT3.parameters == pytest.approx(formula, rel=1e-12)
    assert LLAMA_3_8B.parameters == pytest.approx(8_030_261_248, rel=1e-6)


def test_operations_of_an_update_are_those_of_megatron_equation_3():
    l, h, v, s = 96, 12288, 51_200, 2048  # noqa: E741
    formula = 96 * 1536 * s * l * h**2 * (1 + s / (6 * h) + v / (16 * l * h))
    assert GPT3.flops_per_update == pytest.approx(formula, rel=1e-12)
    without = 72 * 1536 * s * l * h**2 * (1 + s / (6 * h) + v / (12 * l * h))
    assert GPT3.model_flops == pytest.approx(without, rel=1e-12)


@pytest.mark.parametrize("tensor", [1, 8])
def test_a_layer_keeps_s_b_h_times_34_and_5_a_s_over_h_korthikanti_equations_1_to_4(tensor):
    h, a, s, t = 12288, 96, 2048, tensor
    unit = 2 * s * h
    scores = 5 * a * s / h
    assert kept_bytes(GPT3, 2, t, "none", False, False) == pytest.approx(
        unit * (10 + 24 / t + scores / t)
    )
    assert kept_bytes(GPT3, 2, t, "none", False, True) == pytest.approx(unit * (34 + scores) / t)
    assert kept_bytes(GPT3, 2, t, "none", True, True) == pytest.approx(unit * 34 / t)
    assert kept_bytes(GPT3, 2, t, "full", True, True) == 2 * unit / t


def test_a_gated_layer_with_fused_kernels_stores_no_intermediate_of_norms_and_gate():
    """Bytes per token of a Llama 3 8B layer: kernels of plain torch, fused, per operator, full."""
    h, kv, inner, sums = 4096, 1024, 14336, 4 * 32
    tokens, t = 8192, 1
    plain, fused = (
        kept_bytes(LLAMA_3_8B, 1, t, "none", True, True, kernels) / tokens
        for kernels in ("plain", "fused")
    )
    # Two norms: input, input times weight, output. Attention: queries, result; keys and values.
    assert plain == (7 + 2) * 2 * h + 2 * 2 * kv + 4 * 2 * inner + sums
    assert fused == (4 + 2) * 2 * h + 2 * 2 * kv + 2 * 2 * inner + sums
    stored = kept_bytes(LLAMA_3_8B, 1, t, "operator", True, True) / tokens
    assert stored == 2 * (h + h + h + h + kv + inner)  # input, queries, attention, last; v; gate
    whole, parted = (
        kept_bytes(LLAMA_3_8B, 1, 8, "full", True, parallel) for parallel in (False, True)
    )
    assert whole == 8 * parted == 2 * h * tokens


def test_zero_2_shards_gradients_and_scatters_them_after_each_backward():
    machine, plan = Machine(16, hidden=0.0), Plan(replicas=16, sharding="gradients")
    first = replace(plan, sharding="optimizer")
    weights = GPT3.parameters
    saved = memory_per_rank(GPT3, machine, first)[0] - memory_per_rank(GPT3, machine, plan)[0]
    assert saved == pytest.approx(4 * weights * 15 / 16)
    slow = replace(GPT3, batch=64)
    two, four = (forecast(replace(slow, batch=batch), machine, plan).update for batch in (32, 64))
    alone = gather_time(machine, 4 * weights / 96, 16, 8) * 96
    backward = sum(stages_of(GPT3, machine, plan).layer()[:3]) * 96
    assert four - two > 2 * (alone + backward)


def test_a_sharded_pipeline_with_chunks_gathers_as_many_bytes_and_holds_as_many_shards():
    machine = Machine(32, hidden=0.0)
    plain = Plan(ranks=4, replicas=8, sharding="full", microbatch=1)
    chunked = replace(plain, schedule="interleaved-1f1b", chunks=2)
    alone = [replace(plan, sharding="none") for plan in (plain, chunked)]
    gathered = [
        sum(stage_costs(GPT3, machine, plan).forward) - sum(stage_costs(GPT3, machine, one).forward)
        for plan, one in zip((plain, chunked), alone)
    ]
    assert gathered[0] > 0 and gathered[1] == pytest.approx(gathered[0], rel=1e-9)
    saved = [
        memory_per_rank(GPT3, machine, one)[1] - memory_per_rank(GPT3, machine, plan)[1]
        for plan, one in zip((plain, chunked), alone)
    ]
    assert saved[0] == pytest.approx(saved[1]) and saved[0] > 0
    plans = all_plans(replace(GPT3, batch=32), machine)
    assert any(plan.chunks > 1 and plan.sharding == "full" for plan in plans)


def test_zero_1_on_paper_scatters_its_gradients_and_the_course_s_own_does_not():
    machine = Machine(16)
    for model, scatters in ((replace(GPT3, batch=64), True), (NAMED["1b"], False)):
        plans = [one for one in all_plans(model, machine) if one.sharding == "optimizer"]
        assert plans and {one.scatters for one in plans} == {scatters}
        assert not any(
            one.scatters for one in all_plans(model, machine) if one.sharding != "optimizer"
        )


def test_a_reduce_scatter_and_a_gather_of_zero_1_take_as_long_as_an_all_reduce():
    machine = Machine(16)
    plan = Plan(replicas=16, sharding="optimizer", overlap=False, gradient_bytes=2)
    scattered, ours, none = (
        forecast(GPT3, machine, one).reduction
        for one in (replace(plan, scatters=True), plan, replace(plan, sharding="none"))
    )
    assert scattered == pytest.approx(none)
    assert ours == pytest.approx(1.5 * none)


def test_hidden_is_the_fraction_of_sharding_traffic_that_computation_hides():
    model, plan = replace(LLAMA_3_8B, length=4096), Plan(replicas=16, sharding="full")
    times = [forecast(model, Machine(16, hidden=h), plan).update for h in (0.0, 0.5, 1.0)]
    assert times[0] - times[1] == pytest.approx(times[1] - times[2])
    assert times[2] < times[1]


def test_fused_attention_and_fp8_have_rates_of_their_own():
    machine = Machine(8, fp8_flops=426e12, **NO_NETWORK)
    slower = replace(machine, attention_flops=machine.attention_flops / 2)
    base = stages_of(GPT3, machine, Plan()).layer()
    scores = GPT3.score_flops(1) / 2 / machine.attention_flops  # half of all pairs
    assert stages_of(GPT3, slower, Plan()).layer()[0] - base[0] == pytest.approx(scores)
    products = 2 * GPT3.length * GPT3.layer_matrices / machine.flops
    narrow = stages_of(GPT3, machine, Plan(precision="fp8")).layer()
    assert base[0] - narrow[0] == pytest.approx(products / 2)


def test_flash_attention_2_has_a_rate_of_its_own_where_the_gpu_has_newer_kernels():
    machine = Machine(8, flash_2_flops=50e12, **NO_NETWORK)
    newest, older = (
        stages_of(GPT3, machine, Plan(flash_2=old)).layer()[0] for old in (False, True)
    )
    scores = GPT3.score_flops(1) / 2
    assert older - newest == pytest.approx(scores / 50e12 - scores / machine.attention_flops)
    same = replace(machine, flash_2_flops=0.0)
    assert stages_of(GPT3, same, Plan(flash_2=True)).layer()[0] == newest


def test_beside_fsdp_a_recomputed_layer_does_not_repeat_its_last_product():
    """torch.utils.checkpoint stops early: of a GPT's twelve h squared, four are not repeated."""
    machine = Machine(8, **NO_NETWORK)
    whole, stopped = (
        stages_of(GPT3, machine, Plan(replicas=8, sharding=sharding, recompute="full")).layer()
        for sharding in ("optimizer", "full")
    )
    assert stopped[:3] == whole[:3]
    last = 2 * GPT3.length * 4 * GPT3.hidden**2 / machine.flops
    assert whole[3] - stopped[3] == pytest.approx(last)


def test_a_gated_layer_in_plain_torch_moves_twice_the_bytes_of_one_with_fused_kernels():
    machine = Machine(8)
    plain, fused = (
        stages_of(LLAMA_3_8B, machine, Plan(kernels=kernels)).layer()[0]
        for kernels in ("plain", "fused")
    )
    moved = passing_bytes(LLAMA_3_8B, 1, 1, True) / machine.memory_speed
    assert plain - fused == pytest.approx(moved)
    gpt = [stages_of(GPT3, machine, Plan(kernels=one)).layer() for one in ("plain", "fused")]
    assert gpt[0] == gpt[1]


def test_hybrid_sharding_hides_only_the_stated_fraction_of_its_sums_between_nodes():
    model, plan = replace(LLAMA_3_8B, length=4096), Plan(replicas=16, sharding="hybrid")
    slow = {"between": Link(5e9, 0.0, 8)}
    times = [forecast(model, Machine(16, hidden=h, **slow), plan).reduction for h in (0.0, 0.5)]
    sums = stages_of(model, Machine(16, **slow), plan).summing(model.parameters)
    assert times[0] - times[1] == pytest.approx(0.5 * sums)


# Collectives.


def test_a_ring_enters_and_leaves_each_node_once_so_all_cards_of_a_node_serve_it():
    machine = Machine(32)  # 8 cards of 22 GB/s per node
    assert bus_bandwidth(machine, 32, 8) == 8 * 22e9
    assert bus_bandwidth(machine, 8, 8) == 235e9
    assert bus_bandwidth(machine, 4, 1) == 22e9
    one_card = Machine(32, between=Link(22e9, 0.0, 1))
    assert bus_bandwidth(one_card, 32, 8) == 22e9
    assert bus_bandwidth(replace(machine, between=Link(100e9, 0.0, 8)), 32, 8) == 235e9


def test_an_all_reduce_moves_2_n_minus_1_over_n_of_its_bytes_nccl_tests():
    machine = Machine(16, inside=Link(100e9, 0.0), between=Link(5e9, 0.0, 8))
    assert all_reduce_time(machine, 8e9, 8, 8) == pytest.approx(2 * 7 / 8 * 8e9 / 100e9)
    assert all_reduce_time(machine, 8e9, 16, 8) == pytest.approx(2 * 15 / 16 * 8e9 / 40e9)
    assert gather_time(machine, 8e9, 16, 8) == pytest.approx(15 / 16 * 8e9 / 40e9)
    assert all_reduce_time(machine, 8e9, 1, 1) == 0


def test_more_cards_per_node_shorten_a_flat_ring_nccl_569():
    """Measured there with 1, 2 and 4 GPUs and cards per node: 363, 173, 132 ms."""
    times = [
        all_reduce_time(
            Machine(2 * k, 1e12, 1e12, k, Link(100e9), Link(10e9, 0.0, k)), 1e9, 2 * k, k
        )
        for k in (1, 2, 4)
    ]
    assert times[0] > 1.3 * times[1] > 1.3 * times[2]


def test_a_message_pays_for_the_link_that_it_crosses():
    machine = Machine(16)
    near, far = message_costs(machine, 1e8, False), message_costs(machine, 1e8, True)
    assert near == (3.4e-6, 1e8 / 235e9) and far == (14e-6, 1e8 / 22e9)
    # Eight GPUs that share a layer send an eighth each (Megatron-LM section 4.1), if there are cards.
    assert message_costs(machine, 1e8, True, tensor=8)[1] == pytest.approx(1e8 / 8 / 22e9)
    one = replace(machine, between=Link(22e9, 14e-6, 1))
    assert message_costs(one, 1e8, True, tensor=8)[1] == pytest.approx(1e8 / 22e9)
    assert message_costs(one, 1e8, True, senders=8)[1] == pytest.approx(8e8 / 22e9)


def test_what_fills_a_node_decides_which_messages_leave_it():
    machine = Machine(32)
    stages, replicas = Plan(ranks=8, replicas=4), Plan(ranks=8, replicas=4, neighbours="replicas")
    assert not any(stages.is_far(machine, r, r + 1) for r in range(7))
    assert stages.replicas_in_node(machine) == 1
    assert [replicas.is_far(machine, r, r + 1) for r in range(4)] == [False, True, False, True]
    assert replicas.replicas_in_node(machine) == 4


# What is sent.


@pytest.mark.parametrize(
    ("model", "gpus", "pipeline", "data", "sharded"),
    [
        (Model(24, 2048, 2048, 32_000, 512), 8, 8.6, 4.5, 6.7),
        (Model(32, 4096, 4096, 32_000, 1024), 32, 68.7, 25.5, 38.3),
    ],
)
def test_a_pipeline_sends_the_least_only_where_tokens_times_width_are_fewer_than_weights(
    model, gpus, pipeline, data, sharded
):
    """16-bit gradients, one micro-batch per replica: A8 of what was found wrong once."""
    machine = Machine(gpus)
    share = {"replicas": gpus, "microbatch": model.batch // gpus, "gradient_bytes": 2}
    found = [
        bytes_per_gpu(model, machine, plan) / 1e9
        for plan in (Plan(ranks=gpus), Plan(**share), Plan(**share, sharding="full"))
    ]
    assert found == pytest.approx([pipeline, data, sharded], rel=0.01)
    assert found[0] > found[2] > found[1]


def test_hybrid_sharding_sends_its_weights_inside_a_node_only():
    model, machine = Model(32, 4096, batch=256), Machine(32)
    plans = [Plan(replicas=32, microbatch=8, sharding=s) for s in ("full", "hybrid")]
    full, hybrid = (bytes_per_node(model, machine, plan) for plan in plans)
    # Of eight rings, each with an eighth of the gradient over four nodes, in 32 bits.
    assert hybrid == pytest.approx(2 * 3 / 4 * 4 * model.parameters, rel=0.03)
    assert full == pytest.approx(31 / 32 * (2 * 2 + 4) * model.parameters, rel=0.03)


# Stages, schedule, update.


def test_the_last_stage_has_the_head_and_a_cut_by_work_gives_it_fewer_layers():
    model = replace(LLAMA_3_8B, length=4096, batch=64)
    even = stage_costs(model, Machine(8), Plan(ranks=8))
    assert even.forward[7] > 1.4 * even.forward[0]
    cut = balanced_cut(model, 8)
    assert sum(cut) == 32 and cut[7] == 2 and max(cut) == 5
    assert sum(weights_of(model, Plan(ranks=8), [s]) for s in range(8)) == model.parameters


def test_an_even_cut_of_a_model_with_a_heavy_head_is_forecast_slower():
    model, machine = replace(LLAMA_3_8B, length=4096, batch=64), Machine(8, memory=1e12)
    even = forecast(model, machine, Plan(ranks=4))
    cut = forecast(model, machine, Plan(ranks=4, cut=balanced_cut(model, 4)))
    assert cut.update < 0.97 * even.update
    # With all layers alike and the head spread over the stages, the two would be the same.
    assert even.update > model.model_flops / machine.flops / 4 * 1.1


def test_without_network_and_bubble_a_forecast_is_operations_over_rate():
    machine = Machine(8, **NO_NETWORK)
    plan = Plan(tensor=8, recompute="full", fused_attention=False)
    one = forecast(GPT3, machine, plan)
    assert one.update == pytest.approx(GPT3.flops_per_update / 8 / machine.flops, rel=1e-9)


def test_a_forecast_has_the_bubble_of_its_schedule():
    model = replace(GPT3, vocabulary=1)
    plan = Plan(ranks=8, replicas=16, tensor=8)
    found = forecast(model, Machine(1024, **NO_NETWORK), plan)
    assert found.bubble_over_ideal == pytest.approx(7 / 96, rel=1e-3)


def test_sums_of_gradients_hide_behind_the_last_backward_but_for_one_layer():
    plan = Plan(ranks=8, replicas=16, tensor=8, overlap=False)
    machine = Machine(1024, memory=1e15)
    open_, hidden = (forecast(GPT3, machine, replace(plan, overlap=o)) for o in (False, True))
    _, given, weights, _ = stages_of(GPT3, machine, plan).layer()
    last_backward = 12 * (given + weights) * (1 - 1 / 96)
    assert open_.reduction - hidden.reduction == pytest.approx(last_backward, rel=1e-6)
    slow = replace(machine, between=Link(1e9))
    assert forecast(GPT3, slow, plan).update > open_.update + 10


def test_full_recomputation_of_a_layer_runs_its_forward_again_with_its_sums():
    machine = Machine(8)
    forward, _, _, again = stages_of(GPT3, machine, Plan(tensor=8, recompute="full")).layer()
    assert again == forward
    assert stages_of(GPT3, machine, Plan(tensor=8)).layer()[3] == 0


@pytest.mark.parametrize("name", synchronous_schedules())
def test_a_bound_is_never_above_the_forecast_and_its_memory_is_the_forecast_s(name):
    chunks = SCHEDULES[name].chunks or 1
    model = Model(32, 1024, batch=64)
    if name == "naive":
        model = replace(model, batch=8)
    machine = Machine(16, between=Link(1e9, 1e-4))
    plan = Plan(name, 4, chunks, replicas=4 if name != "naive" else 8, microbatch=1)
    if name == "naive":
        plan = replace(plan, ranks=2)
    found = forecast(model, machine, plan)
    assert work_bound(model, machine, plan) <= lower_bound(model, machine, plan) * (1 + 1e-12)
    assert lower_bound(model, machine, plan) <= found.update * (1 + 1e-12)
    assert memory_bound(model, machine, plan) >= found.memory * (1 - 1e-12)


@pytest.mark.parametrize(
    "name", ["gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-h2", "zb-v"]
)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 4), (4, 12)])
def test_what_a_schedule_holds_is_what_the_simulator_counts(name, p, m):
    chunks = 3 if SCHEDULES[name].chunks else 1
    chunks = 2 if SCHEDULES[name].fixed_chunks else chunks
    schedule = build_schedule(name, p, m, chunks if chunks > 1 else None)
    plan = Plan(name, p, chunks)
    assert all(schedule.rank_of(s, 0) == plan.rank_of(s) for s in range(plan.stages))
    timeline = simulate(schedule, stage_costs(Model(48, 64, batch=m), Machine(p), plan))
    assert held_by(name, p, chunks, m) == list(timeline.peak_held_until_weight_per_rank)


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zb-v", "v-half", "v-min"])
def test_after_two_rounds_of_p_micro_batches_no_rank_holds_more(name):
    chunks = SCHEDULES[name].chunks or 1
    for p in range(2, 13):
        after_two, after_six = (counted(name, p, chunks, rounds * p) for rounds in (2, 6))
        assert after_two == after_six


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved-1f1b"])
def test_the_bound_by_work_is_exact_where_stages_are_even_and_messages_free(schedule):
    machine = Machine(4, inside=FREE, between=FREE)
    model = Model(16, 1024, batch=16, vocabulary=100)
    plan = Plan(schedule, 4, SCHEDULES[schedule].chunks or 1)
    found = forecast(model, machine, plan)
    assert work_bound(model, machine, plan) == pytest.approx(found.update - found.optimizer, 1e-12)


def test_the_bound_of_1f1b_and_interleaved_1f1b_is_exact_where_messages_are_free():
    machine = Machine(8, inside=FREE, between=FREE)
    for plan in (Plan(ranks=8), Plan("interleaved-1f1b", 8, 2)):
        model = Model(32, 1024, batch=32)
        found = forecast(model, machine, replace(plan, cut=balanced_cut(model, plan.stages)))
        bound = lower_bound(model, machine, found.plan)
        assert bound == pytest.approx(found.update, rel=0.03)


@pytest.mark.parametrize("schedule", [*PLANNED, "looped-bfs", "dualpipe-v"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("name", "ranks", "width"), [("10m", 2, 4), ("125m", 4, 2)])
def test_memory_is_what_the_course_s_training_counts(schedule, recompute, name, ranks, width):
    """counted_memory.py equals the measured bytes; here for all micro-batches, there for a few rounds."""
    model, machine = find_model(name, 128, 96), replace(Machine(ranks), bytes_per_value=width)
    chunks = SCHEDULES[schedule].chunks or 1
    plan = Plan(schedule, ranks, chunks, microbatch=2, recompute=recompute)
    plan = replace(plan, cut=balanced_cut(model, plan.stages))
    config = ModelConfig(
        model.layers, model.hidden, model.heads, model.kv_heads, 128, model.vocabulary
    )
    built = build_schedule(schedule, ranks, 48, chunks if chunks > 1 else None)
    mode = "layer" if recompute == "full" else "none"
    counted = predict_memory(config, built, cut_as(plan.cut), 2, width, "adamw", mode)
    assert memory_per_rank(model, machine, plan) == [rank.total for rank in counted]


@pytest.mark.parametrize("name", forecasting.STEADY)
@pytest.mark.parametrize("between", [FREE, Link(2e9, 1e-3, 8), Link(0.2e9, 1e-5, 1)])
@pytest.mark.parametrize("batch", [47, 96])
def test_a_few_rounds_of_a_steady_phase_tell_how_long_all_of_it_takes(
    name, between, batch, monkeypatch
):
    monkeypatch.setattr(forecasting, "PLAYED", 0)
    model, machine = Model(16, 512, batch=batch), Machine(4, gpus_per_node=2, between=between)
    plan = Plan(name, 4, 2 if SCHEDULES[name].chunks else 1)
    if name == "interleaved-1f1b" and batch % 4:
        return
    few = forecast(model, machine, replace(plan, cut=balanced_cut(model, plan.stages)))
    monkeypatch.setattr(forecasting, "ROUNDS", 1000)
    whole = forecast(model, machine, few.plan)
    assert few.update == pytest.approx(whole.update, rel=2e-3)
    assert few.bubble_over_ideal == pytest.approx(whole.bubble_over_ideal, abs=3e-3)
    assert few.memory == pytest.approx(whole.memory)


# Machine files.


@pytest.mark.parametrize("name", machine_names())
def test_a_machine_file_says_where_its_numbers_come_from(name):
    machine = read_machine(name, 16)
    assert machine.gpus == 16 and machine.flops < machine.peak
    sources = json.loads((MACHINES / f"{name}.json").read_text())["sources"]
    assert {"teraflops", "between", "error"} <= set(sources)


def test_the_default_machine_is_the_dgx_a100_80gb():
    assert read_machine("dgx-a100-80gb", 8) == Machine(8)


def test_a_machine_hides_no_more_traffic_than_there_is(tmp_path):
    path = tmp_path / "machine.json"
    text = (MACHINES / "dgx-h100.json").read_text()
    path.write_text(json.dumps(json.loads(text) | {"hidden": 1.5}))
    with pytest.raises(InputError, match="'hidden' of .* is not a fraction of at most 1"):
        read_machine(str(path), 8)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"gpus_per_node": 0}', "has no 'gpus_per_node' above 0"),
        ('{"gpus_per_node": "8"}', "has no 'gpus_per_node' above 0"),
    ],
)
def test_a_wrong_machine_file_is_rejected_in_one_sentence(text, sentence, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(InputError, match=f"{sentence}.*; "):
        read_machine(str(path), 8)
    with pytest.raises(InputError, match="neither a file nor one of"):
        read_machine("nowhere", 8)
