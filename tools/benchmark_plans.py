"""How far off plan.py's forecasts are: plans that were not fitted, performed at full speed and paced.

    python tools/benchmark_plans.py

The machine is measured first, with all its ranks at work. Then each plan trains a few steps of a
model whose sizes were not measured. The second half is paced: 4 and 8 ranks, uneven stages, slow
links. A part of benchmark.py; by itself it prints its own table.
"""

import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "source_code"))

from extensions.planning.confirming import confirm  # noqa: E402
from extensions.planning.known_models import of_the_course  # noqa: E402
from extensions.planning.machine import Link, Machine, machine_from  # noqa: E402
from extensions.planning.measured_runs import measure_machine, perform_here  # noqa: E402
from extensions.planning.training_plan import Plan  # noqa: E402
from extensions.planning.transformer import Model  # noqa: E402

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
    """One plan: its name, seconds forecast and performed, and the promised interval."""

    name: str
    forecast: float
    seconds: float
    interval: float

    @property
    def error(self):
        return self.forecast / self.seconds - 1


def main():
    for title, found in (("full speed", full_speed()), ("paced", paced())):
        print(f"{title}: {summary(found)}")
        for one in found:
            inside = "inside" if abs(one.error) <= one.interval else "OUTSIDE"
            print(
                f"  {one.name:44} forecast {1000 * one.forecast:7.0f} ms, performed "
                f"{1000 * one.seconds:7.0f} ms  {one.error:+6.1%}  {inside}"
            )


def full_speed(rounds=1):
    """A Confirmed for each of PLANS, the median of so many rounds of runs that take turns."""
    machine = machine_from(measure_machine(2, LENGTH), 2, "this machine")
    runs = [
        [perform_here(model_of(name), machine, plan) for name, plan in PLANS] for _ in range(rounds)
    ]
    return [
        Confirmed(
            f"width {name}, {describe(plan)}",
            several[0].forecast,
            statistics.median(one.seconds for one in several),
            machine.error,
        )
        for (name, plan), several in zip(PLANS, zip(*runs))
    ]


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
        found.append(Confirmed(name, one.forecast, one.performed, machine.error))
    return found


def describe(plan):
    shape = f"{plan.replicas} x {plan.ranks} {plan.schedule}" if plan.ranks > 1 else "2 replicas"
    shape += f" x {plan.chunks}" if plan.chunks > 1 else ""
    shape += f", {plan.microbatch} rows"
    shape += f", cut {','.join(map(str, plan.cut))}" if plan.cut else ""
    return shape + (", recomputed" if plan.recompute == "full" else "")


def summary(found):
    """Median and ninth tenth of the absolute errors, and how many the interval holds, in words."""
    errors = sorted(abs(one.error) for one in found)
    inside = sum(abs(one.error) <= one.interval for one in found)
    return (
        f"{len(found)} plans, median error {statistics.median(errors):.1%}, nine tenths within "
        f"{errors[int(0.9 * (len(errors) - 1))]:.1%}, {inside} inside the interval of "
        f"+-{found[0].interval:.0%}"
    )


if __name__ == "__main__":
    main()
