"""Fits a type of GPU's rates to published training runs, and judges them on those left out.

    .venv/bin/python tools/fit_rates.py        prints the rates, and writes left_out.json

For H100 five constants are fitted to six publications, each with the same weight: the rates of
matrix products in 16 bits and in FP8, the two rates of fused attention, and the fraction of
sharding traffic that computation hides. Then they are fitted again without one publication at a
time, and the runs of this publication are forecast. For A100 the rate of matrix products was fitted
to two runs of Megatron-LM 2021, whose runs are forecast with the rate that fits the others. The
rate of fused attention and the hidden fraction are fitted to the publications with fused attention.
Publications that published.json calls not fitted were entered later. They are in no fit, and are
forecast with the constants of their machines. Five publications have a program on DeepSpeed. How
many times as long its updates take is fitted to them, and for each of them to the other four.
Forecasts are nearly linear in the times per operation, so the fit solves linear equations around a
starting point.
"""

import json
import math
import statistics
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "source_code"))

from files.outputs import write_whole  # noqa: E402
from guard.one_sentence import in_one_sentence, naming_files  # noqa: E402
from pipeline.command_line import Parser  # noqa: E402
from planning.expected_error import GPUS, kind_of  # noqa: E402
from planning.published import fit, published_runs  # noqa: E402

RATES = {  # of a type of GPU: (starting point, slowest, fastest)
    "H100": {
        "flops": (650e12, 400e12, 940e12),
        "attention_flops": (500e12, 100e12, 800e12),
        "flash_2_flops": (200e12, 100e12, 400e12),
        "fp8_flops": (1100e12, 500e12, 1900e12),
    },
    "A100": {"attention_flops": (150e12, 50e12, 300e12)},
}
HIDDEN = [step / 10 for step in range(11)]
STEP = 0.05  # relative, for derivatives
SCALE = 0.05  # errors beyond it count linearly, not by their square


def tangent(run, limits, hidden):
    """(seconds at the starting point, their derivatives by each time per operation, relative)."""
    start = {**{name: rate for name, (rate, _, _) in limits.items()}, "hidden": hidden}
    base = run.forecast(**start)
    slopes = []
    for name in limits:
        slower = {**start, name: start[name] / (1 + STEP)}
        slopes.append((run.forecast(**slower) - base) / STEP)
    return [base, *slopes]


def solve(tangents, published, weights, limits):
    """(loss, {rate}) of the times per operation that fit best, for one fraction of hidden traffic."""
    base, slopes = tangents[:, 0], tangents[:, 1:]
    change = torch.zeros(len(limits), dtype=torch.float64)
    slowest, fastest = (
        torch.tensor([one[0] / one[end] - 1 for one in limits.values()], dtype=torch.float64)
        for end in (1, 2)
    )
    for _ in range(60):
        times = base + slopes @ change
        errors = torch.log(times / published)
        pulls = weights / torch.sqrt(errors**2 + SCALE**2)
        gradient = slopes / times[:, None]
        system = gradient.T @ (pulls[:, None] * gradient)
        system += 1e-6 * torch.eye(len(limits), dtype=torch.float64)
        change -= 0.7 * torch.linalg.solve(system, gradient.T @ (pulls * errors))
        change = torch.minimum(torch.maximum(change, fastest), slowest)
    errors = torch.log((base + slopes @ change) / published)
    loss = (weights * torch.sqrt(errors**2 + SCALE**2)).sum() / weights.sum()
    return float(loss), {
        name: one[0] / (1 + float(own)) for (name, one), own in zip(limits.items(), change)
    }


def fit_rates(runs, tangents, limits):
    """{rate} with the smallest loss; `tangents[hidden][place]` belongs to `runs[place]`."""
    members = [run.group for run in runs]
    weights = torch.tensor([1 / members.count(group) for group in members], dtype=torch.float64)
    published = torch.tensor([run.seconds for run in runs], dtype=torch.float64)
    tried = []
    for hidden in HIDDEN:
        chosen = torch.tensor([tangents[run, hidden] for run in runs], dtype=torch.float64)
        loss, rates = solve(chosen, published, weights, limits)
        tried.append((loss, hidden, {**rates, "hidden": hidden}))
    return min(tried, key=lambda one: one[:2])[2]


def fit_each(runs, limits):
    """({rate} fitted to all, {group: {rate} fitted without it})."""
    tangents = {(run, hidden): tangent(run, limits, hidden) for run in runs for hidden in HIDDEN}
    groups = dict.fromkeys(run.group for run in runs)
    rest = {group: [run for run in runs if run.group != group] for group in groups}
    without = {group: fit_rates(own, tangents, limits) for group, own in rest.items()}
    return fit_rates(runs, tangents, limits), without


def fit_deepspeed(runs):
    """How many times the forecasts of `runs` their updates took; each publication weighs the same."""
    groups = dict.fromkeys(run.group for run in runs)
    logs = [
        statistics.mean(
            math.log(run.seconds / run.forecast(deepspeed=1)) for run in runs if run.group == group
        )
        for group in groups
    ]
    return math.exp(statistics.mean(logs))


@in_one_sentence()
def main():
    Parser(__doc__).parse_args()
    runs = [run for run in published_runs() if not run.apart]
    of = {gpu: [run for run in runs if GPUS[run.machine.peak] == gpu] for gpu in GPUS.values()}
    first = {gpu: [run for run in members if run.fitted] for gpu, members in of.items()}
    fused = [run for run in first["A100"] if run.plan.fused_attention]
    rates = {}
    for gpu, members in (("H100", first["H100"]), ("A100", fused)):
        whole, rates[gpu] = fit_each(members, RATES[gpu])
        print(f"{gpu}:", {name: f"{value:.4g}" for name, value in whole.items()})
    fitted = "Megatron-LM 2021"
    rates["A100"][fitted] = {"flops": fit([run for run in first["A100"] if run.group != fitted])}
    slower = [run for run in runs if run.on_deepspeed]
    print(f"DeepSpeed: {fit_deepspeed(slower):.4g}")
    for group in dict.fromkeys(run.group for run in slower):
        others = [run for run in slower if run.group != group]
        rates["A100"].setdefault(group, {})["deepspeed"] = fit_deepspeed(others)
    rows = []
    for gpu, members in of.items():
        for run in members:
            error = run.forecast(**rates[gpu].get(run.group, {})) / run.seconds - 1
            named = {"table": run.table, "name": run.name, "error": round(error, 4)}
            rows.append({"gpu": gpu, "kind": kind_of(run.plan), "group": run.group, **named})
    lines = ",\n".join(json.dumps(row) for row in rows)
    text = f'{{"rates": {json.dumps(rates, indent=1)},\n"runs": [\n{lines}\n]}}\n'
    file = ROOT / "source_code/planning/left_out.json"
    with naming_files(file):
        write_whole(file, text)


if __name__ == "__main__":
    main()
