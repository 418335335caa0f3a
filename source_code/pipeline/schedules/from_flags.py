# SPDX-License-Identifier: Apache-2.0
"""The flags that choose a schedule by name, with its options."""

import argparse

from pipeline.command_line import positive_integer, ranks_from_environment, whole_number
from pipeline.schedule import ScheduleError
from pipeline.schedules import (
    SCHEDULES,
    build_schedule,
    chunked_schedules,
    synchronous_schedules,
)
from pipeline.schedules.legal import check_legal


def add_schedule_flags(parser, default="gpipe"):
    """Add --schedule, with all synchronous schedules as choices, --chunks and --option."""
    add, names = parser.add_argument, synchronous_schedules()
    add("--schedule", choices=names, default=default, help="order of the actions")
    chunked = ", ".join(chunked_schedules()) or "no schedule of this copy"
    add("--chunks", type=positive_integer, metavar="V", help=f"stages per rank, for {chunked}")
    has = "; ".join(
        f"{n}: {', '.join(SCHEDULES[n].options)}" for n in names if SCHEDULES[n].options
    )
    add("--option", type=schedule_option, action="append", metavar="NAME=VALUE", help=has)


def schedule_option(text):
    """Convert a flag's value NAME=VALUE to (name, whole number); each option has its own least value."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, not '{text}'")
    return name.strip(), whole_number(value)


def choose_schedule(arguments, num_ranks=None):
    """Return the schedule of the flags. `num_ranks` is that of one pipeline, by default all."""
    num_ranks = num_ranks or ranks_from_environment()[1]
    options = by_name("--option", arguments.option)
    sizes = arguments.schedule, num_ranks, arguments.microbatches, arguments.chunks
    try:
        return check_legal(build_schedule(*sizes, **options))  # a generator may be the user's own
    except ScheduleError as error:
        given = "".join(f" --option {name}={value}" for name, value in options.items())
        raise SystemExit(
            f"--schedule {arguments.schedule} --microbatches {arguments.microbatches}{given}: {error}"
        ) from None


def by_name(flag, pairs):
    """{name: value} of the pairs that a flag collects; reject a name that was given twice."""
    values = {}
    for name, value in pairs or []:
        if name in values:
            raise SystemExit(f"{flag} gives {name} twice; give it once")
        values[name] = value
    return values
