# SPDX-License-Identifier: Apache-2.0
"""The check of lesson 11's search for the rank to look at. build_job.py has the other check."""

from course.building.endless_loops import endless_loops_ended
from course.checks.answer import call, checked


class RoundAndRound(RecursionError):
    """Raised in a function that follows a cycle of waits without end; it may catch this error."""


class Waits(dict):
    """{rank: the rank that it waits for}; raises RoundAndRound after too many reads."""

    asked = 0

    def __getitem__(self, rank):
        self.asked += 1
        if self.asked > 1000:
            raise RoundAndRound("asked 1000 times who waits for whom; a ring of waits has no end")
        return super().__getitem__(rank)

    def get(self, rank, default=None):
        """Like dict.get; the read is counted."""
        return self[rank] if rank in self else default


DEADLOCK = "deadlock"
HANGS = [
    ({0: 1, 1: 2, 2: None, 3: 2}, 2),
    ({0: 1, 1: 3, 2: 1, 3: None, 4: 1}, 3),
    ({0: 1, 1: 0}, DEADLOCK),
    ({0: 1, 1: 2, 2: 3, 3: 2}, DEADLOCK),
    ({0: None, 1: 0, 2: 1}, 0),
    ({0: 1, 1: None, 2: 3, 3: 2}, DEADLOCK),  # rank 1 holds up rank 0 alone
    ({0: 1, 1: 2, 2: 0, 3: None, 4: 3}, DEADLOCK),
    ({**{rank: rank + 1 for rank in range(8)}, 8: None}, 8),  # a chain longer than the others
]


@checked("all waits lead to one rank, or some go round in a ring: a deadlock.")
def to_blame(blame):
    """Check `blame(waits)`: the rank to look at, or "deadlock".

    `waits` maps each rank to the rank that it waits for, or to None if it does not wait.
    """
    for waits, right in HANGS:
        with endless_loops_ended():  # a copy of `waits` does not count its reads
            answer = call(blame, Waits(waits))
        if answer == right:
            continue
        case = f"{waits}: you say {answer!r}"
        if answer not in [*waits, DEADLOCK]:
            return f"{case}, which is neither a rank nor {DEADLOCK!r}"
        if right == DEADLOCK and None in waits.values():
            return f"{case}, and not all others wait for it: some wait for each other, in a ring"
        if right == DEADLOCK:
            return f"{case}, but every rank waits here: none of them can go on first"
        if answer == DEADLOCK:
            return f"{case}, but rank {right} waits for nobody: it is doing something else"
        waited_for = list(waits.values())
        if 1 < waited_for.count(answer) == max(map(waited_for.count, waits)):
            return f"{case}, for whom most wait; but rank {answer} itself waits for {waits[answer]}"
        return f"{case}, which waits for rank {waits[answer]}: follow the chain to its end"
