"""Plans are performed with real ranks, paced by their forecast; files of times are checked."""

import json
import subprocess
import sys

import pytest

from course.launch import SCRIPTS
from lab.paced_schedule import KINDS
from planning.confirming import confirm, far_hops_only
from planning.forecast import forecast, stage_costs
from planning.machine import Link, Machine
from planning.training_plan import Plan
from planning.transformer import Model

pytestmark = pytest.mark.further  # it measures this machine

MODEL = Model(8, 1024, batch=8, vocabulary=32_000)
FAR = Machine(2, gpus_per_node=1, between=Link(0.3e9, 10e-3, 1))


@pytest.mark.processes
def test_a_plan_with_uneven_stages_and_a_slow_link_is_performed_as_forecast():
    """Waiting needs no core, but a loaded machine adds to each action: 25 % is for that."""
    plan = Plan("1f1b", 2, cut=(5, 3), recompute="full")
    found = confirm(MODEL, FAR, plan)
    assert found.forecast < forecast(MODEL, FAR, plan).update * 1.001
    assert -0.25 < found.error < 0.02


def test_only_links_between_nodes_are_played():
    plan = Plan("1f1b", 4)
    machine = Machine(4, gpus_per_node=2, between=Link(1e9, 1e-3, 1))
    costs = far_hops_only(machine, plan, stage_costs(MODEL, machine, plan))
    assert set(costs.transfer) == set(costs.occupancy) == {(1, 2), (2, 1)}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ([], "has no string 'schedule'"),
        ({"schedule": "0F0,0B0"}, "has no list 'forward' with a time per stage"),
        (
            {"schedule": "0F0,0B0", "forward": [-1], "backward": [2], "backward_weight": [1]},
            "'forward' has a value that is not a time",
        ),
        (
            {"schedule": "0F0,0B0\n1F0,1B0", **dict.fromkeys(KINDS, [1, 1])},
            "it is for 2 ranks, and this job has 1",
        ),
        ({"schedule": ""}, "the schedule has no actions"),
        (
            {"schedule": "0F0,0B0\n1B0,1F0", **dict.fromkeys(KINDS, [1, 1])},
            "rank 1 runs the backward of micro-batch 0 on stage 1 at step 0",
        ),
    ],
)
def test_a_wrong_file_of_times_is_rejected_in_one_sentence(content, sentence, tmp_path):
    file = tmp_path / "times.json"
    file.write_text(json.dumps(content))
    done = subprocess.run(
        [sys.executable, "-m", "lab.paced_schedule", str(file)],
        cwd=SCRIPTS,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0 and sentence in done.stderr and "Traceback" not in done.stderr
