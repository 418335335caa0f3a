# SPDX-License-Identifier: Apache-2.0
"""The puzzles of lesson 12 as data: their sizes, costs, target and best known result.

The best results come from exact_search.py; the tests compute them again.
"""

from dataclasses import dataclass

from lab.simulator import Costs
from planning.exact_search import Problem


@dataclass(frozen=True)
class Puzzle:
    """One puzzle. Costs and times are in milliseconds; costs are those of one stage.

    `rank_of_stage[stage]` is the rank that has the stage. `room[rank]`, unless None, is the most
    stage x micro-batch activations that the rank may hold, from the start of F to the end of B or
    I, or with `until_weight` to the end of B or W. `target` and `best` are makespans, or with
    `measure="idle"` the longest time that a rank is idle between its first action and its last.
    `best` is proven to be optimal unless `bound` is given: then nothing below `bound` is possible,
    and it is not known whether `bound` can be reached. `flags` are the flags of train.py that pace
    the ranks by the costs. `node_delay` is the time in ms of a message between two nodes, each of
    which has two ranks.
    """

    title: str
    rank_of_stage: tuple
    num_microbatches: int
    costs: Costs
    target: float
    best: float
    praise: str
    bound: float | None = None
    measure: str = "makespan"
    split: bool = False
    room: tuple | None = None
    until_weight: bool = False
    flags: str = "--pace 20 40"
    node_delay: float = 0.0

    @property
    def num_ranks(self):
        return 1 + max(self.rank_of_stage)

    @property
    def problem(self):
        """The puzzle as a Problem of exact_search.py, which finds the shortest makespan."""
        return Problem(
            self.rank_of_stage,
            self.num_microbatches,
            self.costs,
            self.split,
            self.room,
            self.until_weight,
        )

    def measured(self, timeline):
        """The time in ms that is compared with the target."""
        if self.measure == "makespan":
            return timeline.makespan
        return max(
            span - busy for span, busy in zip(timeline.span_per_rank, timeline.busy_per_rank)
        )

    def held(self, timeline):
        """The peak number of held activations of each rank, to be compared with `room`."""
        if self.until_weight:
            return timeline.peak_held_until_weight_per_rank
        return timeline.peak_held_per_rank


STAGE = Costs(forward=20, backward=40)
HALF_A_STAGE = Costs(forward=10, backward=20)
# Stages 1 and 2 have two layers each, stages 0 and 3 one; ranks 1 and 2 are on different nodes.
TWO_NODES = Costs([10, 20, 20, 10], [20, 40, 40, 20], transfer={(1, 2): 50, (2, 1): 50})

# {number of the exercise: Puzzle}
PUZZLES = {
    1: Puzzle(
        "One at a time",
        (0, 1),
        2,
        STAGE,
        target=240,
        best=240,
        room=(1, 1),
        praise="with room for one micro-batch the naive order is all there is.",
    ),
    2: Puzzle(
        "All forwards first",
        (0, 1, 2),
        4,
        STAGE,
        target=360,
        best=360,
        praise="rank 2 waits for its first activation and rank 0 for its last gradient; "
        "no order of whole backwards changes either.",
    ),
    3: Puzzle(
        "A deadlock",
        (0, 1),
        4,
        STAGE,
        target=300,
        best=300,
        room=(2, 2),
        praise="one forward less in hand, and nobody waits for somebody who waits.",
    ),
    4: Puzzle(
        "As fast, with less in hand",
        (0, 1, 2),
        4,
        STAGE,
        target=360,
        best=360,
        room=(3, 2, 1),
        praise="GPipe's makespan with 1F1B's memory.",
    ),
    5: Puzzle(
        "Room for two",
        (0, 1, 2),
        4,
        STAGE,
        target=420,
        best=420,
        room=(2, 2, 2),
        praise="a micro-batch less on rank 0 costs 60 ms, and no order gets them back.",
    ),
    6: Puzzle(
        "Two stages per rank",
        (0, 1, 0, 1),
        4,
        HALF_A_STAGE,
        target=270,
        best=270,
        room=(5, 3),
        flags="--pace 10 20",
        praise="half the bubble of one stage per rank, in Megatron's memory.",
    ),
    7: Puzzle(
        "Halves, in 1F1B's own room",
        (0, 1, 2),
        4,
        STAGE,
        target=320,
        best=320,
        split=True,
        room=(3, 2, 1),
        until_weight=True,
        praise="that is all that splitting gives for nothing; what is left of the bubble costs room.",
    ),
    8: Puzzle(
        "The bubble of ZB-H1",
        (0, 1, 2, 3),
        8,
        STAGE,
        target=540,
        best=540,
        split=True,
        room=(4, 4, 4, 4),
        until_weight=True,
        praise="every rank holds what rank 0 of 1F1B holds, and a third of the bubble is left.",
    ),
    9: Puzzle(
        "No idle time in between",
        (0, 1),
        4,
        STAGE,
        target=0,
        best=0,
        measure="idle",
        split=True,
        room=(3, 3),
        until_weight=True,
        praise="zero bubble, for one micro-batch more in hand.",
    ),
    10: Puzzle(
        "Both ends on one rank",
        (0, 1, 1, 0),
        4,
        HALF_A_STAGE,
        target=0,
        best=0,
        measure="idle",
        split=True,
        room=(4, 4),
        until_weight=True,
        flags="--pace 10 20",
        praise="zero bubble in 1F1B's memory: four halves are two whole micro-batches.",
    ),
    11: Puzzle(
        "Two nodes",
        (0, 1, 2, 3),
        16,
        TWO_NODES,
        target=1200,
        best=1150,
        bound=1040,
        split=True,
        room=(4, 4, 4, 4),
        until_weight=True,
        flags="--layers 6 --cut 1,2,2,1 --pace 10 20 --pace-per-layer",
        node_delay=50,
        praise="1F1B takes 1860 ms here.",
    ),
}
