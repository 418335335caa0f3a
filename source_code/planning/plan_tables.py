# SPDX-License-Identifier: Apache-2.0
"""What plan.py prints: tables of plans, the reasons of one, its memory, and the command for it."""

from functools import lru_cache
from pathlib import Path

from extensions.real_models.saved_folder import find_tensors
from extensions.real_models.saved_settings import read_settings
from guard.inputs import InputError
from pipeline.data import DEFAULT_TEXT
from pipeline.schedules import SCHEDULES
from planning.candidates import all_plans, search_plans
from planning.expected_error import expected_error, kind_of, left_out_errors, mean_error
from planning.forecast import stage_costs
from planning.held import held_by
from planning.known_models import NAMED, is_of_the_course
from planning.plan_memory import memory_per_rank
from planning.published import error_of, published_runs
from planning.reasons import changes, limit_of, parts_of, rank_work

OF_THE_COURSE = ("1m", "10m", "60m", "125m", "350m", "1b")
BIASED = 0.06  # difference of mean errors above which two kinds of plans do not rank fairly
SAVED_BY_NAME = ("llama-", "qwen2.5-")  # what convert.py takes, once their files are here
BYTES = 256  # a larger vocabulary needs a tokenizer
CONVERTED = "--checkpoints", "NEW_FOLDER"
LONGEST_TOKENS = 6  # bytes in one of a tokenizer that was trained on the course's text
HEADING = (
    "    replicas x stages x tensor  schedule           size  recompute  sharding   "
    "seconds  tokens/s    MFU     GB   idle  limited by"
)


def table_lines(model, machine, found, first=1):
    """A row per Forecast, numbered from `first`."""
    lines = [HEADING]
    for number, one in enumerate(found, first):
        plan = one.plan
        schedule = plan.schedule + (f" x {plan.chunks}" if plan.chunks > 1 else "")
        shape = f"{plan.replicas} x {plan.ranks} x {plan.tensor}"
        idle = max(0.0, one.bubble_over_ideal / (1 + one.bubble_over_ideal))
        mfu = f"{one.utilisation(model, machine):5.1%}" if model.model_flops else f"{'-':>5}"
        lines.append(
            f"{number:2}  {shape:26}  {schedule if plan.ranks > 1 else '-':18}{plan.microbatch:5}"
            f"  {plan.recompute:9}  {plan.sharding:9}  {one.update:8.3g}"
            f"  {one.tokens_per_second(model):8,.0f}  {mfu}"
            f"  {one.memory / 1e9:5.1f}  {idle:5.1%}  {limit_of(model, machine, one)}{remark(plan)}"
        )
    return lines


def remark(plan):
    """Return what no column says, as two plans may differ in nothing else; "" for most plans."""
    remarks = {
        "even cut": not plan.cut and plan.ranks > 1,
        "a node has replicas of one stage": plan.neighbours == "replicas",
    }
    said = ", ".join(text for text, holds in remarks.items() if holds)
    return f" ({said})" if said else ""


def range_of(machine, found):
    """(least, most) seconds of an update, by the errors of forecasts for plans of this kind."""
    return expected_error(machine, found.plan).seconds(found.update)


def error_lines(machine, found):
    """Sentences about the error of the seconds in tables, one per kind of plan."""
    if machine.measured:
        return [
            f"All seconds +-{machine.error:.0%}: the error to expect of a forecast for this machine."
        ]
    lines = ["The error to expect: how much an update differed from its forecast in 9 of 10"]
    lines += ["published training runs of this kind, with constants fitted without them:"]
    kinds = {kind_of(one.plan): expected_error(machine, one.plan) for one in found}
    for kind, error in sorted(kinds.items()):
        if error.rows:
            evidence = f"{error.rows} runs by {error.groups} publications"
        else:
            evidence = f"few or no {kind} runs on this GPU were ever compared"
        lines.append(f"  {kind:23}  {error.text:14}  {evidence}")
    means = {kind: mean_error(machine, kind) for kind in ("pipelined", "sharded")}
    if means.keys() <= kinds.keys() and None not in means.values():
        if max(means.values()) - min(means.values()) > BIASED:
            said = ", ".join(f"{kind} {mean:+.0%}" for kind, mean in means.items())
            lines.append(
                f"Mean errors of forecasts: {said}; the ranking of the two is biased by that."
            )
    if len(kinds) > 1 and not all(error.rows for error in kinds.values()):
        lines.append("How these kinds rank against each other on this GPU was never tested.")
    return lines


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
        seconds = seconds if abs(seconds) > 1e-9 * found.update else 0.0  # else it is rounding
        lines.append(f"  {seconds:10.4g}  {what} ({seconds / found.update:.1%})")
    if plan.ranks > 1:
        layers = plan.layers_of(model)
        work = rank_work(model, plan, stage_costs(model, machine, plan))
        heaviest = work.index(max(work))
        own = sum(layers[stage] for stage in plan.stages_of(heaviest))
        head = " and the head" if plan.stages - 1 in plan.stages_of(heaviest) else ""
        lines.append(f"  layers of the stages: {','.join(map(str, layers))}")
        lines.append(f"  the heaviest rank is {heaviest}, with {own} layers{head}")
    lines.append("  one step away:")
    for what, other, needed in changes(model, machine, plan):
        fits = "" if needed <= machine.memory else "  does not fit"
        change = other.update / found.update - 1
        lines.append(f"  {change:+10.1%}  {needed / 1e9:6.1f} GB  {what}{fits}")
    return lines


def memory_lines(model, machine, found):
    """A heading, and a line for each rank of a plan with its bytes."""
    plan = found.plan
    held = held_by(plan.schedule, plan.ranks, plan.chunks, plan.microbatches(model))
    needed = memory_per_rank(model, machine, plan)
    lines = ["  rank      GB  holds"]
    for rank, (size, count) in enumerate(zip(needed, held)):
        lines.append(f"  {rank:4}  {size / 1e9:6.1f}  {count:g} (stage, micro-batch) pairs")
    return lines


def performed_line(plan, performed, error):
    """A row for a Performed; `error` is the relative error that the forecast allows for."""
    shape = f"{plan.replicas} x {plan.ranks} x {plan.tensor}"
    schedule = plan.schedule + (f" x {plan.chunks}" if plan.chunks > 1 else "")
    inside = "inside" if abs(performed.error) <= error else "OUTSIDE"
    most = max(performed.bytes_forecast) / max(performed.bytes_counted) - 1
    return (
        f"{shape:26}  {schedule:18} {performed.forecast:8.3g} s {performed.seconds:8.3g} s"
        f" {performed.error:+10.1%}  {inside} +-{error:.0%}; bytes {most:+.1%}"
    )


def command_of(name, model, machine, plan):
    """The command that starts a plan, or None if no script of the course can start it."""
    flags = course_flags(name, model)
    if flags is None or not has_flags(plan):
        return None
    first = f"{convert_command(name)} && " if name and Path(name).is_dir() else ""
    start = f"torchrun --standalone --nproc-per-node {plan.gpus} source_code/pretrain_llama.py"
    if plan.gpus > machine.gpus_per_node:  # torchrun --standalone starts one node
        nodes = plan.gpus // machine.gpus_per_node
        start = (
            f"sbatch --nodes={nodes} --gres=gpu:{machine.gpus_per_node} "
            "slurm/train.sbatch pretrain_llama.py"
        )
    text = [] if own_text_is_enough(model) else ["--data", "FILE"]
    return first + " ".join([start, *flags_of(model, machine, plan, flags), *text])


def has_flags(plan):
    """Whether pretrain_llama.py has flags for a plan, of a model that it can build."""
    if plan.tensor > 1 or plan.sharding != "none":
        return False
    if plan.recompute not in ("none", "full"):
        return False
    return plan.neighbours == "stages" or plan.ranks == 1


def own_text_is_enough(model):
    """Whether the course's text has a held-out tenth of a sequence; a tokenizer shortens it."""
    bytes_per_token = 1 if model.vocabulary <= BYTES else LONGEST_TOKENS
    return DEFAULT_TEXT.stat().st_size >= 10 * (model.length + 1) * bytes_per_token


def further_lines(name, model, machine):
    """Lines about a model that no command of the course builds from its name alone."""
    if course_flags(name, model) is not None:
        return []
    if name and name in NAMED and name.startswith(SAVED_BY_NAME):
        return ["", *lines_with_files(name, model, machine)]
    if name and Path(name).is_dir():
        return [
            "",
            f"No command, as convert.py cannot read this folder: {why_not_saved(name, model)}.",
        ]
    return [
        "",
        "No script of the course builds this model. For a saved Llama, Mistral, Qwen2 or Qwen3, name",
        "its folder as MODEL; for any other, docs/your-own-model.md shows how to change a copy.",
    ]


def lines_with_files(name, model, machine):
    """Lines with the flags of the fastest plan that pretrain_llama.py can start."""
    plans = [plan for plan in all_plans(model, machine) if has_flags(plan)]
    best = search_plans(model, machine, plans, 1).best
    if not best:
        return [f"Nothing that pretrain_llama.py can start with a saved {name} fits."]
    flags = flags_of(model, machine, best[0].plan, [*CONVERTED, *sizes_of(model)])
    return [
        f"With a saved {name} in FOLDER and a text in FILE, the fastest that a script of the course",
        f"starts takes {best[0].update:.3g} s per update: {convert_command('FOLDER')},",
        "then pretrain_llama.py with",
        " ".join([*flags, "--data", "FILE"]),
    ]


def convert_command(folder):
    """The command whose checkpoint pretrain_llama.py continues."""
    return f"python source_code/convert.py --from-hf {folder} {' '.join(CONVERTED)}"


def why_not_saved(folder, model):
    """Return why convert.py does not take a folder, or "" if it does."""
    try:
        read_settings(folder, model.length)
        find_tensors(Path(folder))
    except InputError as error:
        return str(error)
    return ""


@lru_cache(maxsize=100)
def course_flags(name, model):
    """The flags of pretrain_llama.py for a model; None if the script cannot build the model."""
    if name in OF_THE_COURSE:
        return ["--model", name]
    if name and Path(name).is_dir():
        return None if why_not_saved(name, model) else [*CONVERTED, *sizes_of(model)]
    return sizes_of(model) if is_of_the_course(model) else None


def sizes_of(model):
    """The flags of a model's sizes."""
    sizes = model.layers, model.hidden, model.head_count, model.kv_heads or model.head_count
    words = zip(("--layers", "--dim", "--heads", "--kv-heads"), map(str, sizes))
    return [*(word for pair in words for word in pair), "--vocabulary", str(model.vocabulary)]


def flags_of(model, machine, plan, sizes=None):
    """The flags with which pretrain_llama.py trains according to a plan."""
    chunks = SCHEDULES[plan.schedule].chunks and not SCHEDULES[plan.schedule].fixed_chunks
    flags = {
        "--replicas": plan.replicas,
        "--schedule": plan.schedule,
        **({"--chunks": plan.chunks} if chunks else {}),
        "--batch-size": model.batch,
        "--microbatches": plan.microbatches(model),
        "--seq-len": model.length,
        "--recompute": "layer" if plan.recompute == "full" else "none",
        "--dtype": {2: "bfloat16", 4: "float32", 8: "float64"}[machine.bytes_per_value],
        "--cut": ",".join(map(str, plan.layers_of(model))),
    }
    words = [str(word) for pair in flags.items() for word in pair]
    return [*(sizes or course_flags(None, model)), *words]


def published_lines():
    """A row per published training run: seconds per update, and the relative error of its forecast."""
    left_out = {(one["table"], one["name"]): one["error"] for one in left_out_errors()}
    lines = [f"{'training':62}  seconds  forecast  left out"]
    for run in published_runs():
        name = f"{run.table}, {run.name}"
        without = left_out.get((run.table, run.name))
        without = "not counted" if without is None else f"{without:+7.1%}"
        lines.append(f"{name:62}  {run.seconds:7.2f}  {error_of(run):+7.1%}  {without}")
    return lines
