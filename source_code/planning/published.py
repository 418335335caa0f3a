# SPDX-License-Identifier: Apache-2.0
"""Published training runs, their forecasts, and the one constant that is fitted to some of them.

published.json has the runs with their sources. After a new run, tools/fit_rates.py writes
left_out.json anew, and the tests name the rows and counts of pages that have to follow. A published
rate is what a run reached from end to end: it includes bubble, messages and optimizer. It is
therefore converted to seconds per update, which are compared with a forecast, and never to the rate
of a machine. That rate is of the matrix products alone. `fit` finds the rate at which the errors of
a few runs cancel.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from files.inputs import read_json
from planning.forecast import forecast
from planning.machine import Machine, read_machine
from planning.training_plan import Plan
from planning.transformer import Model

# An update of a program on DeepSpeed took this many times as long as its forecast.
# tools/fit_rates.py fits it to the five publications with such a program, with the same weight
# each.
DEEPSPEED = 1.17


@dataclass(frozen=True)
class PublishedRun:
    """A published training run. `seconds` per update are as published or from a published rate.

    `group` is the publication. `memory` is the published peak in bytes, or 0. `apart` says why the
    run is not counted among the errors to expect, or is "". The constants of a machine were not
    fitted to runs that are not `fitted`. `on_deepspeed` says what the program was built on.
    """

    table: str
    name: str
    group: str
    model: Model
    plan: Plan
    machine: Machine
    seconds: float
    memory: float = 0.0
    apart: str = ""
    fitted: bool = True
    on_deepspeed: bool = False

    def forecast(self, deepspeed=None, **rates):
        """Seconds per update by the forecast, where `rates` replace those of the machine."""
        update = forecast(self.model, replace(self.machine, **rates), self.plan).update
        return update * (deepspeed or DEEPSPEED) if self.on_deepspeed else update

    @property
    def rate(self):
        """Operations per second and GPU; a second forward counts if the plan has one."""
        recomputed = self.plan.recompute == "full"
        flops = self.model.flops_per_update if recomputed else self.model.model_flops
        return flops / self.plan.gpus / self.seconds


def published_runs(table=None):
    """All PublishedRun of published.json, or those of one table, in its order."""
    text = read_json(Path(__file__).parent / "published.json")
    found = []
    for one in text["tables"]:
        for row in one["rows"] if table in (None, one["name"]) else []:
            model = Model(**{**one["model"], **row.get("model", {})})
            settings = {**one["plan"], **row.get("plan", {})}
            plan = Plan(**{**settings, "cut": tuple(settings.get("cut", ()))})
            machine = read_machine(one["machine"], plan.gpus)
            seconds = seconds_of(model, plan, one["measured"], row["measured"])
            found.append(
                PublishedRun(
                    one["name"],
                    row["name"],
                    one["group"],
                    model,
                    plan,
                    machine,
                    seconds,
                    1e9 * row.get("gigabytes", 0),
                    row.get("apart", one.get("apart", "")),
                    one.get("fitted", True),
                    one.get("on_deepspeed", False),
                )
            )
    return found


def seconds_of(model, plan, unit, value):
    """Seconds per update from a table's value in the table's unit."""
    if unit == "seconds":
        return value
    if unit == "tokens per second and GPU":
        return model.batch * model.length / plan.gpus / value
    if unit == "samples per second and GPU":
        return model.batch / plan.gpus / value
    flops = {"teraflops, second forward counted": model.flops_per_update,
             "teraflops of the model": model.model_flops}[unit]  # fmt: skip
    return flops / plan.gpus / (value * 1e12)


def error_of(run, flops=None):
    """Relative error of the forecast of a run's seconds; `flops` replaces the machine's rate."""
    return run.forecast(**({"flops": flops} if flops else {})) / run.seconds - 1


def fit(runs):
    """The rate of matrix products at which the errors of `runs` cancel.

    It is found by the secant method over the time per operation, in which a forecast is nearly
    linear.
    """

    def excess(time):
        return sum(math.log1p(error_of(run, 1 / time)) for run in runs)

    one = 1 / runs[0].machine.flops
    at_one = excess(one)
    other = one * math.exp(-at_one / len(runs))  # as if all of the time were matrix products
    for _ in range(20):
        at_other = excess(other)
        if abs(at_other) < 1e-5 or at_other == at_one:
            break
        one, at_one, other = other, at_other, other - at_other * (other - one) / (at_other - at_one)
    return 1 / other


def constant_error_of(run, runs):
    """Relative error of a forecast with one end-to-end rate, the geometric mean of `runs`."""
    rate = math.exp(sum(math.log(one.rate) for one in runs) / len(runs))
    return run.rate / rate - 1
