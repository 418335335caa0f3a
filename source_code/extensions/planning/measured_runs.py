"""Plans on the machine that one sits at: it is measured, and a plan is performed at full speed.

What is fitted and what is forecast are never the same run. The stages, links and updates are
measured by a program of their own (measuring.py). One short training adds what a step takes besides,
and no plan that is confirmed has its sizes.
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import psutil

from extensions.planning.confirming import SOURCE, first_sentence
from extensions.planning.forecast import forecast
from extensions.planning.known_models import of_the_course
from extensions.planning.machine import machine_from
from extensions.planning.plan_memory import memory_per_rank
from extensions.planning.plan_tables import flags_of
from extensions.planning.training_plan import Plan
from pipeline.inputs import parse_json, read_json, read_text

STEPS = 9  # of a performed training, of which the first two do not count
BESIDES = 64  # width of the model whose training says what a step takes besides
LIMIT = 300.0  # seconds of a run
COUNTED = re.compile(r"^rank \d+ +measured .* ([\d.]+)$", re.MULTILINE)


class Performed(NamedTuple):
    """Seconds of a step and bytes of each rank: forecast, and as they were."""

    forecast: float
    seconds: float
    bytes_forecast: list
    bytes_counted: list

    @property
    def error(self):
        return self.forecast / self.seconds - 1


def ranks_of_this_machine():
    """How many ranks can compute at the same time here: one per GPU, else one per core."""
    gpus = [name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)]
    return len(gpus) or psutil.cpu_count(logical=False) or 1


def measure_machine(ranks, length):
    """The JSON object of this machine's file, measured with so many ranks and this length.

    Raises subprocess.SubprocessError if a run fails or takes too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "measured.json"
        launch(["-m", "extensions.planning.measuring", str(length), str(file)], ranks)
        text = read_json(file)
    gigabytes = psutil.virtual_memory().total / 1e9
    text = {"memory_gigabytes": gigabytes / ranks, **text}
    text |= {
        "name": "this machine",
        "peak_teraflops": text["teraflops"],
        "memory_gigabytes_per_second": 10,
        "between": text["inside"],
        "error": max(0.05, text["error_left_out"]["nine_tenths"]),
    }
    text["measured"]["step"] = besides(machine_from(text, ranks, "this machine"), length)
    return text


def besides(machine, length):
    """Seconds of a step that no term of the fit has: batches, the loss, the log of the training."""
    model = replace(of_the_course(2 * machine.gpus, BESIDES, 2, 1, 256), length=length, batch=8)
    plan = Plan(ranks=machine.gpus, microbatch=2)
    return max(
        0.0, perform_here(model, machine, plan).seconds - forecast(model, machine, plan).update
    )


def perform_here(model, machine, plan, steps=STEPS):
    """Train a few steps with pretrain_llama.py as the plan says, and return what was Performed."""
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


def launch(words, ranks):
    """What a program prints that torchrun starts on so many ranks of this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # what torchrun sets anyway, and says
    done = subprocess.run(
        command, cwd=SOURCE, env=environment, timeout=LIMIT, capture_output=True, text=True
    )
    if done.returncode:
        raise subprocess.SubprocessError(first_sentence(done.stderr))
    return done.stdout
