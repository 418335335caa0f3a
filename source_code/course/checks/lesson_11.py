# SPDX-License-Identifier: Apache-2.0
"""The check of lesson 11's search for the rank to look at. build_job.py has the other check."""

from itertools import product

from course.building.endless_loops import endless_loops_ended
from course.checks.answer import call, checked, drawn


class RoundAndRound(RecursionError):
    """Raised in a function that follows a cycle of waits without end; it may catch this error."""


class Waits(dict):
    """{rank: the rank that it waits for}; raises RoundAndRound after too many reads."""

    asked = 0

    def __getitem__(self, rank):
        self.asked += 1
        if self.asked > 1000 + len(self) ** 3:
            raise RoundAndRound(
                "asked again and again who waits for whom; a ring of waits has no end"
            )
        return super().__getitem__(rank)

    def get(self, rank, default=None):
        """Like dict.get; the read is counted."""
        return self[rank] if rank in self else default


DEADLOCK = "deadlock"


def _is_hang(peers):
    """Whether no rank waits for itself, and at most one for nobody."""
    return peers.count(None) <= 1 and all(rank != peer for rank, peer in enumerate(peers))


def _drawn_hang(choose):
    """For each of up to sixteen ranks the one that it waits for: chains that end, or a ring, too."""
    count, branches = choose.randint(5, 16), choose.randint(1, 3)
    order, peers = choose.sample(range(count), count), [None] * count
    for place in range(1, count):
        peers[order[place]] = order[choose.randrange(max(0, place - branches), place)]
    if choose.random() < 0.5:
        rank, peer = choose.sample(range(count), 2)
        peers[rank] = peer
    return peers


# For each rank the one that it waits for.
HANGS = [
    [1, 2, None, 2],
    [1, 3, 1, None, 1],
    [1, 0],
    [1, 2, 3, 2],
    [None, 0, 1],
    [1, None, 3, 2],  # rank 1 holds up rank 0 alone
    [1, 2, 0, None, 3],
    *filter(_is_hang, (each for n in (2, 3, 4) for each in product([*range(n), None], repeat=n))),
    *drawn(_drawn_hang),
    [*range(1, 120), None],
]


def _end_of(waits):
    """The rank at the end of all chains, or DEADLOCK."""
    for rank in waits:
        for _ in waits:
            rank = rank if waits[rank] is None else waits[rank]
        if waits[rank] is not None:
            return DEADLOCK
    return rank


@checked("all waits lead to one rank, or some go round in a ring: a deadlock.")
def to_blame(blame):
    """Check `blame(waits)`: the rank to look at, or "deadlock".

    `waits` maps each rank to the rank that it waits for, or to None if it does not wait.
    """
    for waits in (dict(enumerate(peers)) for peers in HANGS):
        right = _end_of(waits)
        with endless_loops_ended():  # a copy of `waits` does not count its reads
            answer = call(blame, Waits(waits))
        if answer == right:
            continue
        is_long = len(waits) > 16
        case = f"{len(waits)} ranks, each of which waits for the next" if is_long else f"{waits}"
        case += f": you say {answer!r}"
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
