import torch.distributed as dist

from pipeline.arguments import parse_training_arguments, positive_integer, training_parser
from pipeline.checkpointing.checkpoint import Checkpoints
from pipeline.distributed import join_job
from pipeline.model import build_part, token_loss
from pipeline.optimization.learning_rate import set_rate
from pipeline.optimizer import build_optimizer
from pipeline.report import Report
from pipeline.schedules import one_f_one_b
from pipeline.stage import Stage
from pipeline.worker import Worker


def main():
    arguments = parse_arguments()
    job = join_job(arguments.device, arguments.timeout)
    stage = build_stage(arguments, job)
    optimizer = build_optimizer(
        arguments.optimizer, stage.part.parameters(), arguments.learning_rate
    )
    checkpoints = Checkpoints(job, arguments.checkpoints, stage.part, optimizer)
    order = one_f_one_b(job.rank, job.num_ranks, arguments.microbatches)
    shape = (arguments.microbatch_size, arguments.seq_len, arguments.dim)
    worker = Worker(job, order, stage, shape, arguments.torch_dtype)
    report = Report(arguments, job, first_step=checkpoints.restore())

    for step in report.steps():
        inputs, targets = microbatches_of(arguments, job, step)
        warm_up, decay = arguments.warm_up_steps, arguments.decay_steps
        set_rate(optimizer, arguments.learning_rate, step, warm_up, decay)
        optimizer.zero_grad()
        loss = worker.run_step(inputs, targets)
        optimizer.step()
        report.record_step(step, loss)
        if (step + 1) % arguments.save_every == 0 or step + 1 == arguments.steps:
            checkpoints.save(step + 1)

    report.finish()
    dist.destroy_process_group()


def parse_arguments():
    parser = training_parser(__doc__.splitlines()[0])
    add = parser.add_argument
    add("--warm-up-steps", type=positive_integer, default=2, metavar="N", help="to the peak")
    add("--decay-steps", type=positive_integer, metavar="N", help="end of the cosine")
    add("--checkpoints", default="checkpoints", metavar="FOLDER", help="save and continue there")
    add("--save-every", type=positive_integer, default=5, metavar="N", help="steps")
    arguments = parse_training_arguments(parser)
    arguments.decay_steps = arguments.decay_steps or max(arguments.steps, 3)
    return arguments


def build_stage(arguments, job):
    """This rank's stage: its layers and, on the last rank, the loss."""

    def share_of_loss(scores, targets):
        # The mean over the batch is the mean of the micro-batches' means: they are equally large.
        return token_loss(scores, targets) / arguments.microbatches

    part = build_part(arguments, *arguments.stage_layers[job.rank], job.device)
    return Stage(part, job.rank, job.num_ranks, share_of_loss)
