# SPDX-License-Identifier: Apache-2.0
"""Performs a schedule with given times on a small model: real ranks, real messages, real losses.

    cd source_code; torchrun --standalone --nproc-per-node 4 -m lab.paced_schedule TIMES.json

Each action lasts at least as long as the file says: waiting needs no core, so two cores show the
timeline of eight devices. TIMES.json has the schedule as CSV text and milliseconds for each stage:
{"schedule": "0F0,...", "forward": [...], "backward": [...], "backward_weight": [...]}.
"""

import sys

from files.inputs import MEBIBYTE, InputError, is_number, read_json
from guard.around_main import guarded
from lab import attach
from lab.simulator import Costs
from pipeline.command_line import ranks_from_environment
from pipeline.schedule import ScheduleError
from pipeline.schedules.legal import check_legal
from pipeline.schedules.text_form import from_csv
from pipeline.split_stage import stage_class_for
from pipeline.training import (
    build_stage,
    complete_arguments,
    cut_layers,
    start_job,
    train,
    training_parser,
)
from pipeline.worker import Worker

KINDS = ("forward", "backward", "backward_weight")
SMALL = {"dim": 8, "heads": 2, "kv_heads": 1, "seq_len": 4, "steps": 4}


@guarded
def main():
    """Read the file, build the small model, and train it with the file's schedule and times."""
    parser = training_parser(__doc__)
    parser.add_argument("times", metavar="TIMES.json", help="the schedule, and times in ms")
    attach.add_flags(parser)
    parser.set_defaults(**SMALL)
    arguments = parser.parse_args()
    try:
        schedule, costs = read_times(arguments.times, 1000 * arguments.timeout)
        if schedule.num_ranks != (ranks := ranks_from_environment()[1]):
            raise ScheduleError(f"it is for {schedule.num_ranks} ranks, and this job has {ranks}")
    except (InputError, ScheduleError) as error:
        raise SystemExit(f"TIMES.json: {error}; correct the file or the number of ranks") from None
    arguments.layers = schedule.num_stages
    arguments.batch_size = arguments.microbatches = schedule.num_microbatches
    complete_arguments(parser, arguments)
    arguments.pace_costs = costs
    job = start_job(arguments, schedule.pairs)
    cut, stage_class = cut_layers(arguments, schedule.num_stages), stage_class_for(schedule)
    stages = {
        index: build_stage(arguments, index, cut, job.device, stage_class)
        for index in schedule.stages_of(job.rank)
    }
    attach.observe(arguments, job, stages.values(), schedule)
    return train(arguments, job, stages.values(), Worker(job, schedule, stages).run_step)


def read_times(path, longest):
    """(Schedule, Costs in milliseconds) of a file; every time is below `longest`."""
    content = read_json(path, 16 * MEBIBYTE)
    if not isinstance(content, dict) or not isinstance(content.get("schedule"), str):
        raise InputError(f"{path} has no string 'schedule'")
    schedule = check_legal(from_csv(content["schedule"]))
    for kind in KINDS:
        times = content.get(kind)
        if not isinstance(times, list) or len(times) != schedule.num_stages:
            raise InputError(f"{path} has no list '{kind}' with a time per stage")
        if not all(is_number(time, 0, longest) for time in times):
            raise InputError(
                f"{path}: '{kind}' has a value that is not a time from 0 to {longest:g} ms"
            )
    return schedule, Costs(*(content[kind] for kind in KINDS))


if __name__ == "__main__":
    sys.exit(main())
