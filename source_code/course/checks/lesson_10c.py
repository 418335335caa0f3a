# SPDX-License-Identifier: Apache-2.0
"""Checks of lesson 10c: the loss of a split vocabulary on real ranks, and a cut by cost."""

import math
from itertools import product

from course.checks.answer import (
    call,
    checked,
    close,
    drawn,
    first_complaint,
    whole_numbers_in,
)
from course.checks.build_text import request_of
from course.checks.reader_on_ranks import perform

MOST_CALLS = 3
PROGRAM = "course.checks.lesson_10c_on_ranks.main"
LOSSES = {  # the sentence about each loss that a known omission gives
    "sum": "of this rank's rows alone: the sum of the exponentials needs those of all ranks",
    "target": "without the score of most targets: the rank that has it must tell the others",
    "tops": "from exponentials above different scores: all ranks must subtract the same one",
    "own tops": "from exponentials above different scores: all ranks must subtract the same one",
    "target's tops": "from exponentials above different scores: all ranks must subtract the same one",
    "above": "without the largest score, which the logarithm needs again: the largest score is "
    "subtracted from the exponentials alone",
    "total": "of all positions together: return the mean over the positions",
    "ranks": "divided by the number of ranks: after the sums every rank has the whole loss",
    "twice": "with the sum of the exponentials added up over the ranks a second time",
    "logs": "with the sum of the ranks' logarithms: add up the exponentials, and take the logarithm of "
    "their sum",
    "largest target": "with the maximum of the ranks' scores for a target: a score may be negative, so "
    "add up, with 0 on the other ranks",
    "below": "with the largest score subtracted from the target's, too: it is subtracted from the "
    "exponentials alone",
}
SLIPS = {  # of a rank that looks up a target's score: the sentence about each loss that one gives
    "unshifted": "with targets that are not shifted: column 0 of a rank is token `first`, so look in "
    "column target - first",
    "everywhere": "with a score of every rank for each target: only the rank that has the target "
    "adds its score, and the others add 0",
    "before": "with the score one column before each target's: its column is target - first",
    "after": "with the score one column after each target's: its column is target - first",
    "without first": "without the targets in the first column of a rank, which is token `first`",
    "without last": "without the targets in the last column of a rank, which is token first + "
    "scores.shape[1] - 1",
    "one above": "with one token too many on each rank: first + scores.shape[1] belongs to the next "
    "rank",
    "one below": "with one token too many on each rank: first - 1 belongs to the rank before",
}
HINTS = {
    "is out of bounds": "token t is in column t - first of the rank that has it, and in no column of "
    "another rank, where t - first is negative or too large"
}
GRADIENTS = {
    "softmax": "is the softmax alone: the target's score has a gradient of -1 on the rank that has it",
    "undivided": "is made with the exponentials themselves: divide them by their sum over all ranks",
    "own": "is made with the softmax of this rank's rows: divide by the sum over all ranks",
    "rounded": "is right to about seven digits only: was it a float32?",
    "else": "is not a multiple of the right one: softmax, less 1 at the target, over the positions",
}


CASES_IN_WORDS = (
    "",
    ", with scores a thousand times as large,",
    ", if rank 2 has none of the targets,",
)
SIZES_IN_WORDS = {"": 3, "on 2 ranks, with 5 positions and 37 tokens: ": 2}


@checked(
    "the loss and the gradient of the whole vocabulary, with at most three calls of all_reduce."
)
def split_loss(function):
    """Check `function(scores, targets, first, all_reduce)`: (mean loss, gradient of the scores)."""
    request = request_of(function, program=PROGRAM, hints=HINTS)
    return first_complaint(lambda ranks: complaint_on(perform(request, ranks)), SIZES_IN_WORDS)


def complaint_on(reports):
    """The first error in what the ranks have reported, as a sentence, or None."""
    for rank, of_rank in enumerate(reports):
        for size, report in zip(CASES_IN_WORDS, of_rank):
            if report is None:
                return "return a pair: the mean loss, and the gradient of this rank's scores"
            if complaint := complaint_of(report):
                return f"on rank {rank}{size} {complaint}"
    sizes, scores = reports[0][0]["sizes"], reports[0][0]["scores"]
    if not sizes:
        return "all is right, but nothing went through all_reduce; use nothing else between ranks"
    if sum(sizes) >= scores:
        return (
            f"all is right, but all_reduce got {sum(sizes)} numbers on rank 0, which has {scores} "
            "scores; three per position are enough, and the scores stay on their ranks"
        )
    if len(sizes) > MOST_CALLS:
        return f"all is right, but with {len(sizes)} calls of all_reduce; {MOST_CALLS} are enough"


def complaint_of(report):
    """The error in the loss, or if there is none that in the gradient, as a sentence; or None."""
    loss, losses = report["loss"], report["losses"]
    if loss is None:
        return "the loss is not one number"
    if loss == -math.inf:
        return (
            "the loss is -inf: at some position all exponentials are zero, since more than its own "
            "largest score was subtracted"
        )
    if not math.isfinite(loss):
        return (
            f"the loss is {loss}: exp() of a large score overflows, so subtract the largest one of "
            "all ranks first"
        )
    if not close(loss, losses["right"]):
        for name, said in LOSSES.items():
            if close(loss, losses[name]):
                return f"the loss is that {said}"
        for name, said in SLIPS.items():
            if any(close(loss, each) for each in report["slips"][name]):
                return f"the loss is that {said}"
        if math.isclose(loss, losses["right"], rel_tol=1e-5):
            return (
                f"the loss is off by {abs(loss - losses['right']):.0e}: was a part of it a float32?"
            )
        return f"the loss is {loss:.6f}, and that of the whole vocabulary {losses['right']:.6f}"
    return complaint_of_gradient(*report["gradient"])


def complaint_of_gradient(what, *more):
    """The error in the gradient, from the result of `compare` in lesson_10c_on_ranks.py."""
    if what == "right":
        return None
    if what == "shape":
        return f"the gradient has the shape {tuple(more[0])}, and the scores have {tuple(more[1])}"
    if what == "times":
        return f"the gradient is {more[0]:.4g} times the right one: the loss is a mean of {more[1]}"
    if what == "elsewhere":
        return (
            f"the gradient is wrong at positions {', '.join(map(str, more[0]))} only, whose target "
            "is on another rank: there is nothing to subtract there"
        )
    if what == "column":
        return (
            "the gradient has its -1 at position {} in column {} of this rank, and the target is in "
            "column {}".format(*more)
        )
    return f"the gradient {GRADIENTS[what]}"


# The second exercise: a head that is worth `head` layers, on the last stage.

# For (24, 4.8, 4) the equal share of the work, rounded to layers, is not the best.
CASES = [
    (8, 2.42, 4),
    (32, 0.65, 4),
    (32, 2.41, 8),
    (24, 4.8, 4),
    (24, 9.13, 4),
    (24, 9.13, 8),
    (11, 2.25, 4),  # the rounded-up share is not the best either
]


def _layers_head_stages(choose):
    """Many layers only with few stages, since an answer may try all cuts."""
    stages = choose.randint(2, 6)
    layers = stages + choose.randint(0, 90 if stages < 4 else 18)
    return layers, choose.randint(1, 3000) / 100, stages


SIZES = [
    (n, head, k) for n, head in product(range(2, 9), (0.1, 1, 2.5, 4)) for k in range(2, n + 1)
]
SIZES += drawn(_layers_head_stages)


def slowest_of(cut, head):
    """The work of the slowest stage, in layers; the head counts as `head` layers."""
    return max(*cut[:-1], cut[-1] + head) if len(cut) > 1 else cut[0] + head


def best_of(layers, head, stages):
    """The least work of the slowest stage over all cuts with at least one layer per stage."""
    best = math.inf
    for last in range(1, layers - stages + 2):
        others = -(-(layers - last) // (stages - 1)) if stages > 1 else 0
        best = min(best, max(others, last + head))
    return best


@checked("no cut has a faster slowest stage.")
def cut_by_cost(function):
    """Check `function(layers, head, stages)`: the layers of each stage; the head is on the last."""
    for layers, head, stages in [*CASES, *SIZES]:
        case = f"{layers} layers, a head of {head}, {stages} stages"
        try:
            cut = whole_numbers_in(call(function, layers, head, stages))
        except TypeError:
            return f"{case}: return a list with the number of layers of each stage"
        if len(cut) != stages:
            return f"{case}: {list(cut)} has {len(cut)} stages"
        if sum(cut) != layers:
            return f"{case}: {list(cut)} has {sum(cut)} layers in all"
        if min(cut) < 1:
            return f"{case}: {list(cut)} has {min(cut)} in the smallest stage; use at least 1"
        ours, best = slowest_of(cut, head), best_of(layers, head, stages)
        if ours > best + 1e-9:
            return (
                f"{case}: the slowest stage of {list(cut)} has {ours:.2f} layers' work, and a cut "
                f"with {best:.2f} exists"
            )
