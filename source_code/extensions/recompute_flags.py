# SPDX-License-Identifier: Apache-2.0
"""The flags --recompute and --pieces, and the stages of a rank that they ask for."""

from extensions.recompute import MODES, recomputing
from pipeline.command_line import positive_integer
from pipeline.split_stage import stage_class_for
from pipeline.training import build_stage


def add_recompute_flags(parser, default="none"):
    kept = "; ".join(f"{mode}: {what}" for mode, what in MODES.items())
    parser.add_argument("--recompute", choices=list(MODES), default=default, help=kept)
    helped = "pieces of a stage whose inputs --recompute stage keeps, by default 1"
    parser.add_argument("--pieces", type=positive_integer, metavar="C", help=helped)


def check_pieces(arguments, cut):
    """Reject more pieces than a stage has layers, or --pieces without its --recompute mode."""
    if arguments.pieces is None:
        arguments.pieces = 1
    elif arguments.recompute != "stage":
        raise SystemExit(
            f"--pieces are for --recompute stage, not {arguments.recompute}; leave it out, "
            "or change --recompute"
        )
    fewest = min(last - first for first, last in cut)
    if arguments.pieces > fewest:
        raise SystemExit(
            f"--pieces {arguments.pieces}: a stage has {fewest} layers; use at most {fewest}"
        )


def build_recomputing_stages(arguments, schedule, cut, job):
    """Build this rank's stages by index, which recompute as --recompute and --pieces say."""
    stage_class = stage_class_for(schedule)
    return {
        index: recomputing(
            build_stage(arguments, index, cut, job.device, stage_class),
            arguments.recompute,
            arguments.pieces,
        )
        for index in schedule.stages_of(job.rank)
    }
