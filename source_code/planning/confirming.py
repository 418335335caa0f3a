# SPDX-License-Identifier: Apache-2.0
"""Runs plans on this machine with paced actions, to compare them with their forecasts.

A run has the pipeline of one replica: its ranks, its order of actions, its uneven stages and its
links between nodes. The model is small. Each action is paced to last as long as in the forecast,
times a factor that makes a step take about three seconds. The measured step therefore shows whether
the schedule behaves as forecast. It does not show whether the forecast times of the stages are
right: only a run on the forecast's own machine does.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from lab.simulator import Costs, simulate
from lab.variables import DELAY_VARIABLE, OCCUPANCY_VARIABLE, PRETENDED_VARIABLE
from pipeline.schedules.text_form import to_csv
from planning.forecast import known_schedule, stage_costs
from planning.training_plan import Plan

SOURCE = Path(__file__).resolve().parents[1]
STEP = 3000.0  # milliseconds that a performed step should take
LIMIT = 300.0  # seconds of a run
PACED = "-m", "lab.paced_schedule"
LEAST = 4.0  # milliseconds of the shortest action; below it, Python's overhead shows


@dataclass(frozen=True)
class Confirmed:
    """Seconds of the pipeline's part of an update: forecast, and measured divided by `factor`."""

    plan: Plan
    factor: float
    forecast: float
    performed: float

    @property
    def error(self):
        return self.forecast / self.performed - 1


def confirm(model, machine, plan):
    """Run one plan for at most LIMIT seconds; return its Confirmed.

    Raises subprocess.SubprocessError if the run fails or takes too long.
    """
    # Very many micro-batches repeat the same steady phase: a few rounds of it are enough.
    most = 4 * plan.ranks
    m = plan.microbatches(model)
    if m > most:
        model = replace(model, batch=plan.replicas * plan.microbatch * most)
        m = most
    schedule = known_schedule(plan.schedule, plan.ranks, m, plan.chunks)
    costs = far_hops_only(machine, plan, stage_costs(model, machine, plan))
    forecast = simulate(schedule, costs).makespan
    shortest = min(min(costs.forward), min(costs.backward)) * 1000
    factor = max(STEP / (1000 * forecast), LEAST / shortest)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "times.json"
        file.write_text(json.dumps(times_of(schedule, costs, 1000 * factor)))
        output = perform(file, plan, machine, costs, 1000 * factor)
    performed = float(re.search(r"^step ([\d.]+) ms", output, re.MULTILINE)[1])
    return Confirmed(plan, factor, forecast, performed / 1000 / factor)


def perform_schedule(schedule, costs):
    """Milliseconds of a step of `schedule` on real ranks, with actions paced as in `costs`.

    `costs` is a Costs in milliseconds, with a list per kind and without messages. Raises
    subprocess.SubprocessError if the run fails or takes more than LIMIT seconds.
    """
    halves = [time / 2 for time in costs.backward]
    costs = replace(costs, backward_weight=costs.backward_weight or halves)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "times.json"
        file.write_text(json.dumps(times_of(schedule, costs, 1.0)))
        output = launch([*PACED, str(file)], schedule.num_ranks)
    return float(re.search(r"^step ([\d.]+) ms", output, re.MULTILINE)[1])


def far_hops_only(machine, plan, costs):
    """`costs` without the messages inside a node, and with recomputation as a part of the backward.

    The ranks really exchange the messages inside a node, so these need no pace.
    """

    def far(times):
        return {pair: time for pair, time in times.items() if plan.is_far(machine, *pair)}

    backward = [one + again for one, again in zip(costs.backward, costs.recompute)]
    return Costs(
        costs.forward,
        backward,
        costs.backward_weight,
        far(costs.transfer),
        0.0,
        far(costs.occupancy),
    )


def times_of(schedule, costs, factor):
    """The content of the file for paced_schedule.py; `factor` also converts to milliseconds."""
    kinds = ("forward", "backward", "backward_weight")
    times = {kind: [factor * time for time in getattr(costs, kind)] for kind in kinds}
    return {"schedule": to_csv(schedule), **times}


def perform(file, plan, machine, costs, factor):
    """Run the actions of `file` with the plan's links between nodes; return the output."""
    step = plan.tensor * (1 if plan.neighbours == "stages" else plan.replicas)
    variables = {}
    if costs.transfer:
        variables = {
            PRETENDED_VARIABLE: str(max(machine.gpus_per_node // step, 1)),
            DELAY_VARIABLE: str(factor * max(costs.transfer.values())),
            OCCUPANCY_VARIABLE: str(factor * max(costs.occupancy.values())),
        }
    return launch([*PACED, str(file)], plan.ranks, variables)


def launch(words, ranks, variables=None):
    """Start a program on `ranks` ranks of this machine with torchrun; return its output.

    `variables` are added to the environment. Raises subprocess.SubprocessError if the run fails or
    takes more than LIMIT seconds.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), *words]
    # torchrun would set the same number of threads, but also print a warning.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
    done = subprocess.run(
        command, cwd=SOURCE, env=environment, timeout=LIMIT, capture_output=True, text=True
    )
    if done.returncode:
        raise subprocess.SubprocessError(first_sentence(done.stderr))
    return done.stdout


def first_sentence(text):
    """The first line of an output that belongs neither to the launcher's log nor to a traceback."""
    of_others = ("W", "E", "[", " ", "Traceback", "*", "=")
    lines = [line for line in text.splitlines() if line and not line.startswith(of_others)]
    return lines[0] if lines else "the run failed and gave no reason"
