# SPDX-License-Identifier: Apache-2.0
"""Checks of lesson 07: the order of the calls in a save, and the files that each rank reads."""

import re
from itertools import product
from numbers import Real

from course.checks.answer import WrongAnswer, call, checked, drawn, in_a_list, many, number_in
from pipeline.model import cut_evenly

CALLS = ["write", "sync", "wait for all ranks", "rename", "move latest", "remove the oldest"]


@checked("at every moment one whole checkpoint has its name, and latest names one.")
def order_of_a_save(order):
    """Check `order`, a list of the calls of CALLS; a crash is tried before and after each call.

    There are two ranks: rank 0 makes the calls in this order. Rank 1 is slower: it has written and
    synced its file only after rank 0 has waited for it.
    """
    try:
        order = re.split(r" *(?:,|;|\n|->) *", order.strip()) if isinstance(order, str) else order
        order = [str(call) for call in in_a_list(order)]
    except TypeError:
        raise WrongAnswer(f"write the six calls as strings in a list, as in {CALLS[:2]}") from None
    if sorted(order) != sorted(CALLS):
        raise WrongAnswer(f"use each of these once: {', '.join(CALLS)}")
    for done in range(len(order) + 1):
        complaint = _after_crash(order[:done])
        if complaint:
            moment = f"after '{order[done - 1]}'"
            raise WrongAnswer(f"the power fails {moment}: {complaint}")


def _after_crash(made):
    """The error in the folder after a crash when only these calls were `made`, or None."""
    named = "rename" in made
    before_name = made[: made.index("rename")] if named else made
    if named and "write" not in before_name:
        return "the new checkpoint has its name, and rank 0 has not written its file"
    if named and "sync" not in before_name:
        return (
            "the new checkpoint has its name, and what rank 0 wrote was only in memory, not on disk"
        )
    if named and "wait for all ranks" not in before_name:
        return "the new checkpoint has its name, and rank 1 has not finished writing its file"
    if "sync" in made and "write" not in made[: made.index("sync")]:
        return "what rank 0 syncs it has not written yet"
    if "move latest" in made and not named:
        return "latest names a checkpoint that does not have its name yet"
    if "remove the oldest" in made and "move latest" not in made:
        if not named:
            return "the old checkpoint is gone, and the new one does not have its name yet"
        return "latest still names the old checkpoint, which is gone"
    return None


# (layers, ranks that saved, ranks that restore). With 10 layers on 4 ranks, the stages begin with
# layers 0, 3, 6 and 8, which rounding rank x 10 / 4 does not give.
SAVED = [(8, 4, 2), (8, 2, 4), (8, 4, 1), (8, 4, 4), (10, 4, 3), (10, 4, 5), (12, 6, 2)]
SAVED += ((n, *ranks) for n in range(1, 9) for ranks in product(range(1, n + 1), repeat=2))
SAVED += drawn(lambda c: (c.randint(24, 99), c.randint(1, 24), c.randint(1, 24)))


@checked("a rank opens the files that hold its layers, whoever wrote them.")
def files_to_open(files):
    """Check `files(rank, num_ranks, saved_by, layers)`: the ranks whose files have its layers."""
    for layers, saved_by, num_ranks in SAVED:
        saved = cut_evenly(layers, saved_by)
        for rank, (first, last) in enumerate(cut_evenly(layers, num_ranks)):
            answer = _opened(files, rank, num_ranks, saved_by, layers)
            wanted = [s for s, (low, high) in enumerate(saved) if low < last and first < high]
            if answer == wanted:
                continue
            case = f"{many(layers, 'layer')} saved by {many(saved_by, 'rank')}, rank {rank} of {num_ranks}"
            last_too = _opened(files, num_ranks - 1, num_ranks, saved_by, layers)
            if answer == list(range(saved_by)) == last_too:
                hint = "that is every file: it needs those only in which its own layers lie"
            elif set(wanted) - set(answer):
                missing = min(set(wanted) - set(answer))
                low, high = saved[missing]
                lie = "lie" if high - low > 1 else "lies"
                hint = f"in the file of rank {missing} {lie} {_layers(low, high)}"
            else:
                extra = min(set(answer) - set(wanted), default=None)
                hint = "name each rank once"
                if extra is not None:
                    hint = f"the file of rank {extra} has none of its layers"
            return f"{case} has {_layers(first, last)}, and you open {answer}: {hint}"
    return None


def _layers(first, last):
    return f"layers {first} to {last - 1}" if last - first > 1 else f"layer {first}"


def _opened(files, *sizes):
    """The ranks that the learner's function names, in ascending order."""
    answer = call(files, *sizes)
    try:
        ranks = sorted(map(number_in, answer))
    except TypeError:
        ranks = [None]
    if any(isinstance(rank, bool) or not isinstance(rank, Real) for rank in ranks):
        raise WrongAnswer(f"return a list of ranks, not {answer!r}")
    return ranks
