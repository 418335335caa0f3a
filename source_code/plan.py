# SPDX-License-Identifier: Apache-2.0
"""Plan a training run: which use of these GPUs is fastest, what limits it, and how sure that is.

    python source_code/plan.py llama-3-8b --machine dgx-a100-80gb --gpus 16 --batch-size 128

Thousands of plans are compared on paper: replicas x stages x tensor parallelism in a node x
schedule x micro-batch x cut x recomputation x sharding. The schedules are GPipe, 1F1B, interleaved
1F1B, ZB-H1, ZB-H2, ZB-V, V-Half and V-Min; others, such as looped-bfs, are not tried. MODEL is a
name, sizes such as layers=32,hidden=4096,vocabulary=32000, a config.json of transformers, the
folder of a saved model, or a profile of layers that plan_partition.py --save wrote; --machine is a
name or a JSON file. --this-machine measures this machine, in a minute or two, and --save keeps the
result as such a file. Plans that pretrain_llama.py cannot start are ranked separately, as paper
only. --confirm trains a few steps by the best plans of a measured machine. Otherwise nothing is
started.

    python source_code/plan.py pretrain_llama.py --gpus 8 --model 1b --recompute layer

forecasts the one run that these flags of pretrain_llama.py describe: what each rank holds, and how
long an update takes. The exit status is 1 if it does not fit.
"""

import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from subprocess import SubprocessError

from files.inputs import InputError
from files.outputs import not_written, to_json, write_output
from guard.flags import check_alone
from guard.one_sentence import in_one_sentence
from guard.paths import check_apart, check_file
from pipeline.command_line import Parser, positive_integer, positive_number
from planning.bound import lower_bound, memory_bound
from planning.candidates import check_precision, plans_to_compare, search_plans
from planning.known_models import SIZES_TEXT, find_model, names
from planning.machine import SHORT, machine_from, machine_names, read_machine
from planning.narrow import command_lines, how_many, lines_of
from planning.performed_runs import (
    measure_machine,
    perform_here,
    ranks_of_this_machine,
)
from planning.plan_commands import (
    command_of,
    further_lines,
    is_saved,
    own_text_is_enough,
    training_lines,
)
from planning.plan_memory import usable
from planning.plan_tables import (
    close_lines,
    error_lines,
    nodes_of,
    performed_lines,
    published_lines,
    range_of,
    reason_lines,
    table_lines,
)
from planning.profiled import ProfiledModel
from planning.reasons import limit_of

UNSURE = 0.3  # relative error of a fit above which the measurement was disturbed
MACHINE = "dgx-a100-80gb"  # unless another is named
MOST_GPUS = 1_000_000  # ten times those of the largest training so far
MOST_LAYERS = 1_000_000  # of pretrain_llama.py, which are cut in seconds
MOST_MEMORY = 1_000_000  # GB of one of them
MOST_SHOWN = 50  # plans; each is simulated, which takes seconds if it has more than 100 ranks
PROGRAM = "pretrain_llama.py"
LAYOUT = (
    "layout: replicas x pipeline ranks x tensor group; x 2 behind a schedule: stages per rank; "
    "size: of a micro-batch, in sequences"
)


@in_one_sentence()
def main():
    if Path(*sys.argv[1:2]).name == PROGRAM:
        return plan_program(sys.argv[2:])
    arguments = parse_arguments()
    if arguments.published:
        print("\n".join(published_lines()))
        return int(bool(not_written))
    machine = machine_of(arguments)
    try:
        model = find_model(arguments.model, arguments.seq_len, arguments.batch_size)
    except InputError as error:
        raise SystemExit(str(error)) from None
    if arguments.gpus > machine.gpus_per_node and arguments.gpus % machine.gpus_per_node:
        raise SystemExit(
            f"--gpus {arguments.gpus} are not whole nodes of {machine.gpus_per_node}; "
            "use a multiple of it, or a --machine with other nodes"
        )
    machine = replace(machine, memory=usable(machine, arguments.memory))
    try:
        check_precision(arguments.precision, model, machine)
        plans = plans_to_compare(model, machine, arguments.precision)
    except InputError as error:
        raise SystemExit(str(error)) from None
    started = [plan for plan in plans if command_of(arguments.model, model, machine, plan)]
    here = machine.measured and not isinstance(model, ProfiledModel)
    if arguments.confirm and not here:
        raise SystemExit(
            "--confirm trains the best plans on the machine that was measured, with a model of the "
            "course's kind; add --this-machine, or leave it out"
        )
    paper = [] if here else set(plans) - set(started)  # the others' times were not measured
    paper = [plan for plan in plans if plan in paper]
    ours, others = (
        search_plans(model, machine, each, arguments.count) for each in (started, paper)
    )
    if not ours.best and not others.best:
        print(nothing_fits(model, machine, plans))
        return 1
    if arguments.json:
        print(to_json(figures(arguments, model, machine, ours, others)))
    else:
        print("\n".join(in_words(arguments, model, machine, ours, others)))
        if arguments.confirm:
            print_performed(model, machine, started, ours, arguments.confirm)
    return int(bool(not_written))


def parse_arguments():
    parser = Parser(__doc__)
    add, count = parser.add_argument, {"type": positive_integer, "metavar": "N"}
    models = f"{names()}, {SIZES_TEXT}, a config.json, or the folder of a saved model"
    add("model", nargs="?", metavar="MODEL", help=models)
    add("--machine", help=f"{', '.join([*SHORT, *machine_names()])}, or a file; default {MACHINE}")
    add("--this-machine", action="store_true", help="measure this one first, and plan for it")
    add("--save", metavar="FILE", help="keep what --this-machine measures, for --machine")
    add("--gpus", help="GPUs to use; default 8, or all that were measured", **count)
    add("--batch-size", help="sequences per update; default 128, or 32 if measured", **count)
    add("--seq-len", help="tokens per sequence; default 4096, or 128 if measured", **count)
    add(
        "--memory",
        type=positive_number,
        metavar="GB",
        help="usable memory of a GPU; default: what it is sold with, or 0.9 of this machine's",
    )
    precisions = {"choices": ("bf16", "fp8"), "default": "bf16"}
    add("--precision", help="of the layers' matrix products; bf16 unless given", **precisions)
    add("--count", default=8, help="plans to show", **count)
    add("--why", type=positive_integer, metavar="PLAN", help="say what takes the time of this plan")
    add(
        "--confirm",
        help="train by the best N plans, and by the worst, on a measured machine",
        **count,
    )
    add("--wide", action="store_true", help="show every column, in about 140 columns of text")
    add("--json", action="store_true", help="print the plans as JSON")
    add(
        "--published",
        action="store_true",
        help="show forecasts next to published training runs, and exit",
    )
    arguments = parser.parse_args()
    check_alone(parser, arguments, "published")
    if arguments.model is None and not arguments.published:
        raise SystemExit(f"a model is missing; give {models}")
    if arguments.save and not arguments.this_machine:
        raise SystemExit(
            "--save keeps what --this-machine measures; add --this-machine, or leave it out"
        )
    if arguments.this_machine and arguments.machine:
        raise SystemExit("--this-machine and --machine name two machines; use one of them")
    if arguments.save:
        if arguments.model and os.path.lexists(arguments.model):
            check_apart("--save", arguments.save, "MODEL", arguments.model)
        check_file("--save", arguments.save)
    for flag in ("why", "confirm"):
        if arguments.json and getattr(arguments, flag):
            raise SystemExit(
                f"--{flag} prints a table, and --json only JSON; leave one of them out"
            )
    for flag, most in (("gpus", MOST_GPUS), ("memory", MOST_MEMORY), ("count", MOST_SHOWN)):
        if (getattr(arguments, flag) or 0) > most:
            raise SystemExit(f"--{flag} {getattr(arguments, flag):g}: {most:,} are the most")
    return arguments


def plan_program(words):
    """Print the plan of the run that these flags of pretrain_llama.py describe.

    Returns 1 if it does not fit into the memory of a GPU, otherwise 0.
    """
    import pretrain_llama  # imported late, because it imports all training code

    from extensions.pretraining.training_flags import check_training_flags
    from planning.program_plan import print_program_plan

    parser = pretrain_llama.program_parser()
    parser.prog = f"plan.py {PROGRAM}"
    add = parser.add_argument
    add("--gpus", type=positive_integer, default=8, metavar="N", help="ranks of the run")
    add("--machine", help=f"{', '.join([*SHORT, *machine_names()])}, or a file; default DGX A100")
    arguments = parser.parse_args(words)
    for flag, most in (("gpus", MOST_GPUS), ("layers", MOST_LAYERS)):
        if (getattr(arguments, flag) or 0) > most:
            raise SystemExit(f"--{flag} {getattr(arguments, flag)}: {most:,} are the most")
    arguments.num_ranks = arguments.gpus
    arguments.shuffle = False  # without a text there are no rows to count
    schedule = pretrain_llama.complete_flags(parser, arguments, read_data=lambda _: None)
    check_training_flags(arguments, schedule)
    return int(not print_program_plan(arguments, schedule, arguments.machine))


def machine_of(arguments):
    """The Machine that the flags name, or this one, measured. Sets the flags that depend on it."""
    a = arguments
    if a.this_machine:
        ranks = ranks_of_this_machine()
        if a.gpus and a.gpus > ranks:
            raise SystemExit(
                f"--gpus {a.gpus}: {ranks} can compute at once here; use at most {ranks}"
            )
        ranks = a.gpus or ranks
        print(f"measuring this machine with {ranks} at once ...", file=sys.stderr, flush=True)
        try:
            text = measure_machine(ranks, a.seq_len or 128)
        except (OSError, SubprocessError) as error:
            raise SystemExit(f"--this-machine: it could not be measured: {error}") from None
        if a.save:
            write_output("--save", a.save, to_json(text, indent=1) + "\n")
        machine = machine_from(text, ranks, "this machine")
    else:
        try:
            machine = read_machine(a.machine or MACHINE, a.gpus or 8)
        except InputError as error:
            raise SystemExit(f"--machine: {error}") from None
    if machine.measured:
        most = machine.gpus_per_node
        if (a.gpus or most) != most:
            raise SystemExit(
                f"--gpus {a.gpus}: this machine was measured with {most} at once; use {most}"
            )
        machine = replace(machine, gpus=most)
    a.gpus = machine.gpus
    a.batch_size = a.batch_size or (32 if machine.measured else 128)
    a.seq_len = a.seq_len or (128 if machine.measured else 4096)
    return machine


def in_words(arguments, model, machine, ours, others):
    """Return the text that is printed without --json."""
    best = [*ours.best, *others.best]
    devices = how_many(machine.gpus, "rank")
    if not machine.measured:
        name = arguments.machine or MACHINE
        devices = f"{how_many(machine.gpus, 'GPU')} of {name}{nodes_of(machine)}"
    compared = ours.compared + others.compared
    lines = lines_of(
        f"{in_billions(model.parameters)} weights on {devices}, "
        f"{how_many(model.batch, 'sequence')} of {how_many(model.length, 'token')} per update, "
        f"{machine.memory / 1e9:.0f} GB usable; {compared:,} plan{'s' * (compared != 1)} compared"
    )
    lines += lines_of(LAYOUT)
    if ours.best:
        lines += ["", "What a script of the course starts, the fastest first:"]
        lines += table_lines(model, machine, ours.best, wide=arguments.wide)
        command = command_of(arguments.model, model, machine, ours.best[0].plan)
        lines += command_lines(command)
        why = "" if own_text_is_enough(model) else "; the course's own is too short for this length"
        if " FILE" in command:
            lines.append(f"FILE is a text of yours{why}.")
        lines += training_lines(machine, ours.best[0].plan, is_saved(arguments.model))
    if others.best:
        lines += ["", "Paper only, these plans cannot be started with pretrain_llama.py:"]
        lines += table_lines(model, machine, others.best, 1 + len(ours.best), arguments.wide)
    lines += further_lines(arguments.model, model, machine)
    lines += ["", *error_lines(machine, best)]
    lines += close_lines(machine, ours.best, others.best)
    if not (ours.proven and others.proven):
        lines.append("Not proven: a plan that was not played could be faster.")
    if machine.error > UNSURE:
        lines.append("This machine did something else while it was measured: measure it again.")
    number = arguments.why
    if number and number > len(best):
        raise SystemExit(
            f"--why {number}: {len(best)} plans are shown; use one of them, or a larger --count"
        )
    if number:
        lines += ["", f"Plan {number}:", *reason_lines(model, machine, best[number - 1])]
    return lines


def in_billions(count):
    """Return a number of weights in words."""
    unit, name = (1e9, "billion") if count >= 1e8 else (1e6, "million")
    return f"{count / unit:.2f} {name}"


def print_performed(model, machine, plans, found, count):
    """Train a few steps of the best plans and of the worst, and print each beside its forecast."""
    print("\nTraining runs performed here, at full speed; no part was measured before")
    print(f"{'layout':14}  {'schedule':20}  {'forecast':>10}  {'performed':>10}  difference")
    worst = max(plans, key=lambda plan: lower_bound(model, machine, plan))
    for plan in [*(one.plan for one in found.best[:count]), worst]:
        try:
            performed = perform_here(model, machine, plan)
            print("\n".join(performed_lines(plan, performed, machine.error)), flush=True)
        except (OSError, SubprocessError) as error:
            print(f"{plan.schedule} could not be performed: {error}", flush=True)


def nothing_fits(model, machine, plans):
    """Return a sentence that says what would have to change."""
    if not plans:
        why = (
            f"no plan can be carried out: a batch of {model.batch} sequences and {model.layers} "
            f"layers do not divide over {machine.gpus} GPUs; try another --batch-size"
        )
        return "\n".join(lines_of(why))
    needed = min(memory_bound(model, machine, plan) for plan in plans)
    lines = lines_of(
        f"nothing fits: the leanest of {len(plans):,} plans needs {needed / 1e9:.1f} GB, and a GPU "
        f"has {machine.memory / 1e9:.1f}"
    )
    for factor in (2, 4, 8, 16, 32):
        larger = replace(machine, gpus=machine.gpus * factor)
        try:
            candidates = plans_to_compare(model, larger, plans[0].precision)
        except InputError:
            return "\n".join(lines)
        sizes = model.known_sizes or (1,)  # a larger micro-batch seldom takes less memory
        lean = (plan for plan in candidates if plan.microbatch in sizes)
        if any(memory_bound(model, larger, plan) <= machine.memory for plan in lean):
            return "\n".join([*lines, f"it fits on {larger.gpus} GPUs"])
    return "\n".join([*lines, "more GPUs alone do not help: shorten --seq-len, or use larger GPUs"])


def figures(arguments, model, machine, ours, others):
    """Return the plans, under the names that --json prints, in seconds and bytes."""
    plans = sorted([*ours.best, *others.best], key=lambda one: one.update)[: arguments.count]

    def figures_of(one):
        return {
            **asdict(one.plan),
            "seconds": one.update,
            "seconds_range": range_of(machine, one),
            "tokens_per_second": one.tokens_per_second(model),
            "mfu": one.utilisation(model, machine),
            "bytes": one.memory,
            "bubble_over_ideal": one.bubble_over_ideal,
            "limit": limit_of(model, machine, one),
            "command": command_of(arguments.model, model, machine, one.plan),
            "paper_only": command_of(arguments.model, model, machine, one.plan) is None,
        }

    return {
        "parameters": model.parameters,
        "compared": ours.compared + others.compared,
        "plans": [figures_of(one) for one in plans],
        "started_by_the_course": [figures_of(one) for one in ours.best],
        "paper_only": [figures_of(one) for one in others.best],
    }


if __name__ == "__main__":
    sys.exit(main())
