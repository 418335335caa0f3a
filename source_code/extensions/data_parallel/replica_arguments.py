# SPDX-License-Identifier: Apache-2.0
"""The flag --replicas, and the values of it that are rejected."""

from extensions.data_parallel.replicas import replicate
from pipeline.command_line import positive_integer
from pipeline.schedules.from_flags import choose_schedule


def add_replica_arguments(parser):
    """Add the flag to a parser made by `training_parser`."""
    parser.add_argument(
        "--replicas",
        type=positive_integer,
        default=1,
        metavar="R",
        help="equal pipelines side by side, each with the whole model and 1/R of the batch (one "
        "number; --replicas of pipedream.py counts the ranks of each stage)",
    )


def pipeline_ranks(arguments):
    """Return the number of ranks of one pipeline. Rejects replicas that do not divide the ranks."""
    if arguments.num_ranks % arguments.replicas:
        fitting = [n for n in range(1, arguments.num_ranks + 1) if arguments.num_ranks % n == 0]
        raise SystemExit(
            f"--replicas {arguments.replicas} does not divide the {arguments.num_ranks} ranks of "
            f"this job into equal pipelines; use one of {', '.join(map(str, fitting))}"
        )
    return arguments.num_ranks // arguments.replicas


def check_replicas(arguments):
    """Divide the batch over the replicas and correct `microbatch_size`, after `parse_arguments`."""
    pipeline_ranks(arguments)
    pieces = arguments.replicas * arguments.microbatches
    if arguments.batch_size % pieces:
        raise SystemExit(
            f"--batch-size {arguments.batch_size} cannot be cut into --replicas "
            f"{arguments.replicas} times --microbatches {arguments.microbatches} equal parts; use "
            f"a multiple of {pieces}"
        )
    arguments.microbatch_size = arguments.batch_size // pieces


def choose_replicated_schedule(arguments):
    """Return --schedule for one pipeline, repeated on all --replicas as one Schedule."""
    schedule = choose_schedule(arguments, pipeline_ranks(arguments))
    return replicate(schedule, arguments.replicas)
