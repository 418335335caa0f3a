# SPDX-License-Identifier: Apache-2.0
"""Checks of the pipeline steps that a reader builds, on real ranks (lessons 01 to 05)."""

from functools import partial

from course.building.examining import examine
from course.building.own_file import accept
from course.checks.answer import checked
from course.checks.build_text import request_of
from course.checks.build_words import Words, name_of
from pipeline.schedules import gpipe, interleaved_1f1b, naive, one_f_one_b, zb_h1

RUN_STEPS = "course.checks.build_steps_on_ranks.run_steps"
# In the reader's file a function takes the place of the step that `replaces` names.
ONE_F_ONE_B = {"replaces": "one_f_one_b_step", "frees": True}
STRICT = {"strict": True, **ONE_F_ONE_B}
# {number of ranks: numbers of micro-batches}. Further sizes come last, on ranks of their own: an error
# in one of them would hide what is wrong in an earlier step.
OF_1F1B = {4: [6, 2], 2: [6, 2], 3: [7, 2, 1]}


def perform(function, places, make, sizes, chunks=(1, 1, 1), **more):
    """The error in the reader's step, over all of `sizes` (see OF_1F1B), or None.

    `chunks` has the number of stages of each rank, for each of `sizes`; `more` goes into the request,
    see build_steps_on_ranks.py.
    """
    request = request_of(function, places=places, program=RUN_STEPS, **more)
    for (ranks, cases), count in zip(sizes.items(), chunks):
        sized = partial(make, num_chunks=count) if count > 1 else make
        asked = request | {"chunks": count, "microbatches": cases}
        if complaint := complaint_of(asked, sized, ranks):
            each = f" with {count} chunks each" if count > 1 else ""
            return complaint if ranks == 4 else f"on {ranks} ranks{each}: {complaint}"
    accept(request)


def complaint_of(request, make, ranks=4):
    """The error in the step of a request, compared with the schedules of `make`, or None."""
    cases = request["microbatches"]
    schedules = [make(ranks, m) for m in cases]
    rows = [[[str(action) for action in order] for order in each.orders] for each in schedules]
    observed = examine(request, ranks)
    if make is gpipe:
        rows = max(rows, backwards_reversed(rows), key=partial(agreements, observed))
    words = Words(observed, request, rows)
    steps = map(words.step, range(len(cases)))
    complaint = words.transport() or next(filter(None, steps), None)
    return complaint or loss_elsewhere(observed.ranks) or nothing_travelled(observed)


def loss_elsewhere(ranks):
    """The sentence about a rank before the last that returns a loss, or None."""
    for rank in ranks[:-1]:
        losses = [report["loss"] for report in rank.reports if report["loss"] is not None]
        if losses:
            return (
                f"the gradients are right, but rank {rank.number} returns {losses[0]:g} as a loss, "
                f"which only rank {len(ranks) - 1} has: return None elsewhere"
            )


def nothing_travelled(observed):
    """The sentence on a rank with right numbers that sent, received and summed nothing; or None."""
    for rank in observed.ranks:
        own = [
            events
            for (source, destination, _, what), events in observed.begun.items()
            if rank.number == (source if what == "send" else destination)
        ]
        if not any(own) and set(rank.collectives) <= {"join", "barrier"}:
            return (
                f"the numbers are right, but they did not travel: rank {rank.number} neither sends nor "
                "receives, so it has computed what other ranks are there for"
            )


def backwards_reversed(rows):
    """GPipe's `rows` with the backwards from the last micro-batch to the first, as in the paper."""
    return [[row[: len(row) // 2] + row[: len(row) // 2 - 1 : -1] for row in each] for each in rows]


def agreements(observed, rows):
    """The number of actions that the ranks took at the same place as in `rows`."""
    count = 0
    for rank in observed.ranks:
        for step, each in zip(rank.steps, rows):
            count += sum(name_of(e) == name for e, name in zip(step, each[rank.number]))
    return count


@checked("two processes have met, and a tensor went there and back.")
def there_and_back(function):
    """Check `there_and_back()` on two ranks: (1, 2, 3) goes to rank 1 and comes back doubled."""
    program = "course.checks.build_steps_on_ranks.run_there_and_back"
    request = request_of(function, program=program)
    observed = examine(request, 2)
    words = Words(observed, request)
    if complaint := words.transport():
        return complaint
    results = [rank.reports[0] for rank in observed.ranks]
    for rank, (result, wanted) in enumerate(zip(results, [[2.0, 4.0, 6.0], [1.0, 2.0, 3.0]])):
        if result["kind"] not in (None, "NoneType"):
            return (
                f"rank {rank} returns something of type {result['kind']}: return the tensor that it has "
                "received"
            )
        if result["value"] != wanted:
            early = ": has each receive been waited for before its numbers are used?"
            more = early if "nan" in str(result["value"]) else ""
            if wanted in (result["came"] or []):
                more = ": that has arrived, so return it as it has come"
            return f"rank {rank} returns {result['value']}, and it should be {wanted}{more}"
        if result["came"] and wanted not in result["came"]:
            return f"rank {rank} receives {result['came'][-1]}, and the other should send {wanted}"
    # With a broadcast, numbers travel without a send.
    plain = [set(rank.collectives) <= {"join", "barrier"} for rank in observed.ranks]
    if len(observed.begun) < 4 and any(plain):
        return "the numbers are right, but they did not travel: each rank sends and receives once"
    begun = observed.begun.items()
    back = sum((events for (rank, *_, what), events in begun if (rank, what) == (1, "send")), [])
    if back and not any(event["arrived"] for event in back):
        return (
            f"rank 1 sends at {words.at(back[-1]['at'])} before anything has arrived there: it sends "
            "back what it has received, doubled"
        )
    if not all(result["left"] for result in results):
        return "everything has arrived; at the end each rank leaves: dist.destroy_process_group()"


@checked("four ranks, and loss and gradients are those of one process, to 1e-11.")
def naive_step(function):
    """Check `naive_step(stage, tokens, targets)` on four ranks, on two and on three."""
    sizes = {4: [1], 2: [1], 3: [1, 1]}
    return perform(function, 3, naive, sizes, whole_batch=True, replaces="naive_step")


@checked("GPipe's order on four ranks, with the loss and the gradients of one process.")
def gpipe_step(function):
    """Check `gpipe_step(stage, inputs, targets)` on four ranks, on two and on three."""
    sizes = {4: [5, 2], 2: [5, 2], 3: [8, 3, 1]}
    return perform(function, 1, gpipe, sizes, replaces="gpipe_step")


@checked("1F1B's three phases on four ranks, with the loss and the gradients of one process.")
def one_f_one_b_step(function):
    """Check `one_f_one_b_step(stage, inputs, targets)` on four ranks, also with fewer than four
    micro-batches."""
    return perform(function, 1, one_f_one_b, OF_1F1B, **ONE_F_ONE_B)


@checked("1F1B by NCCL's rules: one operation at a time is enough, on four ranks and on two.")
def one_f_one_b_for_nccl(function):
    """Check a step of 1F1B as above, with one message or one batch per rank under way."""
    return perform(function, 1, one_f_one_b, OF_1F1B, **STRICT)


@checked("eight stages on four ranks, in Megatron's order, with the gradients of one process.")
def interleaved_step(function):
    """Check `interleaved_step(stages, inputs, targets)` on four ranks and on three with two chunks
    each, and on two with three."""
    more = {"replaces": "interleaved_step", "frees": True}
    sizes = {4: [8, 4], 2: [8, 4], 3: [9, 3, 6]}
    return perform(function, 1, interleaved_1f1b, sizes, chunks=(2, 3, 2), **more)


@checked("ZB-H1 on four ranks: the weights' halves wait, and no gradient is lost or late.")
def zb_h1_step(function):
    """Check `zb_h1_step(stage, inputs, targets)` on four ranks, on two and on three, also
    with fewer micro-batches than ranks."""
    return perform(function, 1, zb_h1, OF_1F1B, halves=True, frees=True)
