# SPDX-License-Identifier: Apache-2.0
"""The check of a comparison with one process, on real ranks (lesson 08b)."""

import math

from course.checks.answer import checked, first_complaint
from course.checks.build_text import request_of
from course.checks.reader_on_ranks import perform

PROGRAM = "course.checks.build_comparison_on_ranks.main"
EXACT = 1e-12
RANKS = {"": 3, "on 2 ranks, ": 2}


@checked("it finds each of the five mistakes from every rank, and none where there is none.")
def comparison(difference):
    """Check `difference(found, right)`; on each rank it gets two lists of gradients.

    It returns the largest difference of the whole model, divided by its largest right gradient.
    """
    request = request_of(difference, program=PROGRAM)
    return first_complaint(lambda ranks: complaint_of(perform(request, ranks)), RANKS)


def complaint_of(reports):
    """The first wrong answer in what the ranks have reported, or None."""
    for cases in zip(*reports):  # one case, as each rank reports it
        if complaint := wrong_answer(*cases):
            return f"{cases[0][0]}: {complaint}"


def wrong_answer(*ranks):
    """The error in the ranks' results for one case, as a sentence, or None."""
    _, said, off, largest, _ = zip(*ranks)
    for rank, one in enumerate(said):
        if type(one) not in (int, float):
            return f"rank {rank} returns {one}; return a number"
    if not all(map(math.isfinite, off)):
        return wrong_on_nan(said)
    wanted = max(off) / max(largest)
    if all(close(one, wanted) for one in said):
        return None
    if len(set(said)) > 1:
        return differing(said)
    return f"your ranks return {said[0]:.3g}, {meaning(said[0], ranks, wanted)}"


def wrong_on_nan(said):
    """The error in the results if a gradient is nan, or None."""
    for rank, one in enumerate(said):
        if math.isnan(one) or one == -math.inf:
            return (
                f"rank {rank} returns {one}, and `difference > 1e-9` is False for that, too, so the "
                "comparison passes: return inf"
            )
        if math.isfinite(one):
            return (
                f"rank {rank} returns {one:.3g}: every comparison with nan is False, and so the "
                "largest of some numbers may leave it out, also in all_reduce; make it inf before"
            )


def differing(said):
    """The sentence about ranks that return different numbers."""
    return (
        f"the ranks return {', '.join(f'{one:.3g}' for one in said)}; each has to learn of the "
        "largest difference and of the largest gradient on all ranks"
    )


def meaning(said, ranks, wanted):
    """The end of a sentence: the quantity that the wrong number is equal to."""
    _, _, off, largest, added = zip(*ranks)
    shares = [one / most for one, most in zip(off, largest)]
    known = [
        (max(off), "the difference itself: divide it by the largest gradient of one process"),
        (max(shares), "a share of the largest gradient on one rank, not of the whole model's"),
        (sum(off) / sum(largest), "the sum over the ranks: ask all_reduce for the maximum"),
        (sum(off) / max(largest), "the sum over the ranks: ask all_reduce for the maximum"),
        (max(added) / max(largest), "the sum of all differences: take the largest one"),
        (sum(added) / max(largest), "the sum of all differences: take the largest one"),
    ]
    if math.isclose(said, wanted, rel_tol=1e-3):
        return (
            f"which is right only in its first digits ({said!r}, not {wanted!r}): was it rounded? "
            "torch.tensor, too, makes float32 of Python's floats without dtype=torch.float64"
        )
    for value, what in known:
        if same_in_float32(said, value):
            return what
    if abs(said) <= EXACT:
        return (
            "so you do not see it: a gradient may differ upwards and downwards, be missing, or be "
            "on another rank"
        )
    return f"and the largest difference is {wanted:.3g} of the largest gradient"


def same_in_float32(one, other):
    return math.isclose(one, other, rel_tol=1e-6)


def close(one, other):
    return abs(one - other) <= max(EXACT, 1e-9 * abs(other))
