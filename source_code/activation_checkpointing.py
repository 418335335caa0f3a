# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing: keep less of every forward, and run it again.

    torchrun --standalone --nproc-per-node 4 activation_checkpointing.py --verify

--recompute chooses what a stage keeps between a forward and its backward. --schedule chooses the
order of the actions: any synchronous schedule. --chunks sets the stages per rank, for some of them.
"""

import sys

from extensions.recompute_flags import add_recompute_flags, build_recomputing_stages, check_pieces
from guard.around_main import guarded
from lab import attach
from pipeline.schedules.from_flags import add_schedule_flags, choose_schedule
from pipeline.training import cut_layers, parse_arguments, start_job, train, training_parser
from pipeline.worker import Worker


@guarded
def main():
    parser = training_parser(__doc__)
    add_recompute_flags(parser, default="stage")
    add_schedule_flags(parser)
    attach.add_flags(parser)
    arguments = parse_arguments(parser)
    schedule = choose_schedule(arguments)
    cut = cut_layers(arguments, schedule.num_stages)
    check_pieces(arguments, cut)
    job = start_job(arguments, schedule.pairs)
    stages = build_recomputing_stages(arguments, schedule, cut, job)
    attach.observe(arguments, job, stages.values(), schedule)
    worker = Worker(job, schedule, stages)
    return train(arguments, job, stages.values(), worker.run_step)


if __name__ == "__main__":
    sys.exit(main())
