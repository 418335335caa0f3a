# SPDX-License-Identifier: Apache-2.0
"""PipeDream: 1F1B without a flush, with real weight stashing.

    torchrun --standalone --nproc-per-node 4 pipedream.py --verify
    torchrun --standalone --nproc-per-node 4 pipedream.py --replicas 2-1-1 --verify

--steps counts mini-batches, each of --batch-size and with an update of its own; a stage of several
--replicas updates once for as many mini-batches. --weights chooses which version of the weights a
mini-batch uses; --verify computes the same rule in one process.
"""

import sys

from extensions.asynchronous.asynchronous_reference import train_by_rule
from extensions.asynchronous.pipedream_flags import (
    add_pipedream_flags,
    losses_of_steps,
    print_versions,
)
from extensions.asynchronous.weight_stash import StashingStage
from guard.around_main import guarded
from lab import attach
from pipeline.collectives import open_groups
from pipeline.message import Message
from pipeline.model import build_part
from pipeline.one_process import build_optimizer
from pipeline.receives import OrderedReceives
from pipeline.schedule import Action
from pipeline.schedules import pipedream, pipedream_round_robin, round_robin_warm_up
from pipeline.training import (
    LossLog,
    cut_layers,
    microbatches_of,
    parse_arguments,
    share_of_loss,
    start_job,
    training_parser,
)


@guarded
def main():
    parser = training_parser(__doc__)
    add_pipedream_flags(parser)
    attach.add_flags(parser)
    arguments = parse_arguments(parser)
    schedule = build_whole_schedule(arguments)
    cut = cut_layers(arguments, schedule.num_stages)
    replicated = [ranks for ranks in schedule.ranks_of_stage.values() if len(ranks) > 1]
    job = start_job(arguments, schedule.pairs)
    open_groups(job, replicated)
    stage = build_stashing_stage(arguments, job, schedule, cut)
    attach.observe(arguments, job, [stage], schedule, what="whole run")

    losses = run_training(arguments, job, stage, schedule)
    log = LossLog(arguments, has_loss=job.rank == 0)
    for step, loss in enumerate(losses_of_steps(job, arguments.microbatches, losses)):
        log.add(step, loss)
    print_versions(job, arguments.replicas, stage)
    job.leave()
    return log.finish(job.device, train_by_rule)


def build_whole_schedule(arguments):
    """Return the whole training run as one schedule, for the messages and the lab's prediction."""
    if arguments.weights == "double-buffered":
        num_microbatches = arguments.steps * arguments.microbatches
        return pipedream(arguments.num_ranks, num_microbatches, arguments.microbatches)
    return pipedream_round_robin(arguments.replicas, arguments.steps)


def build_stashing_stage(arguments, job, schedule, cut):
    """Build this rank's stage with its optimizer: it updates when a gradient is complete."""
    [index] = schedule.stages_of(job.rank)
    a, (first, last) = arguments, cut[index]
    part = build_part(a.config, first, last, a.seed, a.torch_dtype, job.device)
    optimizer = build_optimizer(a.optimizer, part.parameters(), a.learning_rate)
    rule = a.weights, a.replicas, schedule.ranks_of_stage[index], a.microbatches
    return StashingStage(job, part, index, share_of_loss(a.microbatches), optimizer, *rule)


def run_training(arguments, job, stage, schedule):
    """The whole training run of this rank: the pipeline never drains in between.

    Replicas of a stage take the micro-batches in turn. Returns {micro-batch: its share of a loss}
    on the ranks of the last stage. Of `schedule` it takes only which rank has which micro-batch, and
    which receive must be posted before which send: with replicas that is no longer the next one.
    """
    batches = [microbatches_of(arguments, job.device, step) for step in range(arguments.steps)]
    inputs, targets = ([one for batch in half for one in batch] for half in zip(*batches))
    count = len(stage.ranks)
    own = range(stage.ranks.index(job.rank), len(inputs), count)
    warm_up = min(len(own), round_robin_warm_up(arguments.replicas, stage.index))
    receives = OrderedReceives(job, schedule)
    losses = {}

    def forward(k):
        activation = inputs[k]
        receives.post_before(Action(stage.index, "F", k))
        if not stage.is_first:
            activation = receives.take(Message("activation", stage.index - 1, k))
        output = stage.forward(k, activation, targets[k])
        if stage.is_last:
            losses[k] = output
        else:
            destination = schedule.rank_of(stage.index + 1, k)
            job.send(output, destination, Message("activation", stage.index, k))

    def backward(k):
        gradient = None
        receives.post_before(Action(stage.index, "B", k))
        if not stage.is_last:
            gradient = receives.take(Message("gradient", stage.index + 1, k))
            job.release_sent(Message("activation", stage.index, k))  # the gradient was made from it
        gradient = stage.backward(k, gradient)
        if not stage.is_first:
            job.release_sent(Message("gradient", stage.index, k - 2 * count))  # taken by now
            destination = schedule.rank_of(stage.index - 1, k)
            job.send(gradient, destination, Message("gradient", stage.index, k))
        # An update takes the gradients of a whole group: one of each replica, or of all
        # micro-batches of a mini-batch. An incomplete group at the end gets no update.
        group = max(count, arguments.microbatches)
        last = k - k % count + count if count > 1 else k + 1
        if last % group == 0 and last <= len(inputs):
            receives.post_before(Action(stage.index, "U", k))
            stage.update(k)

    # Warm-up: as many as the stages behind this one can have in flight.
    for k in own[:warm_up]:
        forward(k)

    # Steady: one forward, one backward, and the update that follows from it.
    for next_k, k in zip(own[warm_up:], own):
        forward(next_k)
        backward(k)

    # Cool-down: the backwards that are left.
    for k in own[len(own) - warm_up :]:
        backward(k)

    job.complete_sends()
    return losses


if __name__ == "__main__":
    sys.exit(main())
