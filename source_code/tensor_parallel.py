# SPDX-License-Identifier: Apache-2.0
"""Three dimensions: replicas x pipeline stages x ranks that share every layer.

    torchrun --standalone --nproc-per-node 8 tensor_parallel.py \\
        --replicas 2 --tensor 2 --clip 0.5 --padding --verify

Eight ranks are then 2 replicas of a pipeline of 2 stages, and each stage is 2 ranks with half of
every matrix. The losses are those of one process. With --sequence split a rank keeps only its part
of the sequence between layers, so a message between stages is cut into --tensor parts.
"""

import sys
from functools import partial

from extensions.checkpointing.checkpoint_arguments import (
    add_checkpoint_arguments,
    check_checkpoint_arguments,
    continue_training,
    save_when_due,
    status_of_end,
)
from extensions.checkpointing.stop_request import StopRequest
from extensions.data_parallel.replica_arguments import add_replica_arguments, check_replicas
from extensions.data_parallel.replicas import AllReduce, DataParallelWorker, form_replicas
from extensions.optimization.clipping import clip_gradients
from extensions.optimization.finite import find_not_finite
from extensions.optimization.update import clip_whole_model
from extensions.pretraining.padding import Sentences, count_real_tokens
from extensions.tensor_parallel.mesh import (
    add_mesh_flags,
    build_mesh,
    own_rows,
    spread,
    stage_ranks,
    start_sharded_job,
)
from extensions.tensor_parallel.sharded_part import ShareOfSplitLoss, build_sharded_part
from extensions.tensor_parallel.sharded_training import (
    build_training,
    named_for_norm,
    sum_whole_gradients,
)
from extensions.tensor_parallel.tensor_group import describe, tensor_group_of
from guard.around_main import guarded
from lab import attach
from pipeline.collectives import connect_group
from pipeline.command_line import positive_number
from pipeline.one_process import train_one_process
from pipeline.schedules.from_flags import add_schedule_flags, choose_schedule
from pipeline.split_stage import stage_class_for
from pipeline.training import LossLog, cut_layers, parse_arguments, training_parser


@guarded
def main():
    arguments, schedule = read_flags()
    cut = cut_layers(arguments, schedule.num_stages)
    job = start_sharded_job(arguments, schedule)
    stop_request = StopRequest() if arguments.checkpoints else None
    replicas = form_replicas(job, arguments.replicas)
    mesh = build_mesh(arguments, job)
    group = tensor_group_of(job, mesh, arguments.sequence == "split")
    connect_group(job, group.group, group.ranks)
    job.groups[group.ranks] = group.group
    reduction = AllReduce(replicas, schedule)
    loss_function = ShareOfSplitLoss(group)
    stages = build_stages(arguments, job, schedule, cut, group, loss_function, reduction)
    training = build_training(arguments, stages, mesh)
    checkpoints = continue_training(arguments, job, training)
    worker = DataParallelWorker(job, schedule, stages, reduction)
    attach.observe(arguments, job, stages.values(), schedule, first_step=training.step)
    prints = job.rank == schedule.rank_of(schedule.num_stages - 1, 0)
    log = LossLog(arguments, prints, training.step)

    ending = None  # why the training ends before its last step
    for step in range(training.step, arguments.steps):
        batch = arguments.text.batch(step, arguments.batch_size, arguments.seq_len, arguments.seed)
        loss_function.real_tokens = count_real_tokens([batch[1]])
        inputs, targets = own_rows(batch, arguments, replicas.replica, group.index, job.device)
        training.optimizer.zero_grad()
        loss = replicas.sum_loss(worker.run_step(inputs, targets))
        sum_whole_gradients(job, group, training.parameters)
        norm = clip_gradients(job, named_for_norm(training.parameters, group), arguments.clip)
        ending = find_not_finite(job, step, loss, norm)
        if not ending:
            training.optimizer.step()
        training.advance()
        log.add(step, loss)
        if not ending:
            ending = save_when_due(arguments, job, training, checkpoints, stop_request)
        if ending:
            break

    describe(arguments, job, schedule, group)
    status = status_of_end(job, training, checkpoints, ending)
    job.leave()
    reference = partial(train_one_process, before_update=clip_whole_model)
    return log.finish(job.device, reference, not ending) or status


def build_stages(arguments, job, schedule, cut, group, loss_function, reduction):
    """Build this rank's stages by index, each with its part of the layers."""
    a, stages = arguments, {}
    stage_class = stage_class_for(schedule)
    for index in schedule.stages_of(job.rank):
        first, last = cut[index]
        part = build_sharded_part(a.config, first, last, group, a.seed, a.torch_dtype, job.device)
        part = reduction.wrap(part, index)
        stages[index] = stage_class(part, index, schedule.num_stages, loss_function)
    return stages


def read_flags():
    """The flags, and the schedule of all lanes of all replicas."""
    parser = training_parser(__doc__)
    add = parser.add_argument
    add_replica_arguments(parser)
    add_mesh_flags(parser)
    add_schedule_flags(parser, default="1f1b")
    add("--padding", action="store_true", help="end every row with its first full stop")
    add("--clip", type=positive_number, metavar="X", help="largest norm of the whole gradient")
    add_checkpoint_arguments(parser)
    parser.set_defaults(microbatches=4)
    attach.add_flags(parser)
    arguments = parse_arguments(parser)
    check_replicas(arguments)
    ranks = stage_ranks(arguments)
    if arguments.padding:
        arguments.text = Sentences(arguments.text.training, arguments.text.held_out)
    check_checkpoint_arguments(arguments, {"clip": None, "padding": False})
    return arguments, spread(
        choose_schedule(arguments, ranks), arguments.replicas, arguments.tensor
    )


if __name__ == "__main__":
    sys.exit(main())
