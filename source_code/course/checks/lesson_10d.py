# SPDX-License-Identifier: Apache-2.0
"""Checks of lesson 10d: dispatch and combine on two real ranks, and a schedule for an all-to-all."""

import math
from collections.abc import Mapping

from course.checks.answer import NotAttempted, checked, many
from course.checks.build_text import request_of
from course.checks.reader_on_ranks import perform

PROGRAM = "course.checks.lesson_10d_on_ranks.main"
# How a sentence about each of the program's cases begins.
CASES = "", "with other numbers of tokens and sequences, ", "if all tokens choose expert 0, "
HINTS = {
    "Split sizes doesn't match total dim 0 size": (
        "`exchange(rows, sent, received)` takes as many rows as its second argument counts, and on the "
        "way back the two counts change places"
    ),
    "must match the size of tensor": (
        "a rank has a result for each of its own tokens only after the rows have come back through "
        "`exchange`"
    ),
}
ROUNDED = "right to about seven digits only: was it rounded to float32 on its way?"


@checked("every token has its expert's result in its own place, and all gradients arrive.")
def dispatch_and_combine(mix):
    """Check `mix(x, chosen, weight, expert, exchange_counts, exchange, losses, sequences)`."""
    reports = perform(request_of(mix, program=PROGRAM, hints=HINTS), 2)
    for case, of_ranks in zip(CASES, zip(*reports)):
        # The results of both ranks first: a wrong row on one spoils the gradients of the other.
        for complaint_of in (complaint_of_results, complaint_of_gradients):
            for rank, report in enumerate(of_ranks):
                if complaint := complaint_of(report):
                    return f"{case}on rank {rank} {complaint}"
        for rank, report in enumerate(of_ranks):
            if count := report["not its own"]:
                return (
                    f"all is right, but {case}expert {rank} also computes {many(count, 'token')} that "
                    "chose the other one: dispatch sends a token to its own expert only"
                )


def complaint_of_results(report):
    """The first thing that is wrong in the results of a rank, or None."""
    if "wrong" in report:
        return report["wrong"]
    if not report["same"]:
        if report["rounded"]:
            return f"each result is {ROUNDED} `torch.zeros` makes float32, `torch.zeros_like(x)` does not"
        if report["sorted"]:
            return (
                "all results are right, but in another order: the rows come back sorted by expert, "
                "and each belongs in the place of its token"
            )
        if report["unweighted"]:
            return "each result is right but for the router's weight: multiply by it"
        if report["weighted before"]:
            return "the weight multiplies what goes into the expert: multiply the expert's result"
        if report["weighted twice"]:
            return "each result is multiplied by its weight twice: once is right"
        if report["with x"]:
            return "the results have their tokens added: return what the experts make of them alone"
        return f"the results are wrong: {misplaced(report['rows'], report['rank'])}"
    return None


def misplaced(rows, rank):
    """How the first wrong result of a rank was made, as the end of a sentence."""
    for place, row in enumerate(rows):
        if row is None:
            break
        if row != {**row, "rank": rank, "token": place, "weight": place, "expert": row["chosen"]}:
            whose = f"token {row['token']}" + (f" of rank {row['rank']}" * (row["rank"] != rank))
            return (
                f"in the place of token {place}, there is the result of expert {row['expert']} for "
                f"{whose}, which chose expert {row['chosen']}, times the weight of token {row['weight']}"
            )
    return "which row belongs to which token, to which weight and to which rank?"


def complaint_of_gradients(report):
    """The first thing that is wrong in the gradients or the auxiliary loss of a rank, or None."""
    if report["no result"]:
        return "the results are right, but lead back to nothing: return them without detach()"
    if report["no weight"]:
        return (
            "the results are right, but the router gets no gradient: use `weight` itself, not its "
            "numbers"
        )
    for name, what in {"weight": "router's weights", "expert": "expert", "x": "tokens"}.items():
        if not report[name]:
            return (
                f"the gradient of the {what} is wrong: rows go both ways through `exchange`, and "
                "nothing is detached"
            )
    if not report["share"]:
        if report["share rounded"]:
            return f"the share of the auxiliary loss is {ROUNDED}"
        if report["share of own"]:
            return (
                "the auxiliary loss is a mean over this rank's own sequences, so the sum of both "
                "ranks is too large: the batch has `sequences`"
            )
        return "the share of the auxiliary loss is wrong: add up `losses`, over all `sequences`"
    if report["no losses"]:
        return "the auxiliary loss has no gradient: use `losses` itself, not its numbers"
    if not report["losses"]:
        return (
            "the gradient of the auxiliary loss is wrong: each of `losses` counts 1 / `sequences`"
        )


@checked("pairs hide more than half of the short all-to-alls, and less than half of the long ones.")
def hidden_parts(hidden):
    """Check `hidden`: {ms: share of the all-to-alls that interleaved 1F1B hides in pairs}."""
    if not isinstance(hidden, Mapping):
        return "hidden is a dictionary, {5: a number, 15: a number}"
    if hidden and all(value is ... for value in hidden.values()):
        raise NotAttempted
    for milliseconds, right in ((5, 110 / 190), (15, 238.333 / 570)):
        found = hidden.get(milliseconds)
        if found is ... or found is None:
            return f"{milliseconds} ms is still open"
        try:
            share = math.nan if isinstance(found, str) else float(found)  # also of numpy or torch
        except (TypeError, ValueError):
            share = math.nan
        if not 0 <= share <= 1:
            return f"{milliseconds} ms: give a number from 0 to 1, not {found!r}"
        if abs(share - right) > 0.01:
            return (
                f"{milliseconds} ms: not {share:.3f}; subtract the time in pairs from the time one "
                "after the other, and divide by what the all-to-alls add without pairs"
            )
