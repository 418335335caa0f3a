# SPDX-License-Identifier: Apache-2.0
"""Unequal ends: a head that is worth several layers, and three cures.

    torchrun --standalone --nproc-per-node 4 vocabulary_parallel.py --verify
    torchrun --standalone --nproc-per-node 4 vocabulary_parallel.py --spread --verify

The last rank has the head, so 1F1B runs at its pace. --cut gives it fewer layers, --tied makes
embedding and head one matrix, whose two gradients are added up, and --spread cuts both over the
vocabulary and gives a part to every rank, with actions of their own in the schedule. The losses are
the same. --pace is the time of one layer; the head takes this time for every layer that it is
worth.
"""

import sys
from dataclasses import replace
from functools import partial

from extensions.vocabulary_parallel.fan import vocabulary_parallel
from extensions.vocabulary_parallel.fan_worker import FanWorker
from extensions.vocabulary_parallel.tied_weights import (
    build_end_stage,
    build_tied_model,
    sum_tied_gradients,
)
from extensions.vocabulary_parallel.vocabulary_stages import build_spread_stages
from guard.around_main import guarded
from lab import attach
from pipeline.collectives import open_groups
from pipeline.command_line import positive_integer
from pipeline.model import ModelConfig, cut_evenly
from pipeline.one_process import train_one_process
from pipeline.schedules import one_f_one_b
from pipeline.training import (
    cut_layers,
    parse_arguments,
    start_job,
    train,
    training_parser,
)
from pipeline.worker import Worker


@guarded
def main():
    arguments = read_flags()
    cut = cut_layers(arguments, arguments.num_ranks)
    make_schedule = vocabulary_parallel if arguments.spread else one_f_one_b
    schedule = make_schedule(arguments.num_ranks, arguments.microbatches)
    pace_by_work(arguments, cut)
    job = start_job(arguments, schedule.pairs)
    ends = tuple(sorted({0, job.num_ranks - 1}))
    if arguments.spread:
        stages = build_spread_stages(arguments, schedule, job.rank, cut, job.device)
    else:
        stages = {job.rank: build_end_stage(arguments, job.rank, cut, job.device)}
        open_groups(job, [ends] if arguments.tied and len(ends) > 1 else [])
    attach.observe(arguments, job, stages.values(), schedule)
    worker = (FanWorker if arguments.spread else Worker)(job, schedule, stages)
    reference = partial(train_one_process, build=build_tied_model)
    step = partial(run_step, arguments, worker, ends)
    return train(arguments, job, stages.values(), step, reference)


def run_step(arguments, worker, ends, inputs, targets):
    """One step of this rank. Returns the loss on the last rank, None elsewhere."""
    loss = worker.run_step(inputs, targets)
    if arguments.tied and not arguments.spread:  # spread, a rank's rows of both are one matrix
        sum_tied_gradients(worker.job, worker.stages[worker.job.rank].part, ends)
    return loss


def read_flags():
    parser = training_parser(__doc__)
    add = parser.add_argument
    add("--vocabulary", type=positive_integer, default=928, metavar="N", help="tokens")
    add("--spread", action="store_true", help="cut the vocabulary over all ranks")
    add("--tied", action="store_true", help="let the head have the embedding's weights")
    attach.add_flags(parser)
    arguments = parse_arguments(parser)
    least = max(ModelConfig.vocabulary, arguments.num_ranks)
    if arguments.vocabulary < least:
        raise SystemExit(
            f"--vocabulary {arguments.vocabulary} has no room for all bytes, or for a row per rank; "
            f"use at least {least}"
        )
    return arguments


def pace_by_work(arguments, cut):
    """Convert --pace, the time of one layer, to the times of all stages, by their work."""
    work = work_of_stages(arguments, cut)
    pace, arguments.pace_per_layer = getattr(arguments, "pace_costs", None), False  # of the lab
    if pace is not None:
        weight = pace.backward / 2 if pace.backward_weight is None else pace.backward_weight
        times = {"forward": pace.forward, "backward": pace.backward, "backward_weight": weight}
        longest = max(work) * max(pace.forward, pace.backward)
        if longest >= 1000 * arguments.timeout:
            raise SystemExit(
                f"--pace is the time of one layer: an action here takes {longest:g} ms and outlasts "
                f"--timeout {arguments.timeout:g} s; use a shorter --pace"
            )
        by_stage = {name: [time * layers for layers in work] for name, time in times.items()}
        arguments.pace_costs = replace(pace, **by_stage)


def work_of_stages(arguments, cut):
    """Return each stage's work in layers, by its weights in matrix products: no embedding."""
    a = arguments
    kv_width = a.kv_heads * a.config.head_dim
    layer = 2 * a.dim * (a.dim + kv_width) + 3 * a.dim * a.config.hidden_dim
    head = a.vocabulary * a.dim / layer
    layers = [last - first for first, last in cut]
    if not a.spread:
        return [*layers[:-1], layers[-1] + head]
    rows = [last - first for first, last in cut_evenly(a.vocabulary, len(cut))]
    scores = [head * count / a.vocabulary for count in rows]
    return [*layers, *scores, 0.0, *[0.0] * len(cut)]


if __name__ == "__main__":
    sys.exit(main())
