"""Trainings that others have published, the forecast of each, and the one constant that is fitted.

published.json has the runs with their sources. A published rate is what a run reached from end to
end: bubble, messages and optimizer are in it. So it is turned into seconds per update, which a
forecast is compared with, and never into the rate of a machine. That rate, of the matrix products
alone, is what `fit` finds: with it the forecast of a few runs is right on average.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from extensions.planning.forecast import forecast
from extensions.planning.machine import Machine, read_machine
from extensions.planning.training_plan import Plan
from extensions.planning.transformer import Model
from pipeline.inputs import read_json


@dataclass(frozen=True)
class PublishedRun:
    """`seconds` per update, as published or from a published rate."""

    table: str
    name: str
    model: Model
    plan: Plan
    machine: Machine
    seconds: float

    @property
    def rate(self):
        """Operations per second and GPU, a second forward counted as the plan has one."""
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
            found.append(PublishedRun(one["name"], row["name"], model, plan, machine, seconds))
    return found


def seconds_of(model, plan, unit, value):
    """Seconds per update from what a table gives."""
    if unit == "seconds":
        return value
    if unit == "tokens per second and GPU":
        return model.batch * model.length / plan.gpus / value
    flops = {"teraflops, second forward counted": model.flops_per_update,
             "teraflops of the model": model.model_flops}[unit]  # fmt: skip
    return flops / plan.gpus / (value * 1e12)


def error_of(run, flops=None):
    """Forecast over published, minus one; `flops` takes the place of the machine's."""
    machine = replace(run.machine, flops=flops) if flops else run.machine
    return forecast(run.model, machine, run.plan).update / run.seconds - 1


def fit(runs):
    """The rate of matrix products with which the errors of `runs` cancel.

    Found by secants over the time per operation, in which a forecast is nearly a straight line.
    """

    def excess(time):
        return sum(math.log1p(error_of(run, 1 / time)) for run in runs)

    one, other = (scale / runs[0].machine.flops for scale in (1.0, 1.1))
    at_one = excess(one)
    for _ in range(20):
        at_other = excess(other)
        if abs(at_other) < 1e-5 or at_other == at_one:
            break
        one, at_one, other = other, at_other, other - at_other * (other - one) / (at_other - at_one)
    return 1 / other


def constant_error_of(run, runs):
    """The same error if one end-to-end rate, the mean of `runs`, were all there is to know."""
    rate = math.exp(sum(math.log(one.rate) for one in runs) / len(runs))
    return run.rate / rate - 1
