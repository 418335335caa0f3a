# SPDX-License-Identifier: Apache-2.0
"""Pipelines meet data parallelism: a mesh of replicas x stages.

    torchrun --standalone --nproc-per-node 4 pipeline_with_data_parallel.py \\
        --replicas 2 --verify

Four ranks are then two pipelines of two, each with half of the batch. Their gradients are summed
before the update, so that the losses are those of one process on the whole batch. --reduce says
how they are summed, and with --library torch.distributed.pipelining performs the schedule. With
--sharding optimizer each replica keeps the optimizer's state for its share of the weights.
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
from extensions.data_parallel.reductions import (
    add_reduction_flags,
    build_reduction,
    check_reduction,
    describe_sums,
)
from extensions.data_parallel.replica_arguments import (
    add_replica_arguments,
    check_replicas,
    choose_replicated_schedule,
)
from extensions.data_parallel.replicas import (
    DataParallelWorker,
    form_replicas,
    own_microbatches,
)
from extensions.data_parallel.sharded_optimizer import (
    ShardedOptimizer,
    TrainingInShards,
    add_sharding_flag,
    check_sharding,
)
from extensions.optimization.clipping import clip_gradients
from extensions.optimization.finite import find_not_finite
from extensions.optimization.learning_rate import ConstantRate
from extensions.optimization.update import clip_whole_model
from extensions.pretraining.padding import Sentences, ShareOfLoss, count_real_tokens
from guard.around_main import guarded
from lab import attach
from pipeline.command_line import positive_number
from pipeline.model import build_part
from pipeline.one_process import build_optimizer, train_one_process
from pipeline.schedules.from_flags import add_schedule_flags
from pipeline.split_stage import stage_class_for
from pipeline.training import (
    LossLog,
    cut_layers,
    parse_arguments,
    start_job,
    training_parser,
)


@guarded
def main():
    arguments, schedule = read_flags()
    cut = cut_layers(arguments, schedule.num_stages)
    job = start_job(arguments, schedule.pairs)
    stop_request = StopRequest() if arguments.checkpoints else None
    replicas = form_replicas(job, arguments.replicas)
    reduction = build_reduction(arguments, replicas, schedule)
    parts = build_parts(arguments, job, schedule, cut, reduction)
    training = build_training(arguments, parts, replicas)
    checkpoints = continue_training(arguments, job, training)
    share_of_loss = ShareOfLoss()
    worker = build_worker(arguments, replicas, schedule, parts, reduction, share_of_loss)
    attach.observe(arguments, job, worker.stages.values(), schedule, first_step=training.step)
    log = LossLog(
        arguments, schedule.num_stages - 1 in parts and replicas.replica == 0, training.step
    )

    ending = None  # why the training ends before its last step
    for step in range(training.step, arguments.steps):
        inputs, targets = microbatches_of_replica(arguments, replicas, step)
        share_of_loss.real_tokens = replicas.sum_number(count_real_tokens(targets.values()))
        training.optimizer.zero_grad()
        loss = replicas.sum_loss(worker.run_step(inputs, targets))
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

    describe_sums(arguments, job, schedule, reduction)
    status = status_of_end(job, training, checkpoints, ending)
    job.leave()
    reference = partial(train_one_process, before_update=clip_whole_model)
    return log.finish(job.device, reference, not ending) or status


def read_flags():
    parser = training_parser(__doc__)
    add = parser.add_argument
    add_replica_arguments(parser)
    add_reduction_flags(parser)
    add_sharding_flag(parser)
    add_schedule_flags(parser, default="1f1b")
    add("--padding", action="store_true", help="end every row with its first full stop")
    add("--clip", type=positive_number, metavar="X", help="largest norm of the whole gradient")
    add_checkpoint_arguments(parser)
    parser.set_defaults(microbatches=4)
    attach.add_flags(parser)
    arguments = parse_arguments(parser)
    check_replicas(arguments)
    check_sharding(arguments)
    if arguments.padding:
        arguments.text = Sentences(arguments.text.training, arguments.text.held_out)
    check_checkpoint_arguments(arguments, {"clip": None, "padding": False})
    return arguments, check_reduction(arguments, choose_replicated_schedule(arguments))


def build_parts(arguments, job, schedule, cut, reduction):
    """Build the layers of this rank's stages, by stage; they are the same in all replicas."""
    a, parts = arguments, {}
    for index in schedule.stages_of(job.rank):
        first, last = cut[index]
        part = build_part(a.config, first, last, a.seed, a.torch_dtype, job.device)
        parts[index] = reduction.wrap(part, index)
    return parts


def build_training(arguments, parts, replicas):
    """Return the Training of this rank, with parameters by their names in the whole model."""
    parameters = {
        name.removeprefix("module."): parameter  # the prefix is DDP's
        for part in parts.values()
        for name, parameter in part.named_parameters()
    }
    a, kind = arguments, Training
    if a.sharding == "optimizer":
        kind = TrainingInShards
        rule = ShardedOptimizer(replicas, a.optimizer, parameters, a.learning_rate)
    else:
        rule = build_optimizer(a.optimizer, parameters.values(), a.learning_rate)
    return kind(parameters, rule, ConstantRate(), a.configuration, a.seed)


def build_worker(arguments, replicas, schedule, parts, reduction, loss_function):
    """Return the object that performs the schedule: the course's worker or the library's."""
    if arguments.library:
        from extensions.torch_pipelining.library_worker import LibraryWorker

        return LibraryWorker(
            replicas, arguments.schedule, schedule.num_stages, parts,
            arguments.microbatches, loss_function, reduction,
        )  # fmt: skip
    stage_class = stage_class_for(schedule)
    stages = {
        s: stage_class(part, s, schedule.num_stages, loss_function) for s, part in parts.items()
    }
    return DataParallelWorker(replicas.job, schedule, stages, reduction)


def microbatches_of_replica(arguments, replicas, step):
    """Return inputs and targets of one step: this replica's rows, by micro-batch."""
    batch = arguments.text.batch(step, arguments.batch_size, arguments.seq_len, arguments.seed)
    return own_microbatches(batch, replicas, arguments.microbatches, replicas.job.device)


if __name__ == "__main__":
    sys.exit(main())
