"""Distributed checkpointing: save a pipeline, lose a rank, go on with fewer (lesson 07).

    mkdir -p build
    torchrun --standalone --nproc-per-node 4 source_code/distributed_checkpointing.py \\
        --checkpoints build/run --steps 20 --verify

Started again with the same folder, it continues from the newest checkpoint there, on any number of
ranks, with any schedule. A folder of another model is refused; --fresh begins anew beside what is
there and --from-step N continues from an older checkpoint: both write to a new run-NNNN in the
folder, and nothing that was saved is touched.

SIGTERM or SIGUSR1, to any rank, lets the step end, saves, and ends every rank with status 75.
torchrun turns every status into 1, so the file FOLDER/stopped says the same: it is there from such
an end until the training is started again. A job script goes on with

    srun bash -c 'trap "" USR1; exec torchrun ... --checkpoints FOLDER'; status=$?
    [ -e FOLDER/stopped ] && scontrol requeue "$SLURM_JOB_ID"
    exit $status

(torchrun itself would die of SIGUSR1, hence the trap, which it inherits; the ranks listen anew.)

A loss, gradient norm or weight that is not finite ends every rank with status 1. Nothing is saved
from then on, so the checkpoints before it stay.

A loss, gradient norm or weight that is not finite ends every rank with status 1. Nothing is saved
from then on, so the checkpoints before it stay.

    python source_code/distributed_checkpointing.py --checkpoints build/run --export build/model.pt

writes the newest checkpoint as one file for torch.load, and --import FILE begins from it where the
folder has no checkpoint yet.
"""

import functools
import sys

from pipeline.arguments import (
    check_rate,
    choose_schedule,
    parse_training_arguments,
    positive_integer,
    positive_number,
    training_parser,
)
from pipeline.checkpointing.checkpoint import Training
from pipeline.checkpointing.checkpoint_arguments import (
    add_checkpoint_arguments,
    check_checkpoint_arguments,
    continue_training,
    end_diverged,
    export_newest,
)
from pipeline.checkpointing.checkpoint_folder import mark_stopped
from pipeline.checkpointing.stop_request import STOPPED, StopRequest
from pipeline.distributed import join_job, leave_job
from pipeline.model import build_part, token_loss
from pipeline.optimization.clipping import clip_gradients, norm_of, scale_gradients, squares_of
from pipeline.optimization.finite import find_not_finite
from pipeline.optimization.learning_rate import WarmUpThenCosine, share_of_peak
from pipeline.optimizer import build_optimizer
from pipeline.recorder import Recorder
from pipeline.reference import train_one_process
from pipeline.report import Report
from pipeline.schedules import synchronous_schedules
from pipeline.stage import Stage
from pipeline.worker import Worker


def main():
    arguments = parse_arguments()
    if arguments.export:
        return export_newest(arguments)
    schedule = arguments.built_schedule
    job = join_job(arguments.device, arguments.timeout, schedule.pairs)
    stop_request = StopRequest() if arguments.checkpoints else None
    recorder = Recorder(job, arguments.paced)
    stages = build_stages(arguments, job, schedule, recorder)
    training = build_training(arguments, stages)
    checkpoints = continue_training(arguments, job, training)
    shape = (arguments.microbatch_size, arguments.seq_len, arguments.dim)
    worker = Worker(job, schedule, stages, shape, arguments.torch_dtype)
    report = Report(arguments, job, schedule, recorder, first_step=training.step)

    stopped = diverged = None
    for step in report.steps():
        inputs, targets = microbatches_of(arguments, job, training.batches)
        training.optimizer.zero_grad()
        loss = worker.run_step(inputs, targets)
        norm = None
        if arguments.clip:
            norm = clip_gradients(job, training.parameters.items(), arguments.clip)
        training.optimizer.step()
        training.advance()
        report.record_step(step, loss)
        diverged = find_not_finite(job, step, loss, norm)
        if checkpoints and not diverged:
            stopped = stop_request.agreed(job)
            due = training.step % arguments.save_every == 0 or training.step == arguments.steps
            if stopped or due:
                diverged = checkpoints.save(training)
        if stopped or diverged:
            break

    status = finish(arguments, job, training, checkpoints, report, stopped, diverged)
    leave_job(job)
    if stopped or diverged:
        return status
    kept = report.verify(
        functools.partial(train_one_process, before_update=before_update(arguments))
    )
    return status if kept else 1


def parse_arguments():
    parser = training_parser(__doc__.splitlines()[0])
    add = parser.add_argument
    add("--schedule", choices=synchronous_schedules(), default="1f1b", help="order of the work")
    add("--chunks", type=positive_integer, default=1, metavar="V", help="stages on each rank")
    add("--warm-up-steps", type=positive_integer, metavar="N", help="updates to the peak, else 2")
    add("--decay-steps", type=positive_integer, metavar="N", help="end of the cosine, else --steps")
    add("--clip", type=positive_number, metavar="X", help="largest norm of the whole gradient")
    add_checkpoint_arguments(parser)
    arguments = parse_training_arguments(parser, lambda flags: choose_schedule(flags).num_stages)
    further = {"warm_up_steps": 2, "decay_steps": max(arguments.steps, 3), "clip": None}
    check_checkpoint_arguments(arguments, further)
    check_rate(arguments)
    arguments.built_schedule = choose_schedule(arguments)
    return arguments


def build_stages(arguments, job, schedule, recorder):
    """This rank's stages by index: their layers and, with the last one, the loss."""

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


def build_training(arguments, stages):
    """All that a checkpoint holds of this rank: one optimizer for the parameters of all its stages."""
    parameters = dict(pair for stage in stages.values() for pair in stage.part.named_parameters())
    optimizer = build_optimizer(arguments.optimizer, parameters.values(), arguments.learning_rate)
    rate = WarmUpThenCosine(
        optimizer, arguments.learning_rate, arguments.warm_up_steps, arguments.decay_steps
    )
    return Training(parameters, optimizer, rate, arguments.configuration, arguments.seed)


def microbatches_of(arguments, job, number):
    """Inputs and targets of batch `number`, each a list of (micro-batch size, length) tokens."""
    batch = arguments.text.batch(number, arguments.batch_size, arguments.seq_len, arguments.seed)
    return tuple(tokens.to(job.device).chunk(arguments.microbatches) for tokens in batch)


def finish(arguments, job, training, checkpoints, report, stopped, diverged):
    """The end of the run, on every rank. Returns the exit status."""
    if checkpoints:
        checkpoints.finish()
    if report.events_per_step:
        report.finish()
    elif job.rank == 0:
        print(f"nothing is left to do: {training.step} steps of --steps {arguments.steps} are done")
    if diverged:
        return end_diverged(job, diverged, checkpoints)
    if checkpoints and checkpoints.problem:
        return 1
    if not stopped:
        return 0
    if job.rank == 0:
        mark_stopped(arguments.checkpoints, f"{stopped.name} after {training.step} steps")
        print(f"stopped by {stopped.name} after {training.step} steps, saved", flush=True)
    return STOPPED


def before_update(arguments):
    """What one process does between backward and update: it clips, and sets the rate."""

    def clip_and_set_rate(model, optimizer, step):
        parameters = list(model.named_parameters())
        if arguments.clip:
            scale_gradients(parameters, norm_of(squares_of(parameters)), arguments.clip)
        share = share_of_peak(step, arguments.warm_up_steps, arguments.decay_steps)
        optimizer.param_groups[0]["lr"] = arguments.learning_rate * share

    return clip_and_set_rate


if __name__ == "__main__":
    sys.exit(main())
