# SPDX-License-Identifier: Apache-2.0
"""The flags of torch_pipelining.py, and the combinations of them that it rejects."""

from extensions.torch_pipelining.library import LIBRARY_SCHEDULES, ONE_STAGE, complaint_about
from pipeline.command_line import positive_integer, positive_number

MOST_FORWARDS = 10_000  # of --evaluate and of --generate, each of the whole pipeline


def add_library_flags(parser):
    """Add the flags to a training script's parser, and their check."""
    add = parser.add_argument
    add("--schedule", choices=LIBRARY_SCHEDULES, default="1F1B", help="the library's name of it")
    add("--split", choices=["manual", "spec", "calls"], default="manual", help="who cuts the model")
    add("--chunks", type=positive_integer, metavar="V", help="stages per rank, by default 1 or 2")
    add("--clip", type=positive_number, metavar="NORM", help="largest gradient norm of the model")
    add("--warm-up", type=positive_integer, metavar="N", help="steps to full rate, then a cosine")
    add("--documents", action="store_true", help="attend within a paragraph only")
    add("--evaluate", type=positive_integer, metavar="N", help="then: loss of N held-out batches")
    add("--generate", type=positive_integer, metavar="N", help="then: continue texts by N bytes")
    parser.checks.append(check_library_flags)


def check_library_flags(arguments):
    """Set the default of --chunks; reject what the library would reject later with a traceback."""
    if arguments.chunks is None:
        arguments.chunks = 1 if arguments.schedule in ONE_STAGE else 2
    complaint = complaint_about(
        arguments.schedule, arguments.num_ranks, arguments.microbatches, arguments.chunks
    )
    if complaint:
        raise SystemExit(complaint)
    if arguments.documents and arguments.split != "manual":
        raise SystemExit(
            f"--documents with --split {arguments.split}: the tracer would send the mask through "
            "all stages, and the library has no backward for that; use --split manual"
        )
    for flag, count in (("evaluate", arguments.evaluate), ("generate", arguments.generate)):
        if (count or 0) > MOST_FORWARDS:
            raise SystemExit(f"--{flag} {count}: {MOST_FORWARDS:,} are the most; use fewer")
    if arguments.warm_up and arguments.warm_up >= arguments.steps:
        raise SystemExit(
            f"--warm-up {arguments.warm_up} leaves none of --steps {arguments.steps} for the "
            "cosine; use fewer, or more steps"
        )
