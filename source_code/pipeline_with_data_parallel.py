"""Pipelines meet data parallelism: a mesh of replicas x stages (lesson 10).

    torchrun --standalone --nproc-per-node 4 source_code/pipeline_with_data_parallel.py \\
        --replicas 2 --verify

Four ranks are then two pipelines of two, each with half of the batch. Their gradients are summed
before the update, so that the losses are those of one process on the whole batch. --reduce says by
whom they are summed, and --library lets torch.distributed.pipelining perform the schedule.
"""

import functools
import statistics
import sys

from pipeline.arguments import choose_schedule, parse_training_arguments, training_parser
from pipeline.checkpointing.checkpoint import Training
from pipeline.checkpointing.checkpoint_arguments import (
    check_checkpoint_arguments,
    continue_training,
    end_diverged,
)
from pipeline.data_parallel.replica_arguments import (
    add_replica_arguments,
    check_replicas,
    choose_replicated_schedule,
    pipeline_ranks,
)
from pipeline.data_parallel.replicas import AllReduce, form_replicas, own_microbatches, replicate
from pipeline.distributed import gather, join_job, leave_job
from pipeline.model import build_part
from pipeline.optimization.clipping import clip_gradients, norm_of, scale_gradients, squares_of
from pipeline.optimization.finite import find_not_finite
from pipeline.optimization.learning_rate import ConstantRate
from pipeline.optimizer import build_optimizer
from pipeline.pretraining.padding import Sentences, ShareOfLoss, count_real_tokens
from pipeline.recorder import Recorder
from pipeline.reference import train_one_process
from pipeline.refusal import positive_integer, positive_number, refuse
from pipeline.report import Report
from pipeline.schedules import synchronous_schedules
from pipeline.stage import Stage
from pipeline.worker import Worker

SPLIT = ["zb-h1", "zb-h2", "zb-v", "dualpipe-v"]  # with backwards in two halves


def main():
    arguments, schedule = parse_arguments()
    job = join_job(arguments.device, arguments.timeout, schedule.pairs)
    replicas = form_replicas(job, arguments.replicas)
    recorder = Recorder(job, arguments.paced)
    reduction = build_reduction(arguments, replicas, schedule)
    parts = build_parts(arguments, job, schedule, reduction)
    training = build_training(arguments, parts)
    checkpoints = continue_training(arguments, job, training)
    loss_function = ShareOfLoss()
    worker = build_worker(arguments, replicas, schedule, parts, reduction, recorder, loss_function)
    report = Report(arguments, job, schedule, recorder, first_step=training.step)

    diverged = None
    for step in report.steps():
        inputs, targets = microbatches_of(arguments, replicas, step)
        loss_function.real_tokens = replicas.sum_number(count_real_tokens(targets.values()))
        training.optimizer.zero_grad()
        loss = replicas.sum_loss(worker.run_step(inputs, targets))
        reduction.finish()
        norm = None
        if arguments.clip:
            norm = clip_gradients(job, training.parameters.items(), arguments.clip)
        training.optimizer.step()
        training.advance()
        report.record_step(step, loss)
        diverged = find_not_finite(job, step, loss, norm)
        if checkpoints and not diverged and save_is_due(arguments, step):
            diverged = checkpoints.save(training)
        if diverged:
            break

    finish(arguments, job, checkpoints, report, reduction)
    status = end_diverged(job, diverged, checkpoints) if diverged else 0
    leave_job(job)
    if diverged:
        return status
    one_process = functools.partial(train_one_process, before_update=before_update(arguments))
    return 0 if report.verify(one_process) else 1


def parse_arguments():
    parser = training_parser(__doc__.splitlines()[0])
    add = parser.add_argument
    add_replica_arguments(parser)
    add("--reduce", choices=["all-reduce", "ddp", "fsdp2"], default="all-reduce",
        help="who sums the gradients of the replicas")  # fmt: skip
    add("--library", action="store_true", help="let torch.distributed.pipelining do the work")
    names = synchronous_schedules()
    add("--schedule", choices=names, default="1f1b", help="order of the work in a pipeline")
    add("--chunks", type=positive_integer, metavar="V", help="stages on each rank")
    add("--padding", action="store_true", help="end every row with its first full stop")
    add("--clip", type=positive_number, metavar="X", help="largest norm of the whole gradient")
    add("--checkpoints", metavar="FOLDER", help="save there, and continue from what is there")
    add("--save-every", type=positive_integer, metavar="N", help="steps from save to save, else 5")
    parser.set_defaults(microbatches=4, keep=None, asynchronous=False, fresh=False, from_step=None,
                        export=None, import_file=None)  # fmt: skip
    arguments = parse_training_arguments(parser, num_stages_of)
    check_replicas(arguments)
    if arguments.padding:
        arguments.text = Sentences(arguments.text.training, arguments.text.held_out)
    check_checkpoint_arguments(arguments, {"clip": None, "padding": False})
    schedule = choose_replicated_schedule(arguments)
    return arguments, check_reduction(arguments, schedule)


def num_stages_of(arguments):
    ranks = pipeline_ranks(arguments)
    arguments.stages = choose_schedule(arguments, ranks).num_stages
    arguments.chunks = arguments.stages // ranks
    return arguments.stages


def check_reduction(arguments, schedule):
    """Refuse what would be wrong. Returns the schedule that will be performed."""
    if arguments.reduce == "ddp" and arguments.schedule in SPLIT:
        refuse(
            f"--reduce ddp with --schedule {arguments.schedule}: a backward in two halves passes "
            "by the hooks of DDP, which would sum nothing and say nothing; use all-reduce or fsdp2"
        )
    if arguments.reduce == "fsdp2" and arguments.record:
        refuse(
            "--record with --reduce fsdp2: no rank has a whole weight or gradient to take a "
            "fingerprint of; use --reduce all-reduce or ddp"
        )
    if not arguments.library:
        return schedule
    # Seconds, which only --library needs.
    from pipeline.torch_pipelining import library, library_worker

    if arguments.schedule not in library_worker.NAMES:
        refuse(
            f"--library has no --schedule {arguments.schedule}; use one of "
            f"{', '.join(library_worker.NAMES)}"
        )
    name = library_worker.NAMES[arguments.schedule]
    sizes = name, pipeline_ranks(arguments), arguments.microbatches, arguments.chunks
    if complaint := library.complaint_about(*sizes):
        refuse(complaint)
    arguments.device = library.device_without_sharing(arguments.device)
    return replicate(library.schedule_as_data(*sizes), arguments.replicas)


def build_reduction(arguments, replicas, schedule):
    """Who sums the gradients, and when."""
    if arguments.reduce == "all-reduce":
        return AllReduce(replicas, schedule)
    # Half a second, which all-reduce saves.
    from pipeline.data_parallel.wrappers import WithDDP, WithFSDP2

    return {"ddp": WithDDP, "fsdp2": WithFSDP2}[arguments.reduce](replicas, schedule)


def build_parts(arguments, job, schedule, reduction):
    """The layers of this rank's stages, by stage; the same in all replicas."""
    parts = {}
    for index in schedule.stages_of(job.rank):
        first, last = arguments.stage_layers[index]
        part = build_part(
            arguments.config, first, last, arguments.seed, arguments.torch_dtype, job.device
        )
        parts[index] = reduction.wrap(part, index)
    return parts


def build_training(arguments, parts):
    """All that a checkpoint holds of this rank, under the names of the whole model."""
    parameters = {
        name.removeprefix("module."): parameter  # the prefix is DDP's
        for part in parts.values()
        for name, parameter in part.named_parameters()
    }
    optimizer = build_optimizer(arguments.optimizer, parameters.values(), arguments.learning_rate)
    return Training(parameters, optimizer, ConstantRate(), arguments.configuration, arguments.seed)


def build_worker(arguments, replicas, schedule, parts, reduction, recorder, loss_function):
    """Who performs the schedule: this course's worker or the library."""
    shape = (arguments.microbatch_size, arguments.seq_len, arguments.dim)
    if arguments.library:
        from pipeline.torch_pipelining.library_worker import LibraryWorker

        return LibraryWorker(
            replicas, arguments.schedule, schedule.num_stages, parts, shape,
            arguments.torch_dtype, arguments.microbatches, recorder, loss_function,
            reduction.collect,
        )  # fmt: skip
    stages = {
        index: Stage(part, index, schedule.num_stages, recorder, loss_function)
        for index, part in parts.items()
    }
    return Worker(replicas.job, schedule, stages, shape, arguments.torch_dtype, reduction.around)


def microbatches_of(arguments, replicas, step):
    """Inputs and targets of one step: this replica's rows, by micro-batch."""
    batch = arguments.text.batch(step, arguments.batch_size, arguments.seq_len, arguments.seed)
    return own_microbatches(batch, replicas, arguments.microbatches, replicas.job.device)


def save_is_due(arguments, step):
    return (step + 1) % arguments.save_every == 0 or step + 1 == arguments.steps


def finish(arguments, job, checkpoints, report, reduction):
    """The end of the run, on every rank."""
    if checkpoints:
        checkpoints.finish()
    if not report.events_per_step:
        if job.rank == 0:
            report.say(f"nothing is left to do: --steps {arguments.steps} are done")
        return
    report.finish()
    text = f"replicas {arguments.replicas} x stages {arguments.stages}, sums by {arguments.reduce}"
    if arguments.reduce == "all-reduce" and arguments.replicas > 1:
        late = gather(job, lateness(report, reduction))
        text += f", there {late_of_ranks(late)} ms after the last action of all" if late else ""
    if job.rank == 0:
        report.say(text)


def lateness(report, reduction):
    """For each step: when this rank's last action ended and when its sums were there, in ms."""
    ends = [events[-1].end for events in report.events_per_step]
    origin = report.recorder.origin
    return ends, [(moment - origin) * 1000 for moment in reduction.done_at]


def late_of_ranks(late):
    """The median over the steps for each rank, from what `lateness` says of all ranks."""
    last = [max(ends) for ends in zip(*(ends for ends, _ in late))]
    medians = [statistics.median(map(float.__sub__, done, last)) for _, done in late]
    return " ".join(f"{median:+.1f}" for median in medians)


def before_update(arguments):
    """What one process does between backward and update: it clips."""

    def clip(model, optimizer, step):
        parameters = list(model.named_parameters())
        if arguments.clip:
            scale_gradients(parameters, norm_of(squares_of(parameters)), arguments.clip)

    return clip


if __name__ == "__main__":
    sys.exit(main())
