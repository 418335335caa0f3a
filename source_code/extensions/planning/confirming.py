"""Performs plans on this machine, as far as it can, beside what was forecast for them.

What is performed is the pipeline of one replica: its ranks, its order of actions, its uneven stages
and its links between nodes, on a small model whose actions last as long as the forecast says, times
a factor that makes a step take about three seconds. So the performed step tells whether the schedule
behaves as forecast. It does not tell whether the times of the stages are right: only a published
or an own run on the machine can.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from extensions.planning.forecast import known_schedule, stage_costs
from extensions.planning.training_plan import Plan
from lab.simulator import Costs, simulate
from lab.variables import DELAY_VARIABLE, OCCUPANCY_VARIABLE, PRETENDED_VARIABLE
from pipeline.schedule import to_csv

SOURCE = Path(__file__).resolve().parents[2]
STEP = 3000.0  # milliseconds that a performed step should take
LEAST = 4.0  # milliseconds of the shortest action: below, Python's own work shows
MOST_RANKS = 8


@dataclass(frozen=True)
class Confirmed:
    """Seconds of the pipeline's part of an update: forecast, and performed over `factor`."""

    plan: Plan
    factor: float
    forecast: float
    performed: float

    @property
    def error(self):
        return self.forecast / self.performed - 1


def can_be_performed(plan):
    return 2 <= plan.ranks <= MOST_RANKS


def bad_plan(model, plan):
    """A plan like this one that is forecast to be bad: few large micro-batches, cut evenly."""
    share = model.batch // plan.replicas
    largest = next(size for size in range(max(share // 2, 1), 0, -1) if share % size == 0)
    return replace(plan, schedule="gpipe", chunks=1, cut=(), microbatch=largest)


def confirm(model, machine, plan, limit=120.0):
    """Perform one plan. Raises subprocess.SubprocessError if the run fails or takes too long."""
    # Very many micro-batches repeat the same steady phase: a few rounds of it are performed.
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
        output = perform(file, plan, machine, costs, 1000 * factor, limit)
    performed = float(re.search(r"^step ([\d.]+) ms", output, re.MULTILINE)[1])
    return Confirmed(plan, factor, forecast, performed / 1000 / factor)


def perform_schedule(schedule, costs, limit=120.0):
    """Milliseconds of a step of `schedule` with real ranks, whose actions last as `costs` say.

    `costs` in milliseconds, a list per kind and no messages. Raises subprocess.SubprocessError.
    """
    halves = [time / 2 for time in costs.backward]
    costs = replace(costs, backward_weight=costs.backward_weight or halves)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "times.json"
        file.write_text(json.dumps(times_of(schedule, costs, 1.0)))
        output = launch(file, schedule.num_ranks, dict(os.environ), limit)
    return float(re.search(r"^step ([\d.]+) ms", output, re.MULTILINE)[1])


def far_hops_only(machine, plan, costs):
    """`costs` without the links inside a node, which this machine plays by itself, and with the
    second forward as a part of the backward."""

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
    """The content of the file that paced_schedule.py reads; `factor` includes milliseconds."""
    kinds = ("forward", "backward", "backward_weight")
    times = {kind: [factor * time for time in getattr(costs, kind)] for kind in kinds}
    return {"schedule": to_csv(schedule), **times}


def perform(file, plan, machine, costs, factor, limit):
    """What the run prints."""
    step = plan.tensor * (1 if plan.neighbours == "stages" else plan.replicas)
    environment = dict(os.environ)
    if costs.transfer:
        environment |= {
            PRETENDED_VARIABLE: str(max(machine.gpus_per_node // step, 1)),
            DELAY_VARIABLE: str(factor * max(costs.transfer.values())),
            OCCUPANCY_VARIABLE: str(factor * max(costs.occupancy.values())),
        }
    return launch(file, plan.ranks, environment, limit)


def launch(file, ranks, environment, limit):
    """What the run prints that performs a file of times."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "lab.paced_schedule", str(file)]
    done = subprocess.run(
        command, cwd=SOURCE, env=environment, timeout=limit, capture_output=True, text=True
    )
    if done.returncode:
        raise subprocess.SubprocessError(first_sentence(done.stderr))
    return done.stdout


def first_sentence(text):
    """The first line of an output that is neither the launcher's log nor a traceback's."""
    of_others = ("W", "E", "[", " ", "Traceback", "*", "=")
    lines = [line for line in text.splitlines() if line and not line.startswith(of_others)]
    return lines[0] if lines else "the run failed and gave no reason"
