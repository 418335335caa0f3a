# SPDX-License-Identifier: Apache-2.0
"""Measures this machine, and runs plans on it at full speed.

No run is both fitted and forecast. A separate program, machine_timing.py, measures stages, links and
updates. Three short training runs measure the remaining time of a step and of a message, with sizes
that no confirmed plan has.
"""

import os
import re
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import psutil

from files.inputs import parse_json, read_json, read_text
from planning.confirming import launch
from planning.forecast import forecast
from planning.known_models import of_the_course
from planning.machine import machine_from
from planning.plan_commands import flags_of
from planning.plan_memory import memory_per_rank
from planning.training_plan import Plan

STEPS = 9  # steps of a training run; the first two are not counted
STEPS_BESIDES = 30  # steps of each short training run in `besides`; the first two are not counted
BESIDES = 64  # width of the model that measures the remaining time of a step and a message
LEAST_ERROR = 0.1  # of a step: most runs of tools/benchmark_plans.py are within it
MANY = "interleaved-1f1b"  # sends many messages
COUNTED = re.compile(r"^rank \d+ +measured .* ([\d.]+)$", re.MULTILINE)


class Performed(NamedTuple):
    """Seconds of a step and bytes of each rank, forecast and measured."""

    forecast: float
    seconds: float
    bytes_forecast: list
    bytes_counted: list

    @property
    def error(self):
        return self.forecast / self.seconds - 1


def ranks_of_this_machine():
    """How many ranks can compute at the same time here: one per GPU, or one per core."""
    gpus = [name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)]
    return len(gpus) or psutil.cpu_count(logical=False) or 1


def measure_machine(ranks, length):
    """The JSON object of this machine's file, measured with these ranks and length.

    Raises subprocess.SubprocessError if a run fails or takes too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "measured.json"
        launch(["-m", "planning.machine_timing", str(length), str(file)], ranks)
        text = read_json(file)
    gigabytes = psutil.virtual_memory().total / 1e9
    text = {"memory_gigabytes": gigabytes / ranks, **text}
    text |= {
        "name": "this machine",
        "peak_teraflops": text["teraflops"],
        "memory_gigabytes_per_second": 10,
        "between": text["inside"],
        "error": max(LEAST_ERROR, text["error_left_out"]["nine_tenths"]),
    }
    step, message = besides(machine_from(text, ranks, "this machine"), length)
    text["measured"] |= {"step": step, "message": message}
    return text


def besides(machine, length):
    """(seconds of a step, seconds of each end of a message) that no term of the fit has.

    A step also makes batches and writes its log: the first run, of replicas, sends no message. A
    message keeps threads of both ranks busy while the ranks compute: the second run has few
    messages, and the third has many.
    """
    batch = 16 * machine.gpus  # divisible by everything that the three plans divide it by
    model = replace(of_the_course(2 * machine.gpus, BESIDES, 2, 1, 256), length=length, batch=batch)
    step, _ = excess(model, machine, Plan(replicas=machine.gpus, microbatch=4))
    if machine.gpus == 1:
        return max(step, 0.0), 0.0
    pipeline = Plan(ranks=machine.gpus, microbatch=2)
    few, ends = excess(model, machine, pipeline)
    many, more_ends = excess(model, machine, replace(pipeline, schedule=MANY, chunks=2))
    return max(step, 0.0), max((many - few) / (more_ends - ends), 0.0)


def excess(model, machine, plan):
    """(seconds of a step beyond its forecast, ends of messages on its longest path)."""
    small = 1e-6
    measured = replace(machine.measured, message=small)
    expected = forecast(model, machine, plan).update
    longer = forecast(model, replace(machine, measured=measured), plan).update
    seconds = perform_here(model, machine, plan, STEPS_BESIDES).seconds
    return seconds - expected, (longer - expected) / small


def perform_here(model, machine, plan, steps=STEPS):
    """Train `steps` steps of a plan with pretrain_llama.py; return a Performed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "metrics.jsonl"
        flags = [*flags_of(model, machine, plan), "--steps", str(steps), "--metrics", str(file)]
        output = launch(["pretrain_llama.py", *flags, "--evaluate-windows", "1"], plan.gpus)
        rows = [parse_json(line, file) for line in read_text(file).splitlines()]
    seconds = [row["seconds"] for row in rows if "seconds" in row][2:]
    counted = [float(total) * 2**20 for total in COUNTED.findall(output)]
    needed = memory_per_rank(model, machine, plan) * plan.replicas
    found = forecast(model, machine, plan).update
    return Performed(found, statistics.median(seconds), needed, counted)
