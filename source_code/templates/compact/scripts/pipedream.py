from pipeline.arguments import parse_training_arguments, refuse, training_parser
from pipeline.asynchronous.weight_stash import StashingStage
from pipeline.distributed import join_job, leave_job
from pipeline.model import build_part, token_loss
from pipeline.optimizer import build_optimizer
from pipeline.report import Report
from pipeline.schedules import pipedream
from pipeline.worker import Worker


def main():
    arguments = parse_arguments()
    job = join_job(arguments.device, arguments.timeout)
    stage = build_stage(arguments, job)
    order = pipedream(job.num_ranks, arguments.steps).orders[job.rank]
    shape = (arguments.microbatch_size, arguments.seq_len, arguments.dim)
    report = Report(arguments, job)
    worker = Worker(job, order, stage, shape, arguments.torch_dtype, report.record_step)

    # One pass through the schedule is the whole training: the pipeline never drains in between.
    inputs, targets = microbatches_of(arguments, job)
    worker.run_step(inputs, targets)

    report.finish()
    leave_job(job)


def parse_arguments():
    parser = training_parser(__doc__.splitlines()[0])
    parser.set_defaults(microbatches=1, steps=12)
    arguments = parse_training_arguments(parser)
    if arguments.microbatches > 1:
        refuse("every mini-batch has an update of its own here; leave --microbatches out")
    if arguments.steps < arguments.num_ranks:
        refuse(f"--steps must be at least the {arguments.num_ranks} ranks, to fill them")
    return arguments


def build_stage(arguments, job):
    """This rank's stage with its optimizer, since it updates after each backward."""
    first, last = arguments.stage_layers[job.rank]
    part = build_part(arguments, first, last, job.device)
    optimizer = build_optimizer(arguments.optimizer, part.parameters(), arguments.learning_rate)
    return StashingStage(part, job.rank, job.num_ranks, token_loss, optimizer)
