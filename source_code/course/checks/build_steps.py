"""Checks of the pipeline steps that a reader builds, on real ranks (lessons 01 to 05)."""

from course.building.examining import examine
from course.building.own_file import accept
from course.checks.answer import checked
from course.checks.build_text import request_of
from course.checks.build_words import Words
from pipeline.schedules import gpipe, interleaved_1f1b, naive, one_f_one_b, zb_h1


def perform(function, places, make, cases, chunks=1, whole_batch=False, halves=False):
    """The error in the reader's step on four ranks, over all numbers of micro-batches, or None."""
    request = request_of(
        function,
        places,
        run="steps",
        microbatches=cases,
        chunks=chunks,
        whole_batch=whole_batch,
        halves=halves,
    )
    schedules = [make(4, m) for m in cases]
    rows = [[[str(action) for action in order] for order in each.orders] for each in schedules]
    words = Words(examine(request, 4), request, rows)
    steps = map(words.step, range(len(cases)))
    complaint = words.transport() or next(filter(None, steps), None)
    if not complaint:
        accept(request)
    return complaint


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
    return perform(function, 1, gpipe, [5, 2])


@checked("1F1B's three phases on four ranks, with the loss and the gradients of one process.")
def one_f_one_b_step(function):
    """Check `one_f_one_b_step(stage, inputs, targets)` on four ranks, also with fewer than four
    micro-batches."""
    return perform(function, 1, one_f_one_b, [6, 2])


@checked("eight stages on four ranks, in Megatron's order, with the gradients of one process.")
def interleaved_step(function):
    """Check `interleaved_step(stages, inputs, targets)` on four ranks with two chunks per rank."""
    return perform(function, 1, interleaved_1f1b, [8, 4], chunks=2)


@checked("ZB-H1 on four ranks: the weights' halves wait, and no gradient is lost or late.")
def zb_h1_step(function):
    """Check `zb_h1_step(stage, inputs, targets)` on four ranks, also with fewer than four
    micro-batches."""
    return perform(function, 1, zb_h1, [6, 2], halves=True)
