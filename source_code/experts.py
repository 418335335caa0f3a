# SPDX-License-Identifier: Apache-2.0
"""Experts in a pipeline: replicas x stages, and experts that are spread over the replicas.

    torchrun --standalone --nproc-per-node 4 experts.py --replicas 2 --verify

Four ranks are then two pipelines of two stages. In every layer each token uses 2 of 4 experts,
and each of the two ranks of a stage has 2 of them. Rows of tokens go to their experts and back by
all-to-all. The losses are those of one process, and so is the number of tokens of each expert.
"""

import sys
from dataclasses import replace
from functools import partial

from extensions.data_parallel.replica_arguments import (
    add_replica_arguments,
    check_replicas,
    choose_replicated_schedule,
)
from extensions.data_parallel.replicas import form_replicas, own_microbatches
from extensions.experts.expert_flags import add_expert_flags, check_experts
from extensions.experts.expert_group import form_expert_groups
from extensions.experts.expert_layer import build_expert_part, is_routed
from extensions.experts.expert_stage import ExpertStage, total_loss
from extensions.experts.pair_worker import PairWorker
from extensions.experts.reference import describe, tokens_per_expert, train_with_all_experts
from extensions.pretraining.padding import Sentences, ShareOfLoss, count_real_tokens
from guard.around_main import guarded
from lab import attach
from pipeline.collectives import Summing, open_groups
from pipeline.one_process import build_optimizer
from pipeline.schedule import ScheduleError
from pipeline.schedules.from_flags import add_schedule_flags
from pipeline.schedules.pairs import in_pairs
from pipeline.training import LossLog, cut_layers, parse_arguments, start_job, training_parser
from pipeline.worker import Worker


@guarded
def main():
    arguments, schedule = read_flags()
    cut = cut_layers(arguments, schedule.num_stages)
    job = start_job(arguments, schedule.pairs)
    replicas = form_replicas(job, arguments.replicas)
    group, copies = form_expert_groups(job, replicas, arguments.expert_ranks)
    open_groups(job, {tuple(range(job.num_ranks))} - set(job.groups))
    loss_function = ShareOfLoss()
    stages = build_stages(arguments, job, schedule, cut, group, loss_function)
    worker = build_worker(arguments, job, schedule, stages, group, cut)
    attach.observe(arguments, job, [] if arguments.exchange else stages.values(), schedule)
    weights = [weight for stage in stages.values() for weight in stage.part.parameters()]
    optimizer = build_optimizer(arguments.optimizer, weights, arguments.learning_rate)
    log = LossLog(arguments, job.rank == schedule.rank_of(schedule.num_stages - 1, 0))
    for step in range(arguments.steps):
        batch = arguments.text.batch(step, arguments.batch_size, arguments.seq_len, arguments.seed)
        loss_function.real_tokens = count_real_tokens([batch[1]])
        optimizer.zero_grad()
        loss = worker.run_step(
            *own_microbatches(batch, replicas, arguments.microbatches, job.device)
        )
        sum_gradients(job, stages.values(), replicas.peers, copies)
        optimizer.step()
        log.add(step, total_loss(job, loss, stages.values()))
    counts = tokens_per_expert(job, [stage.part for stage in stages.values()])
    describe(arguments, job, group, counts)
    job.leave()
    return log.finish(job.device, partial(train_with_all_experts, expected_counts=counts))


def read_flags():
    """The flags, and the schedule of all replicas."""
    parser = training_parser(__doc__)
    add_replica_arguments(parser)
    add_schedule_flags(parser, default="1f1b")
    add_expert_flags(parser)
    parser.add_argument(
        "--padding", action="store_true", help="end every row with its first full stop"
    )
    parser.set_defaults(microbatches=4)
    attach.add_flags(parser)
    arguments = parse_arguments(parser)
    check_replicas(arguments)
    check_experts(arguments)
    if arguments.padding:
        arguments.text = Sentences(arguments.text.training, arguments.text.held_out)
    schedule = choose_replicated_schedule(arguments)
    if arguments.pairs:
        try:
            schedule = in_pairs(schedule)
        except ScheduleError as error:
            raise SystemExit(
                f"--pairs: {error}; use more --microbatches or another --schedule"
            ) from None
    return arguments, schedule


def build_stages(arguments, job, schedule, cut, group, loss_function):
    """Build this rank's stages by index, with its own experts."""
    a, stages = arguments, {}
    for index in schedule.stages_of(job.rank):
        sizes = a.config, *cut[index], a.routing, group, a.seed, a.torch_dtype, job.device
        stages[index] = ExpertStage(
            build_expert_part(*sizes), index, schedule.num_stages, loss_function,
            a.auxiliary / a.batch_size,
        )  # fmt: skip
    return stages


def build_worker(arguments, job, schedule, stages, group, cut):
    """Return the Worker; with --exchange it paces its actions, and the lab's clock times them."""
    a = arguments
    if a.exchange:
        # A dispatch and a combine for each layer of a stage.
        exchanges = [2 * (last - first) for first, last in cut]
        a.pace_costs = replace(a.pace_costs, exchange=tuple(a.exchange), exchanges=exchanges)
        return PairWorker(job, schedule, stages, group, a.pace_costs)
    return Worker(job, schedule, stages)


def sum_gradients(job, stages, peers, copies):
    """Sum the gradients of experts over the ranks with the same experts, all others over replicas."""
    named = [pair for stage in stages for pair in stage.part.named_parameters()]
    for ranks, routed in ((peers, False), (copies, True)):
        gradients = [weight.grad for name, weight in named if is_routed(name) == routed]
        if len(ranks) > 1:
            Summing(job, gradients, ranks, "its gradients").wait()


if __name__ == "__main__":
    sys.exit(main())
