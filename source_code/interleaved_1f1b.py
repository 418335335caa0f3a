"""Interleaved 1F1B and looped BFS: several stages a rank, and less bubble (lesson 05).

    torchrun --standalone --nproc-per-node 4 source_code/interleaved_1f1b.py --chunks 2 --verify

Each rank has --chunks stages of the model that do not follow each other: with four ranks and two
chunks, rank 1 has stages 1 and 5.
"""

import sys

from pipeline.arguments import (
    choose_schedule,
    parse_training_arguments,
    positive_integer,
    training_parser,
)
from pipeline.distributed import join_job, leave_job
from pipeline.model import build_part, token_loss
from pipeline.optimizer import build_optimizer
from pipeline.recorder import Recorder
from pipeline.report import Report
from pipeline.stage import Stage
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
    parser.add_argument(
        "--schedule",
        choices=["interleaved-1f1b", "looped-bfs"],
        default="interleaved-1f1b",
        help="order of the actions",
    )
    parser.add_argument(
        "--chunks", type=positive_integer, default=2, metavar="V", help="stages a rank"
    )
    arguments = parse_training_arguments(parser, lambda flags: choose_schedule(flags).num_stages)
    return arguments, choose_schedule(arguments)


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
        stages[index] = Stage(part, index, schedule.num_stages, recorder, share_of_loss)
    return stages


def microbatches_of(arguments, job, step):
    """Inputs and targets of one step, each a list of (micro-batch size, length) tokens."""
    batch = arguments.text.batch(step, arguments.batch_size, arguments.seq_len, arguments.seed)
    return tuple(tokens.to(job.device).chunk(arguments.microbatches) for tokens in batch)


if __name__ == "__main__":
    sys.exit(main())
