# SPDX-License-Identifier: Apache-2.0
"""The check of a hook that starts the sums of gradients early enough (lesson 10)."""

from itertools import product

from course.building import in_words
from course.building.endless_loops import endless_loops_ended
from course.checks.answer import WrongAnswer, checked
from course.checks.build_text import request_of
from course.checks.reader_on_ranks import perform
from extensions.data_parallel.replicas import replicate
from lab.simulator import Costs, simulate
from pipeline.schedules import gpipe, interleaved_1f1b, one_f_one_b, zb_h1
from pipeline.schedules.text_form import from_csv

PROGRAM = "course.checks.build_sums_on_ranks.main"
REVERSED = from_csv(  # on stages 2 and 3 alone
    "0F0,0F1,2F0,2F1,2B1,2B0,0B0,0B1\n1F0,1F1,3F0,3F1,3B1,3B0,1B0,1B1",
    "backwards in reverse order",
)
TWO_PIPELINES = replicate(interleaved_1f1b(2, 4, 2), 2)  # stages 4 to 7 are the second's
PLAYED = [one_f_one_b(4, 8), TWO_PIPELINES, zb_h1(4, 8), REVERSED]
for make in (gpipe, one_f_one_b, zb_h1):
    PLAYED += [make(p, m) for p, m in [*product(range(1, 5), range(1, 7)), (8, 20)]]
PLAYED += [interleaved_1f1b(p, p * n, v) for p, n, v in product((2, 3), (1, 3), (2, 3, 4))]


@checked("each sum leaves with the last gradient that it adds, and is that of one process.")
def sums_in_time(after):
    """Check `after(action, order, start)`, which is called after each action of a rank.

    `order` has all actions of the rank; `start(stage)` starts the sum of a stage's gradients.
    """
    request = request_of(after, program=PROGRAM)
    for schedule in PLAYED:
        for rank, order in enumerate(schedule.orders):
            for step in (1, 2):
                with endless_loops_ended():
                    complaint = misplaced(after, schedule, rank, order)
                if complaint and step == 2:
                    return (
                        f"{schedule.name}, rank {rank}: right in a first step, but in a second one "
                        f"{complaint}; does your hook remember something of the step before?"
                    )
                if complaint:
                    return f"{schedule.name}, rank {rank}: {complaint}"
    for rank, factors in enumerate(perform(request, 4)):
        for stage, factor in factors.items():
            if factor != 1:
                much = "not" if factor is None else f"{factor:g} times"
                return f"on rank {rank} the sum of stage {stage} is {much} that of one process"


def misplaced(after, schedule, rank, order):
    """The error in the moments at which a rank of `schedule` starts its sums, or None."""
    started = []  # (position in order, stage)
    for position, action in enumerate(order):

        def start(stage, at=position):
            started.append((at, stage))

        try:
            with endless_loops_ended():
                after(action, order, start)
        except Exception as error:
            kinds = f"; it has actions of the kinds {', '.join(sorted({a.kind for a in order}))}"
            raise WrongAnswer(
                f"{schedule.name}, after {action} your function raised {in_words(error)}"
                f"{kinds if isinstance(error, (LookupError, ValueError)) else ''}"
            ) from None
    own = sorted({action.stage for action in order})
    for position, stage in started:
        if stage not in own:
            return f"after {order[position]} it starts the sum of stage {stage!r}; it has {own}"
    for stage in own:
        last = max(p for p, a in enumerate(order) if a.stage == stage and a.kind in "BW")
        places = [position for position, started_stage in started if started_stage == stage]
        if not places:
            return f"the sum of stage {stage} is never started, so it leaves at the end of the step"
        if len(places) > 1:
            first, second = (order[place] for place in places[:2])
            return f"the sum of stage {stage} is started twice, after {first} and after {second}"
        (place,) = places
        if place < last:
            return (
                f"the sum of stage {stage} is started after {order[place]}, and {order[last]} "
                "still adds to that gradient"
            )
        if place > last:
            return (
                f"the gradient of stage {stage} is complete after {order[last]}, and its sum is "
                f"started after {order[place]}, {late(schedule, rank, last, place):g} ms later"
            )


def late(schedule, rank, last, place):
    """Milliseconds between the ends of two actions; a forward takes 10 ms, a backward 20 ms."""
    events = simulate(schedule, Costs(10, 20)).by_rank[rank]
    return events[place].end - events[last].end
