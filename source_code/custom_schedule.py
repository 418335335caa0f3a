"""Performs a schedule of your own, read from a CSV file (lessons 09 and 12).

    python source_code/predict.py zb-h1 --csv mine.csv
    torchrun --standalone --nproc-per-node 4 source_code/custom_schedule.py mine.csv --verify

A row a rank, cells such as 0F3: stage, kind (F, B, or I and W for a backward in two halves) and
micro-batch. The number of micro-batches and of stages is the file's. With --pace-per-layer a stage
takes as many times --pace as it has layers, which --cut can make uneven.
"""

import sys
from dataclasses import replace

from pipeline.arguments import parse_training_arguments, refuse, training_parser
from pipeline.distributed import join_job, leave_job
from pipeline.legal import check_legal
from pipeline.model import build_part, token_loss
from pipeline.optimizer import build_optimizer
from pipeline.recorder import Recorder
from pipeline.report import Report
from pipeline.schedule import ScheduleError, read_csv
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
    parser.add_argument("file", metavar="FILE.csv", help="the schedule, a row a rank")
    parser.add_argument(
        "--pace-per-layer", action="store_true", help="--pace is the time of one layer"
    )
    parser.set_defaults(microbatches=None)
    flags = parser.parse_args()
    schedule = read_schedule(flags.file)
    if flags.microbatches not in (None, schedule.num_microbatches):
        refuse(
            f"--microbatches {flags.microbatches} contradicts {flags.file}, which has "
            f"{schedule.num_microbatches}; leave the flag out"
        )
    parser.set_defaults(microbatches=schedule.num_microbatches)
    arguments = parse_training_arguments(parser, lambda _: schedule.num_stages)
    if schedule.num_ranks != arguments.num_ranks:
        refuse(
            f"{flags.file} is for {schedule.num_ranks} ranks, one a row, and this job has "
            f"{arguments.num_ranks}; start it with --nproc-per-node {schedule.num_ranks}"
        )
    if arguments.pace_per_layer:
        arguments.paced = pace_by_layers(arguments)
    return arguments, schedule


def pace_by_layers(arguments):
    """--pace times the number of layers of each stage, as Costs in milliseconds."""
    pace = arguments.paced
    if pace is None:
        refuse("--pace-per-layer says what --pace is the time of; give --pace, too")
    layers = [last - first for first, last in arguments.stage_layers]
    longest = max(layers) * max(pace.forward, pace.backward)
    if longest >= 1000 * arguments.timeout:
        refuse(
            f"--pace-per-layer: an action of a stage with {max(layers)} layers takes {longest:g} ms "
            f"and outlasts --timeout {arguments.timeout:g} s; use a shorter --pace"
        )
    weight = pace.backward / 2 if pace.backward_weight is None else pace.backward_weight
    return replace(
        pace,
        forward=[pace.forward * count for count in layers],
        backward=[pace.backward * count for count in layers],
        backward_weight=[weight * count for count in layers],
    )


def read_schedule(path):
    """The schedule in a file, or a refusal that says which action of which rank is wrong."""
    try:
        schedule = check_legal(read_csv(path))
    except ScheduleError as error:
        refuse(f"{path}: {error}; mend that row")
    except (OSError, UnicodeDecodeError):
        refuse(f"{path} is no CSV file that can be read; name one that predict.py --csv wrote")
    if any(action.kind == "U" for order in schedule.orders for action in order):
        refuse(
            f"{path} has updates (U) in the middle of the step; only pipedream.py performs those"
        )
    return schedule


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
