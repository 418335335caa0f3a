# SPDX-License-Identifier: Apache-2.0
"""Checks whether a schedule can be performed; the error names the rank, the step and the reason.

A schedule from a user is checked before it is performed. The generators' schedules are legal for
every size, which the tests check.
"""

from pipeline.schedule import KINDS, Action, ScheduleError, update_group


def check_legal(schedule):
    """Return `schedule` if it can be performed to its end, else raise ScheduleError.

    Each stage belongs to one rank, or in an asynchronous schedule to several in turn; each
    micro-batch passes each stage once forward and once backward, in full (B) or split (I, then W);
    on a rank every action comes after what it needs there; and the ranks together can be played to
    the end without a deadlock.
    """
    if not schedule.orders or not any(schedule.orders):
        raise ScheduleError("the schedule has no actions")
    steps = _check_steps(schedule)
    for stage in range(schedule.num_stages):
        if stage not in schedule.ranks_of_stage:
            raise ScheduleError(f"stage {stage} belongs to no rank")
    for (stage, microbatch), rank in schedule.rank_of_passage.items():
        _check_passage(rank, stage, microbatch, steps)
    for stage, ranks in schedule.ranks_of_stage.items():
        for microbatch in range(schedule.num_microbatches):
            if (stage, microbatch) not in schedule.rank_of_passage:
                forward = Action(stage, "F", microbatch)
                rank = ranks[microbatch % len(ranks)]
                raise ScheduleError(f"rank {rank} never runs {forward.describe()}")
        if len(ranks) > 1:
            _check_joint_updates(schedule, stage, ranks, steps)
    schedule.playable_order  # noqa: B018 - raises if it deadlocks
    return schedule


def _check_steps(schedule):
    """Check each action by itself: known, on the right rank, once. Returns the step of each."""
    updated = {action.stage for order in schedule.orders for action in order if action.kind == "U"}
    owner, steps = {}, {}
    for rank, order in enumerate(schedule.orders):
        if not order:
            raise ScheduleError(f"rank {rank} has no actions")
        for step, action in enumerate(order):
            stage, kind, microbatch = action
            if kind not in KINDS:
                raise ScheduleError(
                    f"rank {rank}, step {step} ({action}): the kind is one of {', '.join(KINDS)}"
                )
            if stage < 0 or microbatch < 0:
                raise ScheduleError(
                    f"rank {rank}, step {step} ({action}): stages and micro-batches are counted "
                    "from 0"
                )
            if stage in updated:
                _check_turn(schedule, rank, step, action)
            elif owner.setdefault(stage, rank) != rank:
                raise ScheduleError(
                    f"rank {rank}, step {step} ({action}): stage {stage} already belongs to rank "
                    f"{owner[stage]}"
                )
            if action in steps:
                raise ScheduleError(
                    f"rank {rank} runs {action.describe()} twice, at steps {steps[action]} and {step}"
                )
            steps[action] = step
    return steps


def _check_turn(schedule, rank, step, action):
    """Check that the replicas of a stage take its micro-batches in turn."""
    ranks = schedule.ranks_of_stage[action.stage]
    in_turn = ranks[action.microbatch % len(ranks)]
    if rank == in_turn:
        return
    where = f"rank {rank}, step {step} ({action})"
    if len(ranks) == 1:
        raise ScheduleError(f"{where}: stage {action.stage} belongs to rank {in_turn}")
    raise ScheduleError(
        f"{where}: stage {action.stage} belongs to ranks {', '.join(map(str, ranks))}, which take "
        f"its micro-batches in turn, and this one is rank {in_turn}'s"
    )


def _check_passage(rank, stage, microbatch, steps):
    """Check that one micro-batch on one stage is complete and in order."""
    forward, full, for_input, for_weights, update = [
        steps.get((stage, kind, microbatch)) for kind in "FBIWU"
    ]

    def named(kind):
        return Action(stage, kind, microbatch).describe()

    if forward is None:
        kind, step = next(
            (kind, steps[stage, kind, microbatch])
            for kind in "BIWU"
            if (stage, kind, microbatch) in steps
        )
        raise ScheduleError(
            f"rank {rank} runs {named(kind)} at step {step}, but never {named('F')}"
        )
    if full is not None and (for_input is not None or for_weights is not None):
        extra, part = (for_weights, "W") if for_input is None else (for_input, "I")
        raise ScheduleError(
            f"rank {rank} runs {named('B')} in full at step {full} and a part of it again at step "
            f"{extra} ({stage}{part}{microbatch})"
        )
    if full is None and for_input is None:
        raise ScheduleError(f"rank {rank} never runs {named('B')}")
    if full is None and for_weights is None:
        raise ScheduleError(f"rank {rank} never runs {named('W')}")
    taken = [(forward, "F")]
    taken += [(for_input, "I"), (for_weights, "W")] if full is None else [(full, "B")]
    taken += [] if update is None else [(update, "U")]
    for (before, first), (step, second) in zip(taken, taken[1:]):
        if step < before:
            raise ScheduleError(
                f"rank {rank} runs {named(second)} at step {step}, but {named(first)} comes at "
                f"step {before}"
            )


def _check_joint_updates(schedule, stage, ranks, steps):
    """Check that the replicas of a stage update after each complete group, and only then."""
    for microbatch in range(schedule.num_microbatches):
        update = Action(stage, "U", microbatch)
        rank = ranks[microbatch % len(ranks)]
        last = update_group(microbatch, len(ranks))[-1]
        if last >= schedule.num_microbatches and update in steps:
            raise ScheduleError(
                f"rank {rank} runs {update.describe()} at step {steps[update]}, but there is no "
                f"micro-batch {last} to complete the group of {len(ranks)}"
            )
        if last < schedule.num_microbatches and update not in steps:
            raise ScheduleError(
                f"rank {rank} never runs {update.describe()}, which the {len(ranks)} replicas of "
                "the stage make together"
            )
