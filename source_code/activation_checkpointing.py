"""Activation checkpointing: keep less of every forward, and run it again (lesson 06).

    torchrun --standalone --nproc-per-node 4 source_code/activation_checkpointing.py --verify

--recompute says what a stage keeps between a forward and its backward, --schedule in which order
they run: any of the synchronous ones, with --chunks stages a rank where there are several.
"""

import sys
from dataclasses import replace

from pipeline.arguments import (
    choose_schedule,
    parse_training_arguments,
    positive_integer,
    refuse,
    training_parser,
)
from pipeline.distributed import join_job, leave_job
from pipeline.memory.recompute import MODES, build_recomputing_stage
from pipeline.model import build_part, token_loss
from pipeline.optimizer import build_optimizer
from pipeline.recorder import Recorder
from pipeline.report import Report
from pipeline.schedules import synchronous_schedules
from pipeline.worker import Worker


def main():
    arguments, schedule = parse_arguments()
    job = join_job(arguments.device, arguments.timeout, schedule.pairs)
    recorder = Recorder(job, arguments.paced)
    stages = build_stages(arguments, job, schedule, recorder)
    weights = [weight for stage in stages.values() for weight in stage.part.parameters()]
    optimizer = build_optimizer(arguments.optimizer, weights, arguments.learning_rate)
    shape = (arguments.microbatch_size, arguments.seq_len, arguments.dim)
    worker = Worker(job, schedule, stages, shape, arguments.torch_dtype)
    report = Report(arguments, job, schedule, recorder)

    for step in report.steps():
        inputs, targets = microbatches_of(arguments, job, step)
        optimizer.zero_grad()
        loss = worker.run_step(inputs, targets)
        optimizer.step()
        report.record_step(step, loss)

    report.finish()
    leave_job(job)
    return 0 if report.verify() else 1


def parse_arguments():
    parser = training_parser(__doc__.splitlines()[0])
    add = parser.add_argument
    kept = "; ".join(f"{mode}: {what}" for mode, what in MODES.items())
    add("--recompute", choices=list(MODES), default="stage", help=kept)
    add(
        "--pieces",
        type=positive_integer,
        metavar="C",
        help="of a stage, whose inputs --recompute stage keeps; 1 unless given",
    )
    names = synchronous_schedules()
    add("--schedule", choices=names, default="gpipe", help="order of the actions")
    add("--chunks", type=positive_integer, metavar="V", help="stages a rank")
    arguments = parse_training_arguments(parser, lambda flags: choose_schedule(flags).num_stages)
    check_pieces(arguments)
    arguments.paced = pace_with_recompute(arguments)
    return arguments, choose_schedule(arguments)


def check_pieces(arguments):
    """Refuse more pieces than a stage has layers, or pieces that nothing asks for."""
    if arguments.pieces is None:
        arguments.pieces = 1
    elif arguments.recompute != "stage":
        refuse(
            f"--pieces are for --recompute stage, not {arguments.recompute}; leave it out, "
            "or change --recompute"
        )
    fewest = min(last - first for first, last in arguments.stage_layers)
    if arguments.pieces > fewest:
        refuse(f"--pieces {arguments.pieces}: a stage has {fewest} layers; use at most {fewest}")


def pace_with_recompute(arguments):
    """The pace, with a forward on top of each backward where a whole stage is recomputed.

    What attention alone would add is no time that --pace gives, so nothing is added for it.
    """
    pace = arguments.paced
    if pace is None or arguments.recompute in ("none", "selective"):
        return pace
    if pace.forward + pace.backward >= 1000 * arguments.timeout:
        refuse(
            f"--pace: a backward that recomputes takes {pace.forward + pace.backward:g} ms and "
            f"outlasts --timeout {arguments.timeout:g} s; use shorter times or a longer --timeout"
        )
    return replace(pace, recompute=pace.forward)


def build_stages(arguments, job, schedule, recorder):
    """This rank's stages by index; whichever has the last one has the loss."""

    def share_of_loss(scores, targets):
        # The mean over the batch is the mean of the micro-batches' means: they are equally large.
        return token_loss(scores, targets) / arguments.microbatches

    stages = {}
    for index in schedule.stages_of(job.rank):
        first, last = arguments.stage_layers[index]
        part = build_part(
            arguments.config, first, last, arguments.seed, arguments.torch_dtype, job.device
        )
        stages[index] = build_recomputing_stage(
            arguments.recompute,
            arguments.pieces,
            part,
            index,
            schedule.num_stages,
            recorder,
            share_of_loss,
        )
    return stages


def microbatches_of(arguments, job, step):
    """Inputs and targets of one step, each a list of (micro-batch size, length) tokens."""
    batch = arguments.text.batch(step, arguments.batch_size, arguments.seq_len, arguments.seed)
    return tuple(tokens.to(job.device).chunk(arguments.microbatches) for tokens in batch)


if __name__ == "__main__":
    sys.exit(main())
