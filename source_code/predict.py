"""Predict a schedule without running it: makespan, bubble, held micro-batches, messages.

python source_code/predict.py gpipe --ranks 4 --microbatches 8
"""

import argparse
import gc
import json
import math
import sys

from lab.figures import draw_timelines
from lab.simulator import Costs, simulate
from lab.timeline import from_chrome_trace
from pipeline.command_line import Parser, positive_integer, positive_number, reject
from pipeline.files import write_whole
from pipeline.schedule import ScheduleError, read_csv, to_csv
from pipeline.schedules import SCHEDULES, build_schedule, chunked_schedules
from pipeline.schedules.from_flags import schedule_option
from pipeline.schedules.legal import check_legal


def main():
    arguments = parse_arguments()
    schedule = schedule_of(arguments)
    costs = Costs(
        arguments.forward,
        arguments.backward,
        arguments.backward_weight,
        arguments.transfer,
        arguments.recompute,
        occupancy=arguments.occupancy,
    )
    timeline = simulate(schedule, costs)
    figures = measure(schedule, timeline)
    write_files(arguments, schedule, timeline)
    if arguments.csv == "-":
        sys.stdout.write(to_csv(schedule))
    elif arguments.json:
        print(json.dumps(figures))
    else:
        print(in_words(schedule, figures))
    return 0


def parse_arguments():
    parser = Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("schedule", help=f"{', '.join(SCHEDULES)}, or a CSV file")
    add("--ranks", type=positive_integer, default=4, metavar="P")
    add("--microbatches", type=positive_integer, default=8, metavar="M")
    chunked = ", ".join(chunked_schedules())
    add("--chunks", type=positive_integer, metavar="V", help=f"stages a rank, for {chunked}")
    has = "; ".join(
        f"{name}: {', '.join(row.options)}" for name, row in SCHEDULES.items() if row.options
    )
    add("--option", type=schedule_option, action="append", metavar="NAME=VALUE", help=has)
    add("--forward", type=positive_number, default=1.0, metavar="T", help="of one stage")
    add("--backward", type=positive_number, default=2.0, metavar="T", help="full, of one stage")
    add("--backward-weight", type=positive_number, metavar="T", help="its part for the weights")
    add("--transfer", type=not_negative, default=0.0, metavar="T", help="latency of a message")
    add("--occupancy", type=not_negative, default=0.0, metavar="T", help="of a link by a message")
    add("--recompute", type=not_negative, default=0.0, metavar="T", help="on top of a backward")
    add("--csv", metavar="FILE", help="write the schedule; - is standard output")
    add("--svg", metavar="FILE", help="draw the timeline")
    add("--performed", metavar="FILE", help="a run's --timeline, to draw below the prediction")
    add("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()
    if arguments.backward_weight is None:
        arguments.backward_weight = arguments.backward / 2
    if arguments.backward_weight >= arguments.backward:
        reject("--backward-weight must be less than --backward, of which it is a part")
    if arguments.csv == "-" and arguments.json:
        reject("--csv - and --json both want standard output; name a file for the CSV")
    if arguments.performed and not arguments.svg:
        reject("--performed only adds to a drawing; name one with --svg")
    return arguments


def not_negative(text):
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, not '{text}'")
    return value


def schedule_of(arguments):
    """The schedule that the flags name, from its generator or from a CSV file; refuses others."""
    name, chunks = arguments.schedule, arguments.chunks
    sizes = f" --ranks {arguments.ranks} --microbatches {arguments.microbatches}"
    sizes += f" --chunks {chunks}" if chunks else ""
    options = dict(arguments.option or [])
    sizes += "".join(f" --option {option}={value}" for option, value in options.items())
    try:
        if name in SCHEDULES:
            return build_schedule(name, arguments.ranks, arguments.microbatches, chunks, **options)
        if chunks:
            names = ", ".join(chunked_schedules())
            reject(f"--chunks is for {names}; a file says itself where its stages are")
        if options:
            reject(
                "--option is for a schedule with a name; a file is one order, and has no options"
            )
        return check_legal(read_csv(name))
    except ScheduleError as error:
        reject(f"{name}{sizes if name in SCHEDULES else ''}: {error}")
    except (OSError, UnicodeDecodeError):
        reject(
            f"'{name}' is neither a schedule ({', '.join(SCHEDULES)}) nor a CSV file that can be read"
        )


def measure(schedule, timeline):
    """The figures, under the names that --json prints."""
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


def in_words(schedule, figures):
    """What is printed without --json, a figure a line."""
    held = " ".join(map(str, figures["peak_held_per_rank"]))
    return "\n".join(
        [
            f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
            f"{schedule.num_microbatches} micro-batches",
            f"makespan            {figures['makespan']:g}",
            f"ideal               {figures['ideal']:g}  (the largest busy time of a rank)",
            f"bubble over total   {figures['bubble_over_total']:.4f}  (idle / makespan)",
            f"bubble over ideal   {figures['bubble_over_ideal']:.4f}  (idle / busy)",
            f"peak held per rank  {held}  (stage x micro-batch activations)",
            f"messages            {figures['messages']}",
        ]
    )


def write_files(arguments, schedule, timeline):
    """Write what --csv and --svg ask for; refuses a file that cannot be read or written."""
    flag, path = "", ""
    try:
        if arguments.csv and arguments.csv != "-":
            flag, path = "--csv", arguments.csv
            write_whole(path, to_csv(schedule))
        if arguments.svg:
            timelines = {"predicted": timeline}
            if arguments.performed:
                flag, path = "--performed", arguments.performed
                with open(path) as file:
                    timelines["performed"] = from_chrome_trace(file.read())
            flag, path = "--svg", arguments.svg
            write_whole(path, draw_timelines(timelines).svg)
    except (OSError, ValueError, KeyError) as error:
        reason = getattr(error, "strerror", None) or "it is no timeline of this course"
        reject(f"{flag} {path}: {reason}; name another file")


if __name__ == "__main__":
    # A large schedule is a million small objects and no cycle among them: looking for cycles would
    # take as long as the work.
    gc.disable()
    sys.exit(main())
