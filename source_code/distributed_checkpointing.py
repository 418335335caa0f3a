# SPDX-License-Identifier: Apache-2.0
"""Distributed checkpointing: save a pipeline, lose a rank, go on with fewer.

    torchrun --standalone --nproc-per-node 4 distributed_checkpointing.py \\
        --checkpoints build/run --steps 20 --verify

Started again with the same folder, it continues from the newest checkpoint there, on any number of
ranks, with any schedule. A folder of another model is rejected; --fresh begins anew beside what is
there and --from-step N continues from an older checkpoint: both write to a new run-NNNN in the
folder, and nothing that was saved is touched.

After SIGTERM or SIGUSR1 to any rank, the step ends, the training saves, and every rank ends with
status 75, or with 0 under torchrun, which would report any other status as a failure. The file
FOLDER/stopped exists from then on until the training is started again. A job script starts the
training, and continues it after a stop, with

    srun bash -c 'trap "" USR1; exec torchrun ... --checkpoints FOLDER'; status=$?
    [ -e FOLDER/stopped ] && scontrol requeue "$SLURM_JOB_ID"
    exit $status

(SIGUSR1 would end torchrun itself, so it inherits the trap; the ranks install their own handlers.)

A loss, gradient norm or weight that is not finite ends every rank with status 1. Nothing is saved
from then on, so the checkpoints before it stay.

convert.py --to-hf writes the newest checkpoint as a folder that transformers loads.
"""

import sys
from functools import partial

from extensions.checkpointing.checkpoint import Training
from extensions.checkpointing.checkpoint_arguments import (
    add_checkpoint_arguments,
    check_checkpoint_arguments,
    continue_training,
    save_when_due,
    status_of_end,
)
from extensions.checkpointing.stop_request import StopRequest
from extensions.optimization.clipping import clip_gradients
from extensions.optimization.finite import find_not_finite
from extensions.optimization.learning_rate import WarmUpThenCosine
from extensions.optimization.update import (
    add_update_flags,
    check_rate,
    clip_and_set_rate,
)
from guard.around_main import guarded
from lab import attach
from pipeline.one_process import build_optimizer, train_one_process
from pipeline.schedules.from_flags import add_schedule_flags, choose_schedule
from pipeline.split_stage import stage_class_for
from pipeline.training import (
    LossLog,
    build_stage,
    cut_layers,
    microbatches_of,
    parse_arguments,
    start_job,
    training_parser,
)
from pipeline.worker import Worker


@guarded
def main():
    arguments = read_flags()
    schedule = choose_schedule(arguments)
    cut = cut_layers(arguments, schedule.num_stages)
    job = start_job(arguments, schedule.pairs)
    stop_request = StopRequest() if arguments.checkpoints else None
    own, stage_class = schedule.stages_of(job.rank), stage_class_for(schedule)
    stages = {s: build_stage(arguments, s, cut, job.device, stage_class) for s in own}
    training = build_training(arguments, stages)
    checkpoints = continue_training(arguments, job, training)
    attach.observe(arguments, job, stages.values(), schedule, first_step=training.step)
    worker = Worker(job, schedule, stages)
    log = LossLog(arguments, any(s.is_last for s in stages.values()), training.step)

    ending = None  # why the training ends before its last step
    for step in range(training.step, arguments.steps):
        inputs, targets = microbatches_of(arguments, job.device, training.batches)
        training.optimizer.zero_grad()
        loss = worker.run_step(inputs, targets)
        norm = clip_gradients(job, training.parameters.items(), arguments.clip)
        ending = find_not_finite(job, step, loss, norm)
        if not ending:
            training.optimizer.step()
        training.advance()
        log.add(step, loss)
        if not ending:
            ending = save_when_due(arguments, job, training, checkpoints, stop_request)
        if ending:
            break

    status = status_of_end(job, training, checkpoints, ending)
    job.leave()
    reference = partial(train_one_process, before_update=clip_and_set_rate)
    return log.finish(job.device, reference, not ending) or status


def read_flags():
    parser = training_parser(__doc__)
    add_schedule_flags(parser, default="1f1b")
    add_update_flags(parser, warm_up_steps=2)
    add_checkpoint_arguments(parser)
    attach.add_flags(parser)
    arguments = parse_arguments(parser)
    warm_up = arguments.warm_up_steps or 2
    further = {"warm_up_steps": 2, "decay_steps": max(arguments.steps, warm_up + 1), "clip": None}
    check_checkpoint_arguments(arguments, further)
    check_rate(arguments)
    return arguments


def build_training(arguments, stages):
    """All that a checkpoint holds of this rank: one optimizer for the parameters of all its stages."""
    parameters = dict(pair for stage in stages.values() for pair in stage.part.named_parameters())
    optimizer = build_optimizer(arguments.optimizer, parameters.values(), arguments.learning_rate)
    rate = WarmUpThenCosine(
        optimizer, arguments.learning_rate, arguments.warm_up_steps, arguments.decay_steps
    )
    return Training(parameters, optimizer, rate, arguments.configuration, arguments.seed)


if __name__ == "__main__":
    sys.exit(main())
