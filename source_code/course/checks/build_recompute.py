# SPDX-License-Identifier: Apache-2.0
"""The check of a backward that recomputes, on real ranks (lesson 06)."""

from course.checks.answer import checked, first_complaint
from course.checks.build_text import request_of
from course.checks.reader_on_ranks import perform

PROGRAM = "course.checks.build_recompute_on_ranks.main"
CASES = {"": 3, "on 2 ranks, ": 2}  # of three, rank 1 receives a gradient and also sends one


@checked("the gradients of a stage that keeps everything, and one inside at a time.")
def recomputing_backward(backward):
    """Check `backward(stage, k, gradient, held)` on three ranks, with four micro-batches in two
    orders of the backwards, and on two ranks with five."""
    request = request_of(backward, program=PROGRAM)
    return first_complaint(lambda ranks: complaint_of(perform(request, ranks)), CASES)


def complaint_of(reports):
    """The first error in the backwards that the ranks have reported, or None."""
    for judge in (wrong_gradient, wrong_bytes):
        for rank in reversed(range(len(reports))):
            for seen in reports[rank]:
                if complaint := judge(seen):
                    return f"rank {rank}, backward of micro-batch {seen['k']}: {complaint}"


def wrong_gradient(seen):
    """The error in the gradients of one backward, as a sentence, or None."""
    if seen["emptied"]:
        return "the gradients of earlier micro-batches are gone: a backward adds to .grad"
    for what, name in (("weights", "the weights"), ("input", "the input")):
        if seen[what] is None:
            continue
        factor, of = seen[what]
        if of == "missing" and what == "weights":
            return "the weights have no gradient; was there a backward through the second forward?"
        if of == "missing":
            return (
                "it returns no gradient of its input, which the rank before waits for; does the "
                "input ask for one, is it what the second forward was run on, and is its .grad returned?"
            )
        if of == "right" and factor == 0:
            return "the weights have no gradient; was there a backward through the second forward?"
        if of == "right" and factor != 1:
            return f"the gradient of {name} is {factor:g} times the right one"
        if of == "the input":
            return "it returns the input itself, and not the gradient of the input"
        if of == "rounded":
            return (
                f"the gradient of {name} has too few digits: was it rounded to float32 on the way?"
            )
        if of == "else" and seen["asked"] and seen["asked"][0] not in (None, seen["k"]):
            return (
                f"the second forward is stage({seen['asked'][0]}, x), that of another micro-batch"
            )
        if of == "else" and seen["calls"] and seen["calls"][0] not in (None, seen["k"]):
            return f"the second forward ran on the input of micro-batch {seen['calls'][0]}"
        if of != "right":
            said = "points another way than the right one" if of == "else" else f"is {of}"
            return f"the gradient of {name} {said}; which gradient did the backward start from?"


def wrong_bytes(seen):
    """The memory that one backward holds in excess, as a sentence, or None."""
    k, (peak, inside) = str(seen["k"]), seen["bytes"]
    if seen["left"]:
        return (
            f"the gradients are right, but {seen['left']:,} bytes of a graph are still there "
            "afterwards; what still refers to its output?"
        )
    if k in seen["held"]:
        return "the gradients are right, but held still has an entry for it afterwards; pop it"
    if len(seen["inputs"]) > 1:
        first, *_, last = seen["inputs"]
        return (
            f"the gradients are right, but the inputs of micro-batches {first} and {last} are still "
            "in memory, although their backwards are over; what still refers to them?"
        )
    if peak > inside and seen["calls"] == [seen["k"]]:
        return (
            f"the gradients are right, but autograd keeps {peak:,} bytes, and the forward alone "
            f"{inside:,}: the rest is of what you compute with the output; hand the gradient to "
            "its backward(gradient) instead"
        )
    if peak > inside:
        return (
            f"the gradients are right, but {peak:,} bytes of insides are there at once, and one "
            f"inside has {inside:,}; run only its own forward again, and only once"
        )
    if len(seen["calls"]) > 1:
        return "the gradients are right, but the forward was run again more than once"
