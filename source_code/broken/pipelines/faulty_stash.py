# SPDX-License-Identifier: Apache-2.0
"""PipeDream with a stash that asks the piece of case 7 before every update."""

from broken.pipelines.faults import RANKS
from extensions.asynchronous.asynchronous_reference import train_by_rule
from extensions.asynchronous.pipedream_flags import losses_of_steps
from extensions.asynchronous.weight_stash import WeightStash
from lab import attach
from pipeline.schedules import pipedream
from pipeline.training import LossLog, start_job


class StashWithPiece(WeightStash):
    """A stash whose copy before an update is left to `piece`."""

    def __init__(self, parameters, piece):
        super().__init__(parameters, keep=False)
        self.piece = piece

    def update(self, optimizer, gradients, oldest_needed):
        self.piece(list(self.parameters.values()), self.users[self.current])
        super().update(optimizer, gradients, oldest_needed)


def train_without_flush(lesson, arguments, pieces, cut):
    """Train as `lesson`, the script pipedream.py, does; the stash of rank 1 asks the piece.

    Returns the exit status.
    """
    arguments.weights, arguments.replicas = "stashed", [1] * RANKS
    schedule = pipedream(RANKS, arguments.steps)
    job = start_job(arguments, schedule.pairs)
    stage = lesson.build_stashing_stage(arguments, job, schedule, cut)
    if job.rank == 1:
        stage.stash = StashWithPiece(stage.part.named_parameters(), pieces.before_update)
    attach.observe(arguments, job, [stage], schedule, what="whole run")
    losses = lesson.run_training(arguments, job, stage, schedule)
    log = LossLog(arguments, has_loss=job.rank == 0)
    for step, loss in enumerate(losses_of_steps(job, arguments.microbatches, losses)):
        log.add(step, loss)
    job.leave()
    return log.finish(job.device, train_by_rule)
