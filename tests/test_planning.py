"""Planning on paper: the published numbers of Megatron-LM (SC 2021), and the simulator agrees."""

import json

import pytest

from course.cluster import TRANSCRIPTS, Cluster, stacks_of
from course.launch import ROOT, run
from planning.candidates import forecasts, pipelines_over_nodes
from planning.closed_forms import bubble_of_replicas, training_days
from planning.machine import Machine
from planning.training_plan import Plan
from planning.transformer import Model

GPT3 = Model(layers=96, hidden=12288, batch=1536)
MEGATRON_2021 = Plan(
    recompute="full", fused_attention=False, sequence_parallel=False, neighbours="replicas"
)


@pytest.mark.parametrize(
    ("parameters", "tokens", "gpus", "flops", "days"),
    [(175e9, 300e9, 1024, 140e12, 34), (1e12, 450e9, 3072, 163e12, 84)],
)
def test_training_days_of_megatron_section_5_1(parameters, tokens, gpus, flops, days):
    assert abs(training_days(parameters, tokens, gpus, flops) - days) < 1


def test_flops_per_update_are_close_to_8_times_parameters_and_tokens_megatron_equation_4():
    tokens = GPT3.batch * GPT3.length
    assert GPT3.flops_per_update / (8 * tokens * GPT3.parameters) == pytest.approx(1, abs=0.03)


def test_replicas_shrink_the_bubble_to_n_minus_d_over_batch_megatron_section_3_3_1():
    for gpus, replicas, batch in [(32, 1, 128), (32, 4, 128), (128, 16, 512)]:
        p, m = gpus // replicas, batch // replicas
        assert bubble_of_replicas(gpus, replicas, batch) == pytest.approx((p - 1) / m)


def test_every_candidate_uses_all_gpus_and_the_forecasts_come_sorted():
    machine = Machine(128, memory=1e15)
    model = Model(layers=96, hidden=12288, batch=96)
    plans = list(pipelines_over_nodes(model, machine, ["1f1b", "interleaved-1f1b"], MEGATRON_2021))
    found = forecasts(model, machine, plans)
    assert {one.plan.gpus for one in found} == {128}
    assert [one.update for one in found] == sorted(one.update for one in found)
    assert {one.plan.schedule for one in found} == {"1f1b", "interleaved-1f1b"}
    first = forecasts(model, machine, plans, count=3)
    assert [one.plan for one in first] == [one.plan for one in found[:3]]


def test_plans_that_do_not_fit_are_left_out():
    machine = Machine(64)
    found = forecasts(GPT3, machine, pipelines_over_nodes(GPT3, machine, ["1f1b"], MEGATRON_2021))
    assert {one.plan.ranks for one in found} == {8}


def test_gpt3_on_1024_gpus_takes_the_34_days_of_megatron_section_5_1_within_5_percent():
    """Equation 3 at the measured 140 teraflops gives 34.7 days; nothing may be added to that rate."""
    machine = Machine(1024)
    plans = [
        plan
        for plan in pipelines_over_nodes(GPT3, machine, ["1f1b"], MEGATRON_2021)
        if plan.ranks in (8, 16)
    ]
    published = 300e9 / 1536 / 2048 * GPT3.flops_per_update / (1024 * 140e12) / 86_400
    assert round(published, 1) == 34.7
    for one in forecasts(GPT3, machine, plans):
        assert one.days(GPT3, 300e9) == pytest.approx(published, rel=0.06)


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
            is_checked = "nbval-check-output" in cell["metadata"].get("tags", [])
            yield found[1], output if is_checked else None


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


@pytest.mark.further
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


@pytest.mark.further
def test_profiling_changes_no_loss_and_a_run_of_one_step_can_be_profiled():
    small = "gpipe.py --steps 1 --dim 16 --heads 2 --kv-heads 2 --seq-len 8"
    (ROOT / "build/tests").mkdir(parents=True, exist_ok=True)
    plain = run(small, ranks=2, warm=True, show=False)
    profiled = run(f"{small} --profile build/tests/one.json", ranks=2, warm=True, show=False)
    assert profiled.losses == plain.losses
    assert len(actions_of("build/tests/one.json")[1]) == 2 * 16
