# SPDX-License-Identifier: Apache-2.0
"""Which tokens go through the pipeline together: a plan as data, like a schedule of a training run.

A pass takes some tokens of one group of requests through all stages. The tokens that are chosen
after it go from the last stage back to the first, and only then can the next pass of the group
begin. So a group that is being continued keeps one stage busy at a time, and as many groups as
stages keep all of them busy.

A prompt is read in chunks (Agrawal et al. 2023, 2308.16369, section 4), each together with one
token of every request that is already being continued. A chunk after which nothing is chosen does
not delay the next pass. A request takes a slot of the cache as soon as one is free, and frees it
after its last token while the others go on. This is continuous batching (Yu et al. 2022, "Orca",
section 3).

The plan needs the number of tokens of each request in advance. A server that stops at a token which
the model chooses has to decide pass by pass, on the first rank, and to send the decision along with
the activation.
"""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.schedule import Action, Schedule


class Row(NamedTuple):
    """Tokens `start` to `end` - 1 of a request, whose keys and values are in `slot`.

    `chooses` tells whether the next token is chosen after them; it is false for a part of a prompt.
    """

    request: int
    slot: int
    start: int
    end: int
    chooses: bool


class Pass(NamedTuple):
    """The rows of one group that go through all stages together.

    `chain` numbers the chains of passes that follow from each other. The first pass of a chain has
    `depth` 0; each later one needs the tokens that were chosen after the one before.
    """

    group: int
    chain: int
    depth: int
    rows: tuple

    @property
    def num_tokens(self):
        return sum(row.end - row.start for row in self.rows)

    @property
    def choosing(self):
        """Return the rows after which a token is chosen."""
        return [row for row in self.rows if row.chooses]


@dataclass
class Active:
    """A request in a slot: how many of its tokens are cached, and how many are still to come."""

    request: int
    prompt: int  # its length
    left: int
    cached: int = 0


def plan_passes(requests, groups, slots, most_tokens):
    """All passes that answer `requests`, in order.

    `groups` take turns; each has `slots` places in the cache. A pass has at most `most_tokens`
    tokens, which must be at least `slots`: first one of each request that is being continued, then
    as many of the prompts as there is room for.
    """
    waiting, passes = deque(range(len(requests))), []
    active = [{} for _ in range(groups)]  # slot -> Active
    last = [None] * groups  # the newest Pass of each group
    turn = chains = 0
    while waiting or any(active):
        admit(requests, waiting, active, slots, turn)
        group = turn % groups
        rows = rows_of(active[group], most_tokens)
        if rows:
            before = last[group]
            if before and before.choosing:
                place = before.chain, before.depth + 1
            else:
                place, chains = (chains, 0), chains + 1
            last[group] = Pass(group, *place, tuple(rows))
            passes.append(last[group])
        turn += 1
    return passes


def admit(requests, waiting, active, slots, turn):
    """Give each waiting request a slot in the emptiest group; of equals, in the next in turn."""
    while waiting:
        groups = sorted(
            range(len(active)), key=lambda g: (len(active[g]), (g - turn) % len(active))
        )
        taken = active[groups[0]]
        if len(taken) == slots:
            return
        number = waiting.popleft()
        slot = min(set(range(slots)) - set(taken))
        taken[slot] = Active(number, len(requests[number].prompt), requests[number].count)


def rows_of(active, most_tokens):
    """The rows of a group's next pass. Updates `active` to the state after the pass."""
    rows, room = [], most_tokens
    continued = [item for item in active.items() if item[1].cached >= item[1].prompt]
    reading = [item for item in active.items() if item[1].cached < item[1].prompt]
    for slot, one in continued + reading:
        start = one.cached
        end = start + 1 if start >= one.prompt else min(one.prompt, start + room)
        if end == start:
            continue
        room -= end - start
        one.cached, chooses = end, end >= one.prompt
        one.left -= chooses
        rows.append(Row(one.request, slot, start, end, chooses))
        if not one.left:
            del active[slot]
    return rows


def schedule_of(passes, num_ranks):
    """Return the passes as a Schedule of forwards, for the simulator and the figures.

    A chain of passes is one micro-batch that goes through all ranks again and again: pass n, counted
    from 0, takes the stages n x num_ranks to (n + 1) x num_ranks - 1.
    """
    orders = [tuple(action_of(one, rank, num_ranks) for one in passes) for rank in range(num_ranks)]
    return Schedule("inference", tuple(orders))


def action_of(one, rank, num_ranks):
    return Action(one.depth * num_ranks + rank, "F", one.chain)
