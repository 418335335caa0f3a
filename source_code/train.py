# SPDX-License-Identifier: Apache-2.0
"""Trains with any synchronous schedule: by name, or one of your own from a CSV file.

    torchrun --standalone --nproc-per-node 4 train.py --schedule zb-v --verify
    torchrun --standalone --nproc-per-node 4 train.py mine.csv --verify

A file has one row per rank, with cells such as 0F3: stage, kind (F, B, or I and W for a backward in
two halves) and micro-batch. --option sets an option of a named schedule, such as depth=2 of 1f1b,
and --recompute says what a stage keeps of a forward. With --pace-per-layer, the pace of a stage is
--pace times its number of layers, and --cut chooses these numbers.
"""

import sys

from extensions.recompute_flags import add_recompute_flags, build_recomputing_stages, check_pieces
from guard.around_main import guarded
from lab import attach
from pipeline.command_line import check_same, ranks_from_environment
from pipeline.schedules.from_flags import add_schedule_flags, choose_schedule
from pipeline.schedules.text_form import read_schedule
from pipeline.training import (
    complete_arguments,
    cut_layers,
    start_job,
    train,
    training_parser,
)
from pipeline.worker import Worker


@guarded
def main():
    parser = training_parser(__doc__)
    parser.add_argument(
        "file", metavar="FILE.csv", nargs="?", help="in place of --schedule; gpipe without both"
    )
    parser.reads.append("FILE.csv")
    add_schedule_flags(parser, default=None)
    add_recompute_flags(parser)
    attach.add_flags(parser)
    parser.set_defaults(microbatches=None)  # the number of the file, or 8
    arguments = parser.parse_args()
    schedule = schedule_of(arguments)
    complete_arguments(parser, arguments)
    cut = cut_layers(arguments, schedule.num_stages)
    check_pieces(arguments, cut)
    job = start_job(arguments, schedule.pairs)
    stages = build_recomputing_stages(arguments, schedule, cut, job)
    attach.observe(arguments, job, stages.values(), schedule)
    worker = Worker(job, schedule, stages)
    return train(arguments, job, stages.values(), worker.run_step)


def schedule_of(arguments):
    """Return the schedule in FILE.csv, which sets the number of micro-batches, or --schedule."""
    if arguments.file is None:
        arguments.microbatches = arguments.microbatches or 8
        arguments.schedule = arguments.schedule or "gpipe"
        return choose_schedule(arguments)
    if arguments.schedule or arguments.chunks or arguments.option:
        raise SystemExit(
            f"{arguments.file} has its own schedule; leave out --schedule, --chunks and --option"
        )
    schedule = read_schedule(arguments.file, ranks_from_environment()[1])
    has = schedule.num_microbatches
    check_same("--microbatches", arguments.microbatches, arguments.file, has)
    arguments.microbatches = has
    return schedule


if __name__ == "__main__":
    sys.exit(main())
