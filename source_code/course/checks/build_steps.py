"""Checks of the pipeline steps that a reader builds, on real ranks (lessons 01 to 05)."""

import inspect

from course.building.examining import examine
from course.building.own_file import accept
from course.checks.answer import checked
from course.checks.build_text import request_of
from course.checks.build_words import Words
from pipeline.schedules import gpipe, interleaved_1f1b, naive, one_f_one_b, zb_h1

# The reader's file has these steps, too, and there they call the reader's `forward` and `backward`.
LATER = {
    "one_f_one_b_step": ("03", one_f_one_b, 6, 1),
    "interleaved_step": ("05", interleaved_1f1b, 8, 2),
}


def perform(function, places, make, cases, chunks=1, whole_batch=False, halves=False, later=()):
    """The error in the reader's step on four ranks, over all numbers of micro-batches, or None.

    `later` names the steps of LATER in which the reader's `forward` and `backward` must work, too.
    """
    request = request_of(
        function,
        places,
        run="steps",
        microbatches=cases,
        chunks=chunks,
        whole_batch=whole_batch,
        halves=halves,
    )
    complaint = complaint_of(request, make) or _complaint_of_later(request, later)
    if not complaint:
        accept(request)
    return complaint


def complaint_of(request, make):
    """The error in the step of a request, compared with the schedules of `make`, or None."""
    cases = request["microbatches"]
    schedules = [make(4, m) for m in cases]
    rows = [[[str(action) for action in order] for order in each.orders] for each in schedules]
    words = Words(examine(request, 4), request, rows)
    steps = map(words.step, range(len(cases)))
    return words.transport() or next(filter(None, steps), None)


def _complaint_of_later(request, later):
    """The error in a later lesson's step with the reader's `forward` and `backward`, or None."""
    from course.building import my_pipeline  # torch comes with it

    names = {name for name, _ in request["sources"]}
    for name in later if {"forward", "backward"} & names else ():
        lesson, make, m, chunks = LATER[name]
        sources = [*request["sources"], (name, inspect.getsource(getattr(my_pipeline, name)))]
        more = {"function": name, "sources": sources, "microbatches": [m], "chunks": chunks}
        if complaint := complaint_of({**request, **more}, make):
            return (
                f"your step is right, but the step of lesson {lesson} calls the same forward and "
                f"backward in another order, and then: {complaint}"
            )


@checked("two processes have met, and a tensor went there and back.")
def there_and_back(function):
    """Check `there_and_back()` on two ranks: (1, 2, 3) goes to rank 1 and comes back doubled."""
    request = request_of(function, run="words")
    observed = examine(request, 2)
    complaint = Words(observed, request).transport()
    if complaint:
        return complaint
    for rank, wanted in enumerate([[2.0, 4.0, 6.0], [1.0, 2.0, 3.0]]):
        (result,) = observed.ranks[rank].results
        if result["value"] != wanted:
            return f"rank {rank} returns {result['value']}, and it should be {wanted}"
    if len(observed.begun) < 4:
        return "the numbers are right, but they did not travel: each rank sends and receives once"
    if any(rank.results[0]["left"] is False for rank in observed.ranks):
        return "everything has arrived; at the end each rank leaves: dist.destroy_process_group()"


@checked("four ranks, and loss and gradients are those of one process, to the last digit.")
def naive_step(function):
    """Check `naive_step(stage, tokens, targets)` on four ranks."""
    return perform(function, 3, naive, [1], whole_batch=True)


@checked("GPipe's order on four ranks, with the loss and the gradients of one process.")
def gpipe_step(function):
    """Check `gpipe_step(stage, inputs, targets)` on four ranks: five and two micro-batches."""
    return perform(function, 1, gpipe, [5, 2], later=["one_f_one_b_step", "interleaved_step"])


@checked("1F1B's three phases on four ranks, with the loss and the gradients of one process.")
def one_f_one_b_step(function):
    """Check `one_f_one_b_step(stage, inputs, targets)` on four ranks, also with fewer than four
    micro-batches."""
    return perform(function, 1, one_f_one_b, [6, 2], later=["interleaved_step"])


@checked("eight stages on four ranks, in Megatron's order, with the gradients of one process.")
def interleaved_step(function):
    """Check `interleaved_step(stages, inputs, targets)` on four ranks with two chunks per rank."""
    return perform(function, 1, interleaved_1f1b, [8, 4], chunks=2)


@checked("ZB-H1 on four ranks: the weights' halves wait, and no gradient is lost or late.")
def zb_h1_step(function):
    """Check `zb_h1_step(stage, inputs, targets)` on four ranks, also with fewer than four
    micro-batches."""
    return perform(function, 1, zb_h1, [6, 2], halves=True)
