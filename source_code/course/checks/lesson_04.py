# SPDX-License-Identifier: Apache-2.0
"""The check of lesson 04's versions of the weights. build_stash.py has that of the stash."""

from course.checks.answer import call_for_number, checked
from pipeline.schedules import pipedream


@checked("rank r is p - 1 - r updates behind; the last rank is never behind.")
def version_seen(version):
    """Check `version(minibatch, rank, num_ranks)`: the version of the weights in a forward.

    Everything counts from 0. The right answer is the number of updates before that forward in the
    rank's list of the schedule.
    """
    for num_ranks in (4, 3, 1, 2, *range(5, 13)):
        for rank, order in enumerate(pipedream(num_ranks, 40).orders):
            updates = 0
            for action in order:
                if action.kind == "U":
                    updates += 1
                if action.kind != "F":
                    continue
                answer = call_for_number(version, action.microbatch, rank, num_ranks)
                if answer == updates:
                    continue
                case = (
                    f"mini-batch {action.microbatch} on rank {rank} of {num_ranks}: "
                    f"you say version {answer:g}"
                )
                if num_ranks != 4:
                    return (
                        f"{case}; it is {updates}. On 4 ranks your answers are right: where does the "
                        "number of ranks count?"
                    )
                if answer < 0:
                    return f"{case}, but nothing is older than the starting weights, version 0"
                if answer == action.microbatch:
                    return (
                        f"{case}, as if every mini-batch before it were back here with its update"
                    )
                if answer == max(0, action.microbatch - (num_ranks - 1)):
                    return f"{case}; that is rank 0, and this rank is nearer to the end"
                if answer == max(0, action.microbatch - (num_ranks - rank)):
                    return (
                        f"{case}, one too old: the updates that are missing on this rank are "
                        f"{num_ranks - 1 - rank}, and that of the mini-batch itself is not among them"
                    )
                return f"{case}; {updates} updates stand before it in the rank's list"
