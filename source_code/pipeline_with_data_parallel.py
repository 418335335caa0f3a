"""Pipelines meet data parallelism: a mesh of replicas x stages (lesson 10).

    torchrun --standalone --nproc-per-node 4 source_code/pipeline_with_data_parallel.py \\
        --replicas 2 --verify

Four ranks are then two pipelines of two, each with half of the batch. Their gradients are summed
before the update, so that the losses are those of one process on the whole batch.
"""

import functools
import sys

from pipeline.arguments import parse_training_arguments, training_parser
from pipeline.clipping import clip_gradients, norm_of, scale_gradients, squares_of
from pipeline.distributed import join_job, leave_job
from pipeline.model import build_part
from pipeline.optimizer import build_optimizer
from pipeline.padding import Sentences, ShareOfLoss, count_real_tokens
from pipeline.recorder import Recorder
from pipeline.reference import train_one_process
from pipeline.refusal import positive_integer, positive_number
from pipeline.replica_arguments import (
    add_replica_arguments,
    check_replicas,
    choose_replicated_schedule,
    pipeline_ranks,
)
from pipeline.replicas import AllReduce, form_replicas, own_microbatches
from pipeline.report import Report
from pipeline.schedules import GENERATORS
from pipeline.stage import Stage
from pipeline.worker import Worker

SCHEDULES = [name for name in GENERATORS if name not in ("naive", "pipedream")]


def main():
    arguments, schedule = parse_arguments()
    job = join_job(arguments.device, arguments.timeout, schedule.pairs)
    replicas = form_replicas(job, arguments.replicas)
    recorder = Recorder(job, arguments.paced)
    loss_function = ShareOfLoss()
    stages = build_stages(arguments, job, schedule, recorder, loss_function)
    parameters = dict(pair for stage in stages.values() for pair in stage.part.named_parameters())
    optimizer = build_optimizer(arguments.optimizer, parameters.values(), arguments.learning_rate)
    reduction = AllReduce(replicas, schedule)
    for index, stage in stages.items():
        reduction.wrap(stage.part, index)
    shape = (arguments.microbatch_size, arguments.seq_len, arguments.dim)
    worker = Worker(job, schedule, stages, shape, arguments.torch_dtype, reduction.around)
    report = Report(arguments, job, schedule, recorder)

    for step in report.steps():
        inputs, targets = microbatches_of(arguments, replicas, step)
        loss_function.real_tokens = replicas.sum_number(count_real_tokens(targets.values()))
        optimizer.zero_grad()
        loss = worker.run_step(inputs, targets)
        reduction.finish()
        if arguments.clip:
            clip_gradients(job, parameters.items(), arguments.clip)
        optimizer.step()
        report.record_step(step, replicas.sum_loss(loss))

    report.finish()
    leave_job(job)
    one_process = functools.partial(train_one_process, before_update=before_update(arguments))
    return 0 if report.verify(one_process) else 1


def parse_arguments():
    parser = training_parser(__doc__.splitlines()[0])
    add = parser.add_argument
    add_replica_arguments(parser)
    add("--schedule", choices=SCHEDULES, default="1f1b", help="order of the work in a pipeline")
    add("--chunks", type=positive_integer, metavar="V", help="stages on each rank")
    add("--padding", action="store_true", help="end every row with its first full stop")
    add("--clip", type=positive_number, metavar="X", help="largest norm of the whole gradient")
    parser.set_defaults(microbatches=4)
    arguments = parse_training_arguments(parser, num_stages_of)
    check_replicas(arguments)
    if arguments.padding:
        arguments.text = Sentences(arguments.text.training, arguments.text.held_out)
    return arguments, choose_replicated_schedule(arguments)


def num_stages_of(arguments):
    from pipeline.schedules import CHUNKED

    chunks = arguments.chunks or (2 if arguments.schedule in CHUNKED else 1)
    return pipeline_ranks(arguments) * chunks


def build_stages(arguments, job, schedule, recorder, loss_function):
    """This rank's stages by index; a stage has the same weights in all replicas."""
    stages = {}
    for index in schedule.stages_of(job.rank):
        first, last = arguments.stage_layers[index]
        part = build_part(
            arguments.config, first, last, arguments.seed, arguments.torch_dtype, job.device
        )
        stages[index] = Stage(part, index, schedule.num_stages, recorder, loss_function)
    return stages


def microbatches_of(arguments, replicas, step):
    """Inputs and targets of one step: this replica's rows, by micro-batch."""
    batch = arguments.text.batch(step, arguments.batch_size, arguments.seq_len, arguments.seed)
    return own_microbatches(batch, replicas, arguments.microbatches, replicas.job.device)


def before_update(arguments):
    """What one process does between backward and update: it clips."""

    def clip(model, optimizer, step):
        parameters = list(model.named_parameters())
        if arguments.clip:
            scale_gradients(parameters, norm_of(squares_of(parameters)), arguments.clip)

    return clip


if __name__ == "__main__":
    sys.exit(main())
