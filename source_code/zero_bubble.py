"""Zero bubble: the backward in two halves, and what the second half is good for (lesson 09).

    torchrun --standalone --nproc-per-node 4 source_code/zero_bubble.py --schedule zb-h1 --verify

ZB-H1 and ZB-H2 have a stage a rank. ZB-V and DualPipeV have two, laid out as a V: with four ranks,
rank 0 has the first stage and the last, so that the loss is on rank 0.
"""

import sys

from pipeline.arguments import choose_schedule, parse_training_arguments, training_parser
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
        choices=["zb-h1", "zb-h2", "zb-v", "dualpipe-v"],
        default="zb-h1",
        help="order of the actions",
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
