# SPDX-License-Identifier: Apache-2.0
"""The error to expect of a forecast: how wrong it was for plans of this kind that others carried out.

left_out.json has, for each published training run, the error of a forecast whose constants were
fitted without the run's publication (tools/fit_rates.py). The interval of a kind of plan on a type
of GPU leaves out the extreme OUTSIDE of these errors, half of it at each end; each publication has
the same weight, however many runs it has. The interval is asymmetric, because the errors are. A few
publications can agree by chance, so no interval is narrower than NARROWEST.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from files.inputs import read_json

OUTSIDE = 0.1  # fraction of the errors, by weight, outside the interval
NARROWEST = (-0.12, 0.12)  # most kinds of plans on a type of GPU have at most five publications
LEAST_ROWS, LEAST_GROUPS = 5, 2  # with fewer, the interval is wide
UNTESTED = (-0.3, 0.3)  # at least this wide without evidence
GPUS = {312e12: "A100", 989e12: "H100"}  # by the peak of the data sheet


@dataclass(frozen=True)
class ExpectedError:
    """Relative errors, forecast over real seconds minus 1, from `least` to `most`.

    `rows` runs by `groups` publications were compared; 0 if nothing of this kind was.
    """

    least: float
    most: float
    rows: int
    groups: int

    def seconds(self, forecast):
        """(least, most) real seconds for `forecast` seconds."""
        return forecast / (1 + self.most), forecast / (1 + self.least)

    @property
    def text(self):
        """How much shorter and longer than its forecast an update may take, such as "-8% to +12%"."""
        least, most = self.seconds(1.0)
        return f"{least - 1:+.0%} to {most - 1:+.0%}"


def kind_of(plan):
    """The kind of a plan, by what its time depends on."""
    if plan.sharding in ("hybrid", "full"):
        return "sharded"
    if plan.ranks > 1:
        return "pipelined"
    return "tensor parallel" if plan.tensor > 1 else "data parallel"


def expected_error(machine, plan):
    """The ExpectedError of a plan's forecast on a machine."""
    if machine.measured:
        return ExpectedError(-machine.error, machine.error, 0, 0)
    return stated_interval(GPUS.get(machine.peak, "other"), kind_of(plan))


@lru_cache
def stated_interval(gpu, kind, without=""):
    """The ExpectedError of a kind on a GPU; without the runs of the publication `without`."""
    known = [one for one in left_out_errors() if one["group"] != without]
    runs = [one for one in known if one["kind"] == kind]
    here = [one for one in runs if one["gpu"] == gpu]
    if enough(here):
        groups = {one["group"] for one in here}
        return ExpectedError(*at_least(NARROWEST, interval(here)), len(here), len(groups))
    return ExpectedError(*at_least(UNTESTED, interval(runs or known)), 0, 0)


def at_least(narrowest, found):
    """The interval `found`, (least, most), widened to `narrowest` where it is narrower."""
    return min(found[0], narrowest[0]), max(found[1], narrowest[1])


def enough(runs):
    """Whether so many runs by so many publications are evidence for an interval."""
    return len(runs) >= LEAST_ROWS and len({one["group"] for one in runs}) >= LEAST_GROUPS


def mean_error(machine, kind):
    """The signed mean error of forecasts of a kind on this GPU, or None without evidence."""
    gpu = GPUS.get(machine.peak, "other")
    if not stated_interval(gpu, kind).rows:
        return None
    return weighted_mean(runs_of(gpu, kind))


def runs_of(gpu, kind):
    """The runs of a kind of plan on a type of GPU, as in `left_out_errors`."""
    return [one for one in left_out_errors() if (one["gpu"], one["kind"]) == (gpu, kind)]


def weighted_mean(runs):
    """The mean error of `runs`; each publication has the same weight."""
    members = [one["group"] for one in runs]
    return sum(one["error"] / members.count(one["group"]) for one in runs) / len(set(members))


def size_within(runs, fraction):
    """The size of the error that this fraction of `runs`, by weight, does not exceed."""
    sizes = [{**one, "error": abs(one["error"])} for one in runs]
    return _beyond(_ordered(sizes), fraction * len({one["group"] for one in runs}))


def interval(runs):
    """(least, most) error of `runs` without the extremes; each publication has the same weight."""
    ordered = _ordered(runs)
    cut = OUTSIDE / 2 * len({one["group"] for one in runs})
    return _beyond(ordered, cut), _beyond(ordered[::-1], cut)


def _ordered(runs):
    """[(error, weight)] of `runs`, the least error first; each publication has a weight of 1."""
    members = [one["group"] for one in runs]
    return sorted((one["error"], 1 / members.count(one["group"])) for one in runs)


def _beyond(ordered, weight):
    """The first error at which the weights of `ordered` exceed `weight`."""
    for error, own in ordered:
        weight -= own
        if weight < -1e-9:  # a sum of rounded shares
            return error
    return ordered[-1][0]


@lru_cache
def left_out_errors():
    """[{"gpu", "kind", "group", "table", "name", "error"}] of all published runs that count."""
    return read_json(Path(__file__).parent / "left_out.json")["runs"]
