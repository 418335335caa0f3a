"""Three dimensions: replicas x pipeline stages x ranks that share every layer.

    torchrun --standalone --nproc-per-node 8 source_code/tensor_parallel.py \\
        --replicas 2 --tensor 2 --clip 0.5 --padding --verify

Eight ranks are then 2 replicas of a pipeline of 2 stages, of which each is 2 ranks with half of
every matrix. The losses are those of one process. --sequence split lets a rank keep only its part
of the sequence between layers, so that a message between stages is cut into --tensor parts.
"""

import sys
from functools import partial

from extensions.checkpointing.checkpoint_arguments import (
    check_checkpoint_arguments,
    continue_training,
    nothing_left,
    status_of_end,
)
from extensions.data_parallel.replica_arguments import add_replica_arguments, check_replicas
from extensions.data_parallel.replicas import AllReduce, DataParallelWorker, form_replicas
from extensions.optimization.clipping import clip_gradients
from extensions.optimization.finite import find_not_finite
from extensions.optimization.learning_rate import ConstantRate
from extensions.optimization.update import clip_whole_model
from extensions.pretraining.padding import Sentences, count_real_tokens
from extensions.tensor_parallel.mesh import (
    add_mesh_flags,
    build_mesh,
    own_rows,
    spread,
    stage_ranks,
)
from extensions.tensor_parallel.sharded_part import (
    ShareOfSplitLoss,
    build_sharded_part,
    split_dimension,
)
from extensions.tensor_parallel.sharded_training import ShardedTraining
from extensions.tensor_parallel.tensor_group import tensor_group_of
from lab import attach
from pipeline.collectives import Summing, connect_group, gather
from pipeline.command_line import positive_integer, positive_number
from pipeline.job import join_job
from pipeline.schedules.from_flags import add_schedule_flags, choose_schedule
from pipeline.split_stage import stage_class_for
from pipeline.training import (
    LossLog,
    build_optimizer,
    cut_layers,
    parse_arguments,
    train_one_process,
    training_parser,
)


def main():
    arguments, schedule = read_flags()
    cut = cut_layers(arguments, schedule.num_stages)
    job = start_sharded_job(arguments, schedule)
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
    log = LossLog(arguments, has_loss(job, schedule), training.step)

    diverged = None
    nothing_left(arguments, job, training)
    for step in range(training.step, arguments.steps):
        batch = arguments.text.batch(step, arguments.batch_size, arguments.seq_len, arguments.seed)
        loss_function.real_tokens = count_real_tokens([batch[1]])
        inputs, targets = own_rows(batch, arguments, replicas.replica, group.index, job.device)
        training.optimizer.zero_grad()
        loss = replicas.sum_loss(worker.run_step(inputs, targets))
        sum_whole_gradients(job, group, training.parameters)
        norm = None
        if arguments.clip:
            norm = clip_gradients(job, named_for_norm(training.parameters, group), arguments.clip)
        training.optimizer.step()
        training.advance()
        log.add(step, loss)
        diverged = find_not_finite(job, step, loss, norm)
        due = training.step % arguments.save_every == 0 or training.step == arguments.steps
        if checkpoints and due and not diverged:
            diverged = checkpoints.save(training)
        if diverged:
            break

    describe(arguments, job, schedule, group)
    status = status_of_end(arguments, job, training, checkpoints, None, diverged)
    job.leave()
    reference = partial(train_one_process, before_update=clip_by(arguments))
    return log.finish(job.device, reference, verify=not diverged) or status


def sum_whole_gradients(job, group, parameters):
    """Add up the gradients of the norms, which are whole on every rank, over the tensor group.

    With the sequence split each rank has seen only its part of it. Else all have the same gradient.
    """
    if group.splits_sequence:
        whole = [p.grad for name, p in parameters.items() if split_dimension(name) is None]
        if whole:
            Summing(job, whole, group.ranks, "its gradients of the norms").wait()


def named_for_norm(parameters, group):
    """The parameters by names that are equal only where the gradients are: parts differ."""
    return [
        (name if split_dimension(name) is None else f"{name}, part {group.index}", parameter)
        for name, parameter in parameters.items()
    ]


def start_sharded_job(arguments, schedule):
    """Meet the other ranks. With the sequence split, a message has a part of the sequence."""
    a = arguments
    length = a.seq_len // (a.tensor if a.sequence == "split" else 1)
    shape = a.microbatch_size, length, a.dim
    return join_job(a.device, a.timeout, schedule.pairs, shape, a.torch_dtype)


def build_stages(arguments, job, schedule, cut, group, loss_function, reduction):
    """This rank's stages by index, each with its part of the layers."""
    a, stages = arguments, {}
    stage_class = stage_class_for(schedule)
    for index in schedule.stages_of(job.rank):
        first, last = cut[index]
        part = build_sharded_part(a.config, first, last, group, a.seed, a.torch_dtype, job.device)
        part = reduction.wrap(part, index)
        stages[index] = stage_class(part, index, schedule.num_stages, loss_function)
    return stages


def build_training(arguments, stages, mesh):
    """All that a checkpoint holds of this rank, under the names of the whole model."""
    a = arguments
    parameters = dict(pair for stage in stages.values() for pair in stage.part.named_parameters())
    optimizer = build_optimizer(a.optimizer, parameters.values(), a.learning_rate)
    return ShardedTraining(
        parameters, optimizer, ConstantRate(), a.configuration, a.seed, mesh=mesh["tensor"]
    )


def has_loss(job, schedule):
    """Whether this rank prints the losses: the first of the last stage's tensor group."""
    return job.rank == schedule.rank_of(schedule.num_stages - 1, 0)


def describe(arguments, job, schedule, group):
    """Say how the ranks lie, and what a rank has sent to those that share its layers."""
    sent = gather(job, dict(group.sent))
    if job.rank == 0 and arguments.steps:
        sizes = f"{arguments.replicas} replicas x {schedule.num_stages} stages x {group.size} ranks"
        bytes_of_rank_0 = ", ".join(f"{name} {count:,}" for name, count in sorted(sent[0].items()))
        print(f"{sizes}; bytes sent within a layer by rank 0: {bytes_of_rank_0 or 0}", flush=True)


def clip_by(arguments):
    """What one process does between backward and update."""

    def clip(model, optimizer, step):
        clip_whole_model(arguments, model)

    return clip


def read_flags():
    """The flags, and the schedule of all lanes of all replicas."""
    parser = training_parser(__doc__)
    add = parser.add_argument
    add_replica_arguments(parser)
    add_mesh_flags(parser)
    add_schedule_flags(parser, default="1f1b")
    add("--padding", action="store_true", help="end every row with its first full stop")
    add("--clip", type=positive_number, metavar="X", help="largest norm of the whole gradient")
    add("--checkpoints", metavar="FOLDER", help="save there, and continue from what is there")
    add("--save-every", type=positive_integer, metavar="N", help="steps from save to save, else 5")
    parser.set_defaults(microbatches=4, keep=None, asynchronous=False, fresh=False, from_step=None,
                        export=None, import_file=None)  # fmt: skip
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
