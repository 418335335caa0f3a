# SPDX-License-Identifier: Apache-2.0
"""PipeDream: 1F1B without a flush, an update after each backward, stages on one rank or several."""

import math

from pipeline.schedule import Action, Schedule, ScheduleError, update_group
from pipeline.schedules.one_f_one_b import one_f_one_b
from pipeline.schedules.order import require_positive


def pipedream(num_ranks, num_minibatches, microbatches_per_update=1):
    """1F1B without a flush: an update after each backward (PipeDream: Narayanan et al. 2019, section 3.2).

    With `microbatches_per_update` above 1, `num_minibatches` counts micro-batches, and an update
    follows each group of that many (PipeDream-2BW: Narayanan et al. 2021, section 3).
    """
    if microbatches_per_update < 1:
        raise ScheduleError(
            f"pipedream updates after at least 1 micro-batch, not {microbatches_per_update}"
        )
    orders = []
    for order in one_f_one_b(num_ranks, num_minibatches).orders:
        with_updates = []
        for action in order:
            with_updates.append(action)
            if action.kind == "B" and (action.microbatch + 1) % microbatches_per_update == 0:
                with_updates.append(action._replace(kind="U"))
        orders.append(tuple(with_updates))
    return Schedule("pipedream", tuple(orders))


def pipedream_round_robin(replicas, num_minibatches):
    """PipeDream with stages on several ranks: 1F1B-RR (Narayanan et al. 2019, section 3.2).

    `replicas` has the number of ranks of each stage; ranks are numbered stage by stage. Replicas
    take the mini-batches in turn, the same one forward and backward. They update after each group
    of as many mini-batches as there are replicas, together, once they have all its gradients; a
    group that the end of the training leaves incomplete gets no update.
    """
    require_positive(min(replicas, default=0), num_minibatches)
    if num_minibatches < max(replicas):
        raise ScheduleError(
            f"a stage on {max(replicas)} ranks needs at least {max(replicas)} mini-batches, one "
            f"for each, not {num_minibatches}"
        )
    orders = []
    for stage, count in enumerate(replicas):
        for replica in range(count):
            own = range(replica, num_minibatches, count)
            warm_up = min(len(own), round_robin_warm_up(replicas, stage))
            order = []
            # Warm-up: as many as the later stages can have in flight.
            for minibatch in own[:warm_up]:
                order.append(Action(stage, "F", minibatch))
            # Steady: one forward, one backward, and the update that follows from it.
            for forward, backward in zip(own[warm_up:], own):
                order.append(Action(stage, "F", forward))
                order += _backward_and_update(stage, backward, count, num_minibatches)
            # Cool-down: the backwards that are left.
            for minibatch in own[len(own) - warm_up :]:
                order += _backward_and_update(stage, minibatch, count, num_minibatches)
            orders.append(tuple(order))
    return Schedule("pipedream", tuple(orders))


def round_robin_warm_up(replicas, stage):
    """Return the forwards of a replica of `stage` before its first forward-backward pair.

    The ranks from this stage on, minus one, divided by the stage's replicas and rounded down.
    """
    return (sum(replicas[stage:]) - 1) // replicas[stage]


def noam(replicas):
    """Return the mini-batches in flight per replica of the input stage (section 3.2, NOAM)."""
    return math.ceil(sum(replicas) / replicas[0])


def _backward_and_update(stage, minibatch, replicas, num_minibatches):
    backward = Action(stage, "B", minibatch)
    is_complete = update_group(minibatch, replicas)[-1] < num_minibatches
    return [backward, backward._replace(kind="U")] if is_complete else [backward]
