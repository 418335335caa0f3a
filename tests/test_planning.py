"""Planning on paper: the published numbers of Megatron-LM (SC 2021), and the simulator agrees."""

import json

import pytest

from course.cluster import TRANSCRIPTS, Cluster, stacks_of
from course.launch import ROOT, run
from extensions.planning.forecast import (
    Machine,
    Model,
    Plan,
    batch_time,
    bubble_of_replicas,
    bubble_over_ideal,
    forecast,
    forecasts,
    training_days,
)
from lab.simulator import Costs, simulate
from pipeline.schedules import interleaved_1f1b, one_f_one_b

GPT3 = Model(layers=96, hidden=12288, batch=1536)
FAST = {"bandwidth": 1e30, "latency": 0.0, "memory": 1e15}


def test_gpt3_has_174_6_billion_parameters_megatron_table_1():
    assert round(GPT3.parameters / 1e9, 1) == 174.6


@pytest.mark.parametrize(
    ("parameters", "tokens", "gpus", "flops", "days"),
    [(175e9, 300e9, 1024, 140e12, 34), (1e12, 450e9, 3072, 163e12, 84)],
)
def test_training_days_of_megatron_section_5_1(parameters, tokens, gpus, flops, days):
    assert abs(training_days(parameters, tokens, gpus, flops) - days) < 1


def test_flops_per_update_are_close_to_8_times_parameters_and_tokens_megatron_equation_4():
    tokens = GPT3.batch * GPT3.length
    assert GPT3.flops_per_update / (8 * tokens * GPT3.parameters) == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize(("p", "m", "v"), [(4, 8, 1), (8, 16, 1), (4, 8, 2), (8, 32, 4)])
def test_the_bubble_is_p_minus_1_over_v_m_megatron_sections_2_2_1_and_2_2_2(p, m, v):
    schedule = one_f_one_b(p, m) if v == 1 else interleaved_1f1b(p, m, v)
    timeline = simulate(schedule, Costs(1.0, 2.0))
    assert timeline.bubble_over_ideal == pytest.approx(bubble_over_ideal(p, m, v), abs=1e-12)


def test_replicas_shrink_the_bubble_to_n_minus_d_over_batch_megatron_section_3_3_1():
    for gpus, replicas, batch in [(32, 1, 128), (32, 4, 128), (128, 16, 512)]:
        p, m = gpus // replicas, batch // replicas
        assert bubble_of_replicas(gpus, replicas, batch) == pytest.approx(bubble_over_ideal(p, m))


def test_batch_time_of_megatron_equation_1_is_the_simulator_s():
    timeline = simulate(one_f_one_b(8, 32), Costs(3.0, 5.0))
    assert timeline.makespan == batch_time(batch=128, replicas=2, microbatch=2, ranks=8,
                                           forward=3.0, backward=5.0)  # fmt: skip


def test_a_forecast_without_network_and_bubble_is_work_over_speed():
    machine = Machine(gpus=8, **FAST)
    one = forecast(GPT3, machine, Plan("1f1b", ranks=1, chunks=1, replicas=1, tensor=8))
    assert one.update == pytest.approx(GPT3.flops_per_update / (8 * machine.flops), rel=1e-12)
    assert (one.bubble_over_ideal, one.averaging) == (pytest.approx(0, abs=1e-9), 0.0)


def test_a_forecast_has_the_bubble_of_its_schedule_and_pays_for_a_slow_network():
    plan = Plan("1f1b", ranks=8, chunks=1, replicas=16, tensor=8)
    ideal = forecast(GPT3, Machine(1024, **FAST), plan)
    assert ideal.bubble_over_ideal == pytest.approx(bubble_over_ideal(8, 96))
    slow = forecast(GPT3, Machine(1024, bandwidth=1e9), plan)
    weights = GPT3.parameters / 64 * 2
    assert slow.averaging == pytest.approx(2 * 15 / 16 * weights / 1e9)
    assert slow.update > ideal.update + slow.averaging


def test_a_forecast_s_memory_is_16_bytes_a_parameter_and_what_the_schedule_holds():
    one = forecast(GPT3, Machine(1024), Plan("1f1b", ranks=8, chunks=1, replicas=16, tensor=8))
    held = 8 * 12 * 2048 * 12288 * 2  # micro-batches, layers of a stage, one input of 2 bytes
    assert one.memory == pytest.approx(GPT3.parameters / 64 * 16 + held)


def test_every_forecast_uses_all_gpus_and_they_come_sorted():
    found = forecasts(GPT3, Machine(256, memory=1e15), ["1f1b", "interleaved-1f1b"])
    assert {one.plan.tensor * one.plan.ranks * one.plan.replicas for one in found} == {256}
    assert [one.update for one in found] == sorted(one.update for one in found)
    assert {one.plan.schedule for one in found} == {"1f1b", "interleaved-1f1b"}


def test_plans_whose_weights_alone_do_not_fit_are_left_out():
    found = forecasts(GPT3, Machine(64), ["1f1b"])
    assert {one.plan.ranks for one in found} == {8}


# Where there is no SLURM.


def calls_of_lesson_11():
    """(name of the record, checked output or None) of everything that asks the cluster."""
    import re

    cells = json.loads((ROOT / "notebooks/11_from_laptop_to_cluster.ipynb").read_text())["cells"]
    for cell in cells:
        source = "".join(cell["source"])
        found = re.search(r'cluster\.(?:ask|submit)\(\s*"(\w+)"', source)
        if found:
            output = "".join("".join(o.get("text", "")) for o in cell["outputs"])
            yield found[1], output if source.startswith("# NBVAL") else None


def test_without_slurm_lesson_11_shows_a_record_that_says_what_the_notebook_expects():
    cluster = Cluster(None)
    names = []
    for name, checked in calls_of_lesson_11():
        answer = cluster._recorded(name)
        assert checked is None or checked.endswith(answer.output)
        names.append(name)
    assert sorted(names) == sorted(
        path.stem for path in TRANSCRIPTS.glob("*.json") if "output" in json.loads(path.read_text())
    )
    trained = cluster._recorded("train")
    assert trained.losses == [5.929890, 5.242678, 4.830152, 4.396426]
    stacks = stacks_of(cluster._recorded("hang").output)
    innermost = {rank: lines[0].rsplit(" ", 1)[1] for rank, lines in stacks.items()}
    assert innermost == {
        "pp0.0": "wait",
        "pp0.1": "wait",
        "pp1.0": "read_from_slow_disk",
        "pp1.1": "wait",
    }


# One trace of all ranks.


def actions_of(file):
    rows = json.loads((ROOT / file).read_text())["traceEvents"]
    marked = [
        row for row in rows if row.get("cat") == "user_annotation" and row["name"][0] in "0123"
    ]
    return rows, marked


@pytest.mark.parametrize(
    ("script", "actions"), [("one_f_one_b.py --microbatches 4", 8), ("pipedream.py", 36)]
)
def test_a_profile_holds_one_pass_of_every_rank_on_the_clock_of_the_timeline(script, actions):
    small = "--steps 12 --dim 16 --heads 2 --kv-heads 2 --seq-len 8"
    files = "--profile build/tests/profile.json --timeline build/tests/profiled.json"
    (ROOT / "build/tests").mkdir(parents=True, exist_ok=True)
    run(f"{script} {small} {files}", ranks=4, warm=True, show=False)
    rows, marked = actions_of("build/tests/profile.json")
    for rank in range(4):
        names = [row["name"] for row in marked if row["pid"] == rank]
        assert len(names) == len(set(names))
        assert {name[0] for name in names} == {str(rank)}
        assert len([name for name in names if name[1] in "FB"]) == min(actions, 24)
    ends = {row["name"]: row["ts"] + row["dur"] for row in marked}
    # A message is made before it is used, on the common clock, to within a millisecond.
    assert all(ends[f"{s}F0"] <= ends[f"{s + 1}F0"] + 1000 for s in range(3))
    names = {row["args"]["name"] for row in rows if row["name"] == "process_name"}
    assert {name.split(" on ")[0] for name in names} == {f"rank {rank}" for rank in range(4)}
    assert any(row["name"] == "aten::mm" for row in rows)


def test_profiling_changes_no_loss_and_a_run_of_one_step_can_be_profiled():
    small = "gpipe.py --steps 1 --dim 16 --heads 2 --kv-heads 2 --seq-len 8"
    (ROOT / "build/tests").mkdir(parents=True, exist_ok=True)
    plain = run(small, ranks=2, warm=True, show=False)
    profiled = run(f"{small} --profile build/tests/one.json", ranks=2, warm=True, show=False)
    assert profiled.losses == plain.losses
    assert len(actions_of("build/tests/one.json")[1]) == 2 * 16
