"""Fits a type of GPU's rates to published training runs, and judges them on those left out.

    .venv/bin/python tools/fit_rates.py        prints the rates, and writes left_out.json

For H100 four constants are fitted to all publications, each with the same weight: the rates of
matrix products in 16 bits and in FP8, the rate of fused attention, and the fraction of sharding
traffic that computation hides. Then they are fitted again without one publication at a time, and
the runs of this publication are forecast. For A100 one rate was fitted to two runs of Megatron-LM
2021, so all other publications are left out anyway; the runs of Megatron-LM 2021 are forecast with
the rate that fits the others. Forecasts are nearly linear in the times per operation, so the fit
solves linear equations around a starting point.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "source_code"))

from planning.expected_error import GPUS, kind_of  # noqa: E402
from planning.forecast import forecast  # noqa: E402
from planning.published import fit, published_runs  # noqa: E402

RATES = {"flops": 650e12, "attention_flops": 300e12, "fp8_flops": 1100e12}  # starting point
SLOWEST = {"flops": 400e12, "attention_flops": 100e12, "fp8_flops": 500e12}
FASTEST = {"flops": 940e12, "attention_flops": 650e12, "fp8_flops": 1900e12}
HIDDEN = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
STEP = 0.05  # relative, for derivatives
SCALE = 0.05  # errors beyond it count linearly, not by their square


def seconds(run, rates):
    return forecast(run.model, replace(run.machine, **rates), run.plan).update


def tangent(run, hidden):
    """(seconds at the starting point, their derivatives by each time per operation, relative)."""
    start = {**RATES, "hidden": hidden}
    base = seconds(run, start)
    slopes = []
    for name, rate in RATES.items():
        slower = {**start, name: rate / (1 + STEP)}
        slopes.append((seconds(run, slower) - base) / STEP)
    return [base, *slopes]


def solve(tangents, published, weights):
    """(loss, {rate}) of the times per operation that fit best, for one fraction of hidden traffic."""
    base, slopes = tangents[:, 0], tangents[:, 1:]
    change = torch.zeros(len(RATES), dtype=torch.float64)
    slowest, fastest = (
        torch.tensor([RATES[name] / limit[name] - 1 for name in RATES], dtype=torch.float64)
        for limit in (SLOWEST, FASTEST)
    )
    for _ in range(60):
        times = base + slopes @ change
        errors = torch.log(times / published)
        pulls = weights / torch.sqrt(errors**2 + SCALE**2)
        gradient = slopes / times[:, None]
        system = gradient.T @ (pulls[:, None] * gradient)
        system += 1e-6 * torch.eye(len(RATES), dtype=torch.float64)
        change -= 0.7 * torch.linalg.solve(system, gradient.T @ (pulls * errors))
        change = torch.minimum(torch.maximum(change, fastest), slowest)
    errors = torch.log((base + slopes @ change) / published)
    loss = (weights * torch.sqrt(errors**2 + SCALE**2)).sum() / weights.sum()
    return float(loss), {
        name: rate / (1 + float(own)) for (name, rate), own in zip(RATES.items(), change)
    }


def fit_rates(runs, tangents):
    """{rate} with the smallest loss; `tangents[hidden][place]` belongs to `runs[place]`."""
    members = [run.group for run in runs]
    weights = torch.tensor([1 / members.count(group) for group in members], dtype=torch.float64)
    published = torch.tensor([run.seconds for run in runs], dtype=torch.float64)
    tried = []
    for hidden in HIDDEN:
        chosen = torch.tensor([tangents[run, hidden] for run in runs], dtype=torch.float64)
        loss, rates = solve(chosen, published, weights)
        tried.append((loss, hidden, {**rates, "hidden": hidden}))
    return min(tried, key=lambda one: one[:2])[2]


def fit_h100(runs):
    """({rate} fitted to all, {group: {rate} fitted without it})."""
    tangents = {(run, hidden): tangent(run, hidden) for run in runs for hidden in HIDDEN}
    groups = dict.fromkeys(run.group for run in runs)
    rest = {group: [run for run in runs if run.group != group] for group in groups}
    return fit_rates(runs, tangents), {g: fit_rates(own, tangents) for g, own in rest.items()}


def main():
    runs = [run for run in published_runs() if not run.apart]
    of = {gpu: [run for run in runs if GPUS[run.machine.peak] == gpu] for gpu in GPUS.values()}
    whole, without = fit_h100(of["H100"])
    print("H100:", {name: f"{value:.4g}" for name, value in whole.items()})
    fitted = "Megatron-LM 2021"
    rate = fit([run for run in of["A100"] if run.group != fitted])
    rates = {"H100": without, "A100": {fitted: {"flops": rate, "attention_flops": rate}}}
    rows = []
    for gpu, members in of.items():
        for run in members:
            error = seconds(run, rates[gpu].get(run.group, {})) / run.seconds - 1
            named = {"table": run.table, "name": run.name, "error": round(error, 4)}
            rows.append({"gpu": gpu, "kind": kind_of(run.plan), "group": run.group, **named})
    lines = ",\n".join(json.dumps(row) for row in rows)
    text = f'{{"rates": {json.dumps(rates, indent=1)},\n"runs": [\n{lines}\n]}}\n'
    (ROOT / "source_code/planning/left_out.json").write_text(text)


if __name__ == "__main__":
    main()
