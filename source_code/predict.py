# SPDX-License-Identifier: Apache-2.0
"""Predict a schedule without running it: makespan, bubble, held micro-batches, messages.

python source_code/predict.py gpipe --ranks 4 --microbatches 8
"""

import gc
import os
import re
import shutil
import sys
from pathlib import Path

from files.inputs import InputError, read_text
from files.outputs import not_written, to_json, write_whole
from guard.one_sentence import in_one_sentence
from guard.paths import check_file, check_paths_apart
from lab.figures import draw_timelines
from lab.simulator import Costs, cost, cost_or_nothing, costs_in, simulate
from lab.terminal_timeline import COLUMNS, in_text
from lab.timeline import TimelineError, read_timeline
from pipeline.command_line import Parser, check_same, positive_integer
from pipeline.schedule import ScheduleError
from pipeline.schedules import SCHEDULES, build_schedule, chunked_schedules
from pipeline.schedules.from_flags import by_name, schedule_option
from pipeline.schedules.legal import check_legal
from pipeline.schedules.text_form import LARGEST_CSV, fix_of, from_csv, to_csv

LEAST_COLUMNS = 40  # of a timeline in a terminal; a narrower terminal wraps it
NOT_IN_XML = "[\0-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]"  # characters that a file's name may have
MOST_BLOCKS = 100_000  # in a picture; a block takes about a kilobyte


@in_one_sentence()
def main():
    arguments = parse_arguments()
    schedule = schedule_of(arguments)
    if arguments.work and len(arguments.work) != schedule.num_microbatches:
        raise SystemExit(
            f"--work has {len(arguments.work)} numbers, and {schedule.name} has "
            f"{schedule.num_microbatches} micro-batches; give one for each"
        )
    costs = Costs(
        arguments.forward,
        arguments.backward,
        arguments.backward_weight,
        arguments.transfer,
        arguments.recompute,
        occupancy=arguments.occupancy,
        work=arguments.work or (),
    )
    timeline = simulate(schedule, costs)
    figures = measure(schedule, timeline)
    timelines = timelines_of(arguments, timeline)
    write_files(arguments, schedule, timelines)
    if arguments.csv == "-":
        sys.stdout.write(to_csv(schedule))
    elif arguments.json:
        print(to_json(figures))
    else:
        print(in_words(schedule, figures, arguments))
        if arguments.terminal:
            unit = "ms" if arguments.performed else "units"
            print("", *for_this_terminal(timelines, unit), sep="\n")
    return int(bool(not_written))


def for_this_terminal(timelines, unit):
    """The lines of the timelines: coloured, and no wider than the terminal, if there is one."""
    if not sys.stdout.isatty():
        return in_text(timelines, unit=unit)
    columns = max(LEAST_COLUMNS, min(COLUMNS, shutil.get_terminal_size().columns))
    return in_text(timelines, "NO_COLOR" not in os.environ, unit, columns)


def parse_arguments():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("schedule", help=f"{', '.join(SCHEDULES)}, or a CSV file")
    add("--ranks", type=positive_integer, metavar="P", help="default 4")
    add("--microbatches", type=positive_integer, metavar="M", help="default 8")
    chunked = ", ".join(chunked_schedules())
    add("--chunks", type=positive_integer, metavar="V", help=f"stages per rank, for {chunked}")
    has = "; ".join(
        f"{name}: {', '.join(row.options)}" for name, row in SCHEDULES.items() if row.options
    )
    add("--option", type=schedule_option, action="append", metavar="NAME=VALUE", help=has)
    add("--forward", type=cost, default=1.0, metavar="T", help="of one stage")
    add("--backward", type=cost, default=2.0, metavar="T", help="full, of one stage")
    add("--backward-weight", type=cost, metavar="T", help="its part for the weights")
    add("--transfer", type=cost_or_nothing, default=0.0, metavar="T", help="latency of a message")
    add(
        "--occupancy", type=cost_or_nothing, default=0.0, metavar="T", help="of a link by a message"
    )
    add("--recompute", type=cost_or_nothing, default=0.0, metavar="T", help="on top of a backward")
    add("--work", type=costs_in, metavar="X,Y,...", help="factor of each micro-batch; default 1")
    add("--csv", metavar="FILE", help="write the schedule; - is standard output")
    add("--svg", metavar="FILE", help="draw the timeline")
    add("--terminal", action="store_true", help="print the timeline, 78 columns wide")
    add("--performed", metavar="FILE", help="a run's --timeline, to draw below the prediction")
    add("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()
    if arguments.backward_weight is None:
        arguments.backward_weight = arguments.backward / 2
    if arguments.backward_weight >= arguments.backward:
        raise SystemExit("--backward-weight must be less than --backward, of which it is a part")
    if arguments.csv == "-" and arguments.json:
        raise SystemExit("--csv - and --json both want standard output; name a file for the CSV")
    if arguments.performed and not (arguments.svg or arguments.terminal):
        raise SystemExit(
            "--performed only adds to a drawing; name one with --svg, or take --terminal"
        )
    if arguments.terminal and (arguments.json or arguments.csv == "-"):
        raise SystemExit("--terminal draws between other lines; leave out --json and --csv -")
    check_files(arguments)
    return arguments


def check_files(arguments):
    """Reject a picture or file that cannot be written, or that would replace another one."""
    outputs = {"--svg": "svg", **({} if arguments.csv == "-" else {"--csv": "csv"})}
    inputs = {"--performed": "performed"}
    if arguments.schedule not in SCHEDULES:
        inputs["the schedule"] = "schedule"
    check_paths_apart(arguments, outputs, inputs)
    for flag, name in outputs.items():
        path = getattr(arguments, name)
        if path is not None:
            check_file(flag, path)


def schedule_of(arguments):
    """Return the schedule of the flags, from its generator or a CSV file, or reject the flags."""
    name, chunks = arguments.schedule, arguments.chunks
    ranks, microbatches = arguments.ranks or 4, arguments.microbatches or 8
    sizes = f" --ranks {ranks} --microbatches {microbatches}"
    sizes += f" --chunks {chunks}" if chunks else ""
    options = by_name("--option", arguments.option)
    sizes += "".join(f" --option {option}={value}" for option, value in options.items())
    try:
        if name in SCHEDULES:
            shape = name, ranks, microbatches, chunks
            return check_legal(build_schedule(*shape, **options))  # a generator may be the user's
        if chunks:
            names = ", ".join(chunked_schedules())
            raise SystemExit(f"--chunks is for {names}; a file says itself where its stages are")
        if options:
            raise SystemExit(
                "--option is for a schedule with a name; a file is one order, and has no options"
            )
        schedule = check_legal(from_csv(read_text(name, LARGEST_CSV), Path(name).stem))
        check_same("--ranks", arguments.ranks, name, schedule.num_ranks)
        check_same("--microbatches", arguments.microbatches, name, schedule.num_microbatches)
        return schedule
    except ScheduleError as error:
        where, fix = (name + sizes, "") if name in SCHEDULES else (name, f"; {fix_of(error)}")
        raise SystemExit(f"{where}: {error}{fix}") from None
    except InputError as error:
        names = ", ".join(SCHEDULES)
        why = f": {error}" if os.path.lexists(name) else ""
        raise SystemExit(
            f"'{name}' is neither a schedule ({names}) nor a CSV file that can be read{why}"
        ) from None


def measure(schedule, timeline):
    """Return the figures, under the names that --json prints."""
    return {
        "makespan": timeline.makespan,
        "ideal": timeline.ideal,
        "bubble_over_total": timeline.bubble_over_total,
        "bubble_over_ideal": timeline.bubble_over_ideal,
        "span_per_rank": timeline.span_per_rank,
        "bubble_by_span": timeline.bubble_by_span,
        "peak_held_per_rank": timeline.peak_held_per_rank,
        "peak_held_until_weight_per_rank": timeline.peak_held_until_weight_per_rank,
        "messages": len(schedule.messages),
    }


def in_words(schedule, figures, arguments):
    """Return the text that is printed without --json, one figure per line.

    A performed run counts in milliseconds, so the costs beside it do, too.
    """
    unit = "ms" if arguments.performed else "units of time"
    held = " ".join(map(str, figures["peak_held_per_rank"]))
    return "\n".join(
        [
            f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
            f"{schedule.num_microbatches} micro-batches",
            f"makespan            {figures['makespan']:g} {unit} "
            f"(forward {arguments.forward:g}, backward {arguments.backward:g} per stage)",
            f"ideal               {figures['ideal']:g} {unit} (the largest busy time of a rank)",
            f"bubble over total   {figures['bubble_over_total']:.4f}  (idle / makespan)",
            f"bubble over ideal   {figures['bubble_over_ideal']:.4f}  (idle / busy)",
            f"peak held per rank  {held} activations (stage x micro-batch)",
            f"messages            {figures['messages']} per step",
        ]
    )


def timelines_of(arguments, timeline):
    """{label: Timeline} of the prediction, and of the run that --performed names."""
    if not arguments.performed:
        return {"predicted": timeline}
    try:
        return {"predicted": timeline, "performed": read_timeline(arguments.performed)}
    except TimelineError as error:
        raise SystemExit(f"--performed {error}; name another file") from None


def write_files(arguments, schedule, timelines):
    """Write what --csv and --svg ask for; reject a picture of too many blocks."""
    if arguments.csv and arguments.csv != "-":
        write_or_reject("--csv", arguments.csv, to_csv(schedule))
    if arguments.svg:
        blocks = sum(len(each.events) for each in timelines.values())
        if blocks > MOST_BLOCKS:
            raise SystemExit(f"--svg: a picture has at most {MOST_BLOCKS:,} blocks, not {blocks:,}")
        svg = re.sub(NOT_IN_XML, "?", draw_timelines(timelines).svg)
        write_or_reject("--svg", arguments.svg, svg)


def write_or_reject(flag, path, text):
    try:
        write_whole(path, text)
    except OSError as error:
        raise SystemExit(
            f"{flag} {path} was not written ({error.strerror}); name another file"
        ) from None


if __name__ == "__main__":
    # A large schedule has a million small objects without reference cycles; garbage collection
    # would take as long as the work.
    gc.disable()
    sys.exit(main())
