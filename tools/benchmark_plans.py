"""How far off plan.py's forecasts are: plans that were not fitted, performed at full speed and paced.

The machine is measured first, with all its ranks at work. Then each plan trains a few steps of a
model whose sizes were not measured. The second half is paced: 4 and 8 ranks, uneven stages, slow
links. The last part counts the CPU seconds of a search among 100,000 plans. benchmark.py prints them.
"""

import math
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "source_code"))

from planning.candidates import all_plans, search_plans  # noqa: E402
from planning.confirming import confirm  # noqa: E402
from planning.known_models import find_model, of_the_course  # noqa: E402
from planning.machine import Link, Machine, machine_from, read_machine  # noqa: E402
from planning.performed_runs import measure_machine, perform_here  # noqa: E402
from planning.training_plan import Plan  # noqa: E402
from planning.transformer import Model  # noqa: E402

LENGTH = 128
# (layers, width, heads, batch): none of the widths was measured.
MODELS = {
    "96": (8, 96, 4, 16),
    "160": (8, 160, 4, 16),
    "192": (6, 192, 6, 16),
    "224": (8, 224, 4, 16),
    "320": (6, 320, 4, 8),
}
PLANS = [  # of two ranks
    ("96", Plan("gpipe", 2, microbatch=4)),
    ("96", Plan("1f1b", 2, microbatch=2)),
    ("96", Plan("interleaved-1f1b", 2, 2, microbatch=2)),
    ("96", Plan(replicas=2, microbatch=8)),
    ("160", Plan("1f1b", 2, microbatch=2, cut=(5, 3))),
    ("160", Plan("1f1b", 2, microbatch=4, recompute="full")),
    ("160", Plan("zb-h1", 2, microbatch=2)),
    ("160", Plan("gpipe", 2, microbatch=2, recompute="full")),
    ("160", Plan(replicas=2, microbatch=2)),
    ("192", Plan("1f1b", 2, microbatch=1)),
    ("192", Plan("gpipe", 2, microbatch=8)),
    ("192", Plan("zb-h2", 2, microbatch=2)),
    ("192", Plan("1f1b", 2, microbatch=2, cut=(2, 4))),
    ("224", Plan("1f1b", 2, microbatch=2)),
    ("224", Plan("interleaved-1f1b", 2, 4, microbatch=2)),
    ("224", Plan("zb-v", 2, 2, microbatch=2)),
    ("224", Plan(replicas=2, microbatch=4, recompute="full")),
    ("224", Plan("looped-bfs", 2, 2, microbatch=4)),
    ("320", Plan("1f1b", 2, microbatch=1)),
    ("320", Plan("gpipe", 2, microbatch=2, cut=(4, 2))),
    ("320", Plan("1f1b", 2, microbatch=2, recompute="full")),
    ("320", Plan(replicas=2, microbatch=2)),
]
PACED_MODEL = Model(16, 1024, batch=16, vocabulary=64_000)
SLOW = Link(0.3e9, 10e-3, 1)
PACED = [  # (GPUs per node, plan)
    (2, Plan("1f1b", 4)),
    (2, Plan("gpipe", 4, cut=(5, 4, 4, 3))),
    (2, Plan("interleaved-1f1b", 4, 2)),
    (4, Plan("zb-h1", 4, recompute="full")),
    (4, Plan("1f1b", 8)),
    (4, Plan("gpipe", 8, recompute="full")),
    (8, Plan("interleaved-1f1b", 8, 2)),
]


class Confirmed(NamedTuple):
    """One plan: its name, seconds forecast and performed, and the interval, where one is stated."""

    name: str
    forecast: float
    seconds: float
    interval: float | None
    alike: object  # equal for the plans of one model and machine, of which one is chosen
    bytes_error: float | None = None  # of the fullest rank, where its bytes were counted

    @property
    def error(self):
        return self.forecast / self.seconds - 1

    @property
    def inside(self):
        """1 if the run took what the interval says, 0 if not, None without an interval."""
        return None if self.interval is None else int(abs(self.error) <= self.interval)


def bars(found):
    """{what: (what is wanted, value)} of the errors of Confirmed plans."""
    errors = sorted(abs(one.error) for one in found)
    chosen = [chosen.seconds / least for chosen, least in choices(found)]
    bars = {
        "median error of the step": ("6 % at most", statistics.median(errors)),
        "error that nine tenths are within": ("12 % at most", errors[nine_tenths(found) - 1]),
        "the chosen plan over the best, at most": ("5 % at most", max(chosen, default=1.0) - 1),
    }
    if found[0].interval is not None:
        half_width = statistics.median(one.interval for one in found)
        inside = statistics.mean(one.inside for one in found)
        bars["plans inside their interval"] = ("85 % at least", inside)
        bars["median half-width of the interval"] = ("10 % at most", half_width)
    counted = [abs(one.bytes_error) for one in found if one.bytes_error is not None]
    if counted:
        bars["error of the bytes of the fullest rank, at most"] = ("2 % at most", max(counted))
    return bars


def nine_tenths(found):
    """The least number of plans that is nine tenths of all."""
    return math.ceil(0.9 * len(found))


def choices(found):
    """For each model and batch with several plans: (the Confirmed that is chosen, least seconds)."""
    for alike in dict.fromkeys(one.alike for one in found):
        rivals = [one for one in found if one.alike == alike]
        if len(rivals) > 1:
            yield min(rivals, key=lambda one: one.forecast), min(one.seconds for one in rivals)


def search_large():
    """(plans compared, forecasts, CPU seconds) of six searches for the best plans of 512 GPUs."""
    compared = played = 0
    start = time.process_time()
    for batch in (2048, 4096):
        for length in (4096, 8192, 16384):
            model = find_model("llama-3-70b", length, batch)
            machine = read_machine("dgx-h100", 512)
            found = search_plans(model, machine, list(all_plans(model, machine)), 50)
            compared, played = compared + found.compared, played + len(found.best)
    return compared, played, time.process_time() - start


def full_speed(rounds=3):
    """{"the median of 3 runs": a Confirmed for each of PLANS}, and the same for the shortest runs.

    The plans take turns in each round. Other work of the machine makes a run longer, for seconds or
    minutes, and never shorter. So the median shows what a reader gets, and the shortest run is
    nearest to the forecast.
    """
    machine = machine_from(measure_machine(2, LENGTH), 2, "this machine")
    runs = [
        [perform_here(model_of(name), machine, plan) for name, plan in PLANS] for _ in range(rounds)
    ]
    return {
        f"the {which} of {rounds} runs": [
            Confirmed(
                f"width {name}, {describe(plan)}",
                several[0].forecast,
                pick(one.seconds for one in several),
                machine.error,
                name,
                max(several[0].bytes_forecast) / max(several[0].bytes_counted) - 1,
            )
            for (name, plan), several in zip(PLANS, zip(*runs))
        ]
        for which, pick in {"median": statistics.median, "shortest": min}.items()
    }


def model_of(name):
    layers, width, heads, batch = MODELS[name]
    model = of_the_course(layers, width, heads, heads // 2, 256)
    return replace(model, length=LENGTH, batch=batch)


def paced():
    """A Confirmed for each of PACED."""
    found = []
    for per_node, plan in PACED:
        machine = Machine(plan.gpus, gpus_per_node=per_node, between=SLOW)
        one = confirm(PACED_MODEL, machine, plan)
        name = f"{per_node} ranks per node, {describe(plan)}"
        # Plans are compared with each other only if they have the same GPUs on the same nodes.
        found.append(Confirmed(name, one.forecast, one.performed, None, (per_node, plan.gpus)))
    return found


def describe(plan):
    shape = f"{plan.replicas} x {plan.ranks} {plan.schedule}" if plan.ranks > 1 else "2 replicas"
    shape += f" x {plan.chunks}" if plan.chunks > 1 else ""
    shape += f", {plan.microbatch} rows"
    shape += f", cut {','.join(map(str, plan.cut))}" if plan.cut else ""
    return shape + (", recomputed" if plan.recompute == "full" else "")
