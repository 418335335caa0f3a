# SPDX-License-Identifier: Apache-2.0
"""What plan.py prints: tables of plans, the error to expect, the reasons of a plan."""

from planning.expected_error import (
    GPUS,
    enough,
    expected_error,
    kind_of,
    left_out_errors,
    mean_error,
    runs_of,
    size_within,
    stated_interval,
    weighted_mean,
)
from planning.forecast import stage_costs
from planning.narrow import WIDTH, columns, how_many, lines_of
from planning.plan_memory import TIGHT
from planning.published import DEEPSPEED, error_of, published_runs
from planning.reasons import changes, limit_in_words, parts_of, rank_work

BIASED = 0.06  # difference of mean errors above which two kinds of plans do not rank fairly
KEPT = ("", "layout", "seconds", "GB")  # columns of every table
FIGURES = ("", "size", "seconds", "tokens/s", "MFU", "GB", "idle")
UNSAID = ("tokens/s", "idle", "MFU")  # figures that are not said outside their column
LEAVING = (*UNSAID, "size", "recompute", "sharding")  # columns in the order in which they go
SAID_BELOW = ("to expect", "limit", "remark")  # the row, unless all rows agree
NO_FIGURE = "-"


def table_lines(model, machine, found, first=1, wide=False):
    """A table with a row per Forecast, numbered from `first`; below each, its range and its limit.

    If all rows agree in a column, its value is said once, above the table. A column that does not
    fit into WIDTH is left out; if it is a setting of the plan, it is said below the row. With
    `wide` everything is in columns.
    """
    rows = [
        {"": str(number), **cells_of(model, machine, one)}
        for number, one in enumerate(found, first)
    ]
    names = list(rows[0])
    if wide:
        return columns(rows, names, FIGURES)
    alike = [name for name in names if name not in KEPT and len({row[name] for row in rows}) == 1]
    alike = alike if len(rows) > 1 else []
    shown = [name for name in names if name not in alike and name not in SAID_BELOW]
    for name in LEAVING:
        if name in shown and len(max(columns(rows, shown, FIGURES), key=len)) > WIDTH:
            shown.remove(name)
    heading, *lines = columns(rows, shown, FIGURES)
    below = [name for name in names if name not in [*alike, *shown]]
    said = [said_of(name, text) for name in alike if (text := rows[0][name]) not in ("", NO_FIGURE)]
    table = lines_of(f"All of these: {'; '.join(said)}.") if said else []
    table.append(heading)
    for line, row in zip(lines, rows):
        more = [said_of(name, row[name]) for name in below if name not in UNSAID and row[name]]
        table += [line, *(lines_of(f"    {'; '.join(more)}", "    ") if more else [])]
    return table


def cells_of(model, machine, one):
    """{column: text} of a Forecast."""
    plan = one.plan
    schedule = plan.schedule + (f" x {plan.chunks}" if plan.chunks > 1 else "")
    mfu = f"{one.utilisation(model, machine):.1%}" if model.model_flops else NO_FIGURE
    least, most = range_of(machine, one)
    return {
        "layout": layout_of(plan),
        "schedule": schedule if plan.ranks > 1 else NO_FIGURE,
        "size": str(plan.microbatch),
        "recompute": plan.recompute,
        "sharding": plan.sharding,
        "seconds": f"{one.update:.3g}",
        "tokens/s": f"{one.tokens_per_second(model):,.0f}",
        "MFU": mfu,
        "GB": f"{one.memory / 1e9:.1f}",
        "idle": f"{one.idle:.1%}",
        "to expect": "" if machine.measured else f"{least:.3g} to {most:.3g} s",
        "limit": limit_in_words(model, machine, one),
        "remark": remark(plan, tight=one.memory > TIGHT * machine.memory),
    }


def layout_of(plan):
    """Replicas x ranks of a pipeline x tensor group."""
    return f"{plan.replicas} x {plan.ranks} x {plan.tensor}"


def said_of(name, text):
    """A cell outside the table, in words."""
    said = {"limit": f"limited by {text}", "to expect": f"expect {text}", "remark": text}
    return {**said, "tokens/s": f"{text} tokens/s"}.get(name, f"{name} {text}")


def remark(plan, tight=False):
    """Return what no column shows; two plans may differ in nothing else. "" for most plans."""
    remarks = {
        "memory is tight": tight,
        "even cut": not plan.cut and plan.ranks > 1,
        "a node has replicas of one stage": plan.neighbours == "replicas",
    }
    return ", ".join(text for text, holds in remarks.items() if holds)


def range_of(machine, found):
    """(least, most) seconds of an update, by the errors of forecasts for plans of this kind."""
    return expected_error(machine, found.plan).seconds(found.update)


def error_lines(machine, found):
    """Sentences about the error of the seconds in tables, one per kind of plan."""
    if machine.measured:
        return lines_of(
            f"All seconds +-{machine.error:.0%}: the error to expect of a forecast for this "
            "machine."
        )
    lines = lines_of(
        "The error to expect: how much an update differed from its forecast in nine of ten "
        "published runs of this kind, with constants fitted without them:"
    )
    if machine.peak not in GPUS:
        lines = ["No run on this GPU was ever compared with its forecast. The error to expect:"]
    kinds = {kind_of(one.plan): expected_error(machine, one.plan) for one in found}
    for kind, error in sorted(kinds.items()):
        evidence = "few or no such runs on this GPU"
        if error.rows:
            evidence = f"{error.rows} runs by {error.groups} publications"
        lines.append(f"  {kind:15}  {error.text:14}  {evidence}")
    means = {kind: mean_error(machine, kind) for kind, error in sorted(kinds.items()) if error.rows}
    if means and max(means.values()) - min(means.values()) > BIASED:
        said = ", ".join(f"{kind} {mean:+.0%}" for kind, mean in means.items())
        lines += lines_of(
            f"Mean errors of forecasts: {said}; the ranking of these kinds is biased by that."
        )
    if len(kinds) > 1 and not all(error.rows for error in kinds.values()):
        lines.append("How these kinds rank against each other on this GPU was never tested.")
    for text in short_words(machine, min(one.update for one in found)):
        lines += lines_of(text)
    return lines


def short_words(machine, seconds):
    """A list with a sentence about an update that is shorter than every published one, or none."""
    shortest = min(run.seconds for run in published_runs())
    if machine.measured or seconds >= shortest:
        return []
    return [
        f"No update of a published run took less than {shortest:.1g} s. The time of starting "
        "kernels is not in the forecast; in short updates it can be most of the time."
    ]


def nodes_of(machine):
    """The nodes of a machine and the cards between them, in words; "" if it was measured."""
    if machine.measured:
        return ""
    cards, speed = machine.between.number, machine.between.bandwidth / 1e9
    between = f" and {cards} x {speed:g} GB/s between nodes"
    crossed = machine.gpus > machine.gpus_per_node
    return f" with {machine.gpus_per_node} per node{between * crossed}"


def close_lines(machine, ours, others):
    """Lines with the plans that may be as fast as the fastest of all, and of `ours`.

    Only `ours` can be started.
    """
    close, said = not_told_apart(machine, [*ours, *others]), []
    for numbers in (close, not_told_apart(machine, ours)):
        if len(numbers) < 2 or (said and set(numbers) <= set(close)):
            continue
        in_a_row = len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1))
        plans = f"{numbers[0]} to {numbers[-1]}" if in_a_row else ", ".join(map(str, numbers))
        whole = f"Plans {plans} cannot be told apart by a forecast."
        said += lines_of(f"Nor can plans {plans}." if said else whole)
    return said


def not_told_apart(machine, found):
    """The numbers, from 1 in the order of the table, of plans that may be as fast as the fastest."""
    if not found:
        return []
    _, slowest = range_of(machine, min(found, key=lambda one: one.update))
    fastest = [range_of(machine, one)[0] for one in found]
    return [number for number, seconds in enumerate(fastest, 1) if seconds <= slowest]


def reason_lines(model, machine, found):
    """Lines with the parts of a plan's time, its ranks' work, and the effect of each change."""
    plan = found.plan
    lines = [f"  {'seconds':>10}  of an update of {found.update:.4g}"]
    for what, seconds in parts_of(model, machine, found).items():
        seconds = seconds if abs(seconds) > 1e-9 * found.update else 0.0  # less is rounding
        lines.append(f"  {seconds:10.4g}  {what} ({seconds / found.update:.1%})")
    if plan.ranks > 1:
        layers = plan.layers_of(model)
        work = rank_work(model, plan, stage_costs(model, machine, plan))
        heaviest = work.index(max(work))
        own = how_many(sum(layers[stage] for stage in plan.stages_of(heaviest)), "layer")
        head = " and the head" if plan.stages - 1 in plan.stages_of(heaviest) else ""
        lines += lines_of(f"  layers of the stages: {', '.join(map(str, layers))}", "  ")
        lines.append(f"  the heaviest rank is {heaviest}, with {own}{head}")
    lines.append("  one step away:")
    for what, other, needed in changes(model, machine, plan):
        fits = "" if needed <= machine.memory else "  does not fit"
        change = other.update / found.update - 1
        lines.append(f"  {change:+10.1%}  {needed / 1e9:6.1f} GB  {what}{fits}")
    return lines


def performed_lines(plan, performed, error):
    """Two lines for a Performed; `error` is the relative error that the forecast allows for."""
    schedule = plan.schedule + (f" x {plan.chunks}" if plan.chunks > 1 else "")
    inside = "inside" if abs(performed.error) <= error else "OUTSIDE"
    most = max(performed.bytes_forecast) / max(performed.bytes_counted) - 1
    return [
        f"{layout_of(plan):14}  {schedule:20}  {performed.forecast:8.3g} s"
        f"  {performed.seconds:8.3g} s  {performed.error:+10.1%}",
        f"    {inside} +-{error:.0%}; bytes {most:+.1%}",
    ]


def published_lines():
    """Each published training run: seconds per update, and the relative errors of its forecasts.

    The second error is that of constants fitted without its publication.
    """
    left_out = {(one["table"], one["name"]): one["error"] for one in left_out_errors()}
    lines, table = [f"{'training':50} seconds forecast    left out"], None
    for run in published_runs():
        if run.table != table:
            lines.append(run.table)
        table = run.table
        without = left_out.get((run.table, run.name))
        without = "not counted" if without is None else f"{without:+.1%}"
        lines.append(f" {run.name:49} {run.seconds:7.2f} {error_of(run):+8.1%} {without:>11}")
    deepspeed = f"Forecasts of programs on DeepSpeed are {DEEPSPEED} times those of their plans."
    return [*lines, "", deepspeed, "", *error_table()]


def error_table():
    """The errors that are left out of the fit, by type of GPU and kind of plan.

    Each publication has the same weight. "took" is the stated interval of the time of an update,
    compared with its forecast.
    """
    rows = []
    for gpu, kind in dict.fromkeys((one["gpu"], one["kind"]) for one in left_out_errors()):
        runs = runs_of(gpu, kind)
        rows.append(
            {
                "GPU": gpu,
                "kind of plan": kind,
                "runs": str(len(runs)),
                "by": str(len({one["group"] for one in runs})),
                "median": f"{size_within(runs, 0.5):.1%}",
                "9 of 10": f"{size_within(runs, 0.9):.1%}",
                "mean": f"{weighted_mean(runs):+.1%}",
                "took": stated_interval(gpu, kind).text if enough(runs) else "too few",
            }
        )
    return columns(rows, list(rows[0]), ("runs", "by", "median", "9 of 10", "mean"))
