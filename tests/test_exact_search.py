"""The exact search finds the shortest schedule there is: as trying everything, as theory says."""

import random
from itertools import product
from pathlib import Path

import pytest

from course.checks.puzzles import PUZZLES
from lab.simulator import Costs, simulate
from pipeline.schedule import Action, Schedule, ScheduleError, message_of, needs_of
from pipeline.schedules import (
    gpipe,
    interleaved_1f1b,
    naive,
    one_f_one_b,
    zb_h1,
    zb_h2,
    zb_v,
)
from pipeline.schedules.text_form import read_csv
from planning.exact_search import (
    Moment,
    Problem,
    best_schedule,
    bound_of,
    first_moment,
    sweep,
    what_matters,
)

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
WHOLE = Costs(forward=1, backward=2)
HALF = Costs(forward=1, backward=2, backward_weight=1)
# Small enough to try all orders: the ranks of the stages, micro-batches, split or not.
SHAPES = [
    ((0, 1), 2, False),
    ((0, 1), 2, True),
    ((0, 1, 2), 2, False),
    ((0, 1, 1, 0), 1, True),
    ((0, 1, 0, 1), 1, True),
]


def all_orders(rank_of_stage, num_microbatches, split):
    """Every schedule in which each micro-batch's F, then B or I and W, stand in this order on a rank.

    The micro-batches may overtake each other, which the search says is never needed.
    """
    ranks = []
    for rank in range(1 + max(rank_of_stage)):
        passages = [
            [Action(stage, kind, microbatch) for kind in ("FIW" if split else "FB")]
            for stage, owner in enumerate(rank_of_stage)
            if owner == rank
            for microbatch in range(num_microbatches)
        ]
        ranks.append(list(interleavings(passages)))
    return (Schedule("tried", orders) for orders in product(*ranks))


def interleavings(rows):
    """All ways to make one row out of several that keep the order of each."""
    rows = [row for row in rows if row]
    if not rows:
        yield ()
    for i, row in enumerate(rows):
        rest = [other[1:] if other is row else other for other in rows]
        for end in interleavings(rest):
            yield (rows[i][0], *end)


def played(schedules, costs):
    """The timeline of each that is not a deadlock."""
    for schedule in schedules:
        try:
            yield simulate(schedule, costs)
        except ScheduleError:
            pass


def held(timeline, until_weight):
    if until_weight:
        return timeline.peak_held_until_weight_per_rank
    return timeline.peak_held_per_rank


def fits(timeline, room, until_weight):
    return room is None or all(h <= r for h, r in zip(held(timeline, until_weight), room))


@pytest.mark.parametrize(
    ("rank_of_stage", "num_microbatches", "split", "seed"),
    [(*shape, seed) for shape in SHAPES for seed in range(24)]
    + [((0, 1), 3, False, seed) for seed in range(4)],
)
def test_it_finds_what_trying_all_orders_finds(rank_of_stage, num_microbatches, split, seed):
    draw = random.Random(seed)
    stages, ranks = len(rank_of_stage), 1 + max(rank_of_stage)
    weight = [draw.randint(1, 4) for _ in range(stages)]
    costs = Costs(
        [draw.randint(1, 9) for _ in range(stages)],
        [part + draw.randint(1, 5) for part in weight],
        weight,
        draw.choice([0, 3, {(0, 1): 4, (1, 0): 1}]),
    )
    room = draw.choice([None, [draw.randint(1, 4) for _ in range(ranks)]])
    until_weight = draw.choice([False, True])
    timelines = played(all_orders(rank_of_stage, num_microbatches, split), costs)
    tried = [t.makespan for t in timelines if fits(t, room, until_weight)]
    problem = Problem(rank_of_stage, num_microbatches, costs, split, room, until_weight)
    found = best_schedule(problem)
    if not tried:
        assert found is None
        return
    assert found.proven
    assert found.makespan == min(tried)
    # Without a limit on their number, what is dropped is never what the best one needs.
    start = first_moment(problem)
    end, complete, _ = sweep(problem, start, 10**9, below=min(tried) + 1e-3)
    assert complete and max(end.free) == min(tried)
    assert sweep(problem, start, 10**9, below=min(tried))[0] is None
    timeline = simulate(found.schedule, costs)
    assert timeline.makespan == found.makespan
    assert fits(timeline, room, until_weight)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("num_microbatches", [1, 3, 6])
def test_no_order_of_whole_backwards_is_shorter_than_gpipe_and_1f1b(num_ranks, num_microbatches):
    found = best_schedule(Problem(range(num_ranks), num_microbatches, WHOLE))
    assert found.proven
    assert found.makespan == (num_microbatches + num_ranks - 1) * 3
    for make in (gpipe, one_f_one_b):
        assert simulate(make(num_ranks, num_microbatches), WHOLE).makespan == found.makespan


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_with_room_for_one_micro_batch_the_naive_order_is_best(num_ranks):
    found = best_schedule(Problem(range(num_ranks), 4, WHOLE, room=[1] * num_ranks))
    assert found.proven
    assert found.makespan == simulate(naive(num_ranks, 4), WHOLE).makespan


def test_27_units_of_zb_h1_and_zb_h2_are_best_for_4_ranks_and_8_micro_batches():
    found = best_schedule(Problem(range(4), 8, HALF, split=True))
    assert found.proven
    assert found.makespan == 27
    for make in (zb_h1, zb_h2):
        assert simulate(make(4, 8), HALF).makespan == 27


@pytest.mark.parametrize("num_microbatches", [1, 2, 3])
def test_few_micro_batches_take_what_appendix_h_of_the_zero_bubble_paper_says(num_microbatches):
    costs = Costs(forward=2, backward=5, backward_weight=2)
    found = best_schedule(Problem(range(3), num_microbatches, costs, split=True))
    assert found.proven
    assert found.makespan == (num_microbatches + 3 - 1) * (2 + 3) + 2


def test_interleaved_1f1b_and_zb_v_are_as_short_as_their_placements_allow():
    loop = best_schedule(Problem((0, 1, 0, 1), 4, WHOLE, room=(5, 3)))
    assert loop.makespan == simulate(interleaved_1f1b(2, 4), WHOLE).makespan
    v = best_schedule(Problem((0, 1, 1, 0), 4, HALF, True, (4, 4), until_weight=True))
    assert v.makespan == simulate(zb_v(2, 4), HALF).makespan
    assert loop.proven and v.proven


def waits_on_purpose(timeline):
    """Whether a rank stands idle although one of its actions could start."""
    ends = {message_of(event.action): event.end for event in timeline.events}
    for events in timeline.by_rank:
        free = timeline.start
        for i, event in enumerate(events):
            for other in events[i:]:
                needs = needs_of(other.action, timeline.num_stages)
                if max([free, *(ends[need] for need in needs)]) < event.start:
                    return True
            free = event.end
    return False


def test_a_rank_that_waits_on_purpose_can_be_best_and_is_found():
    costs = Costs([5, 1, 2], [2, 9, 1])
    timelines = list(played(all_orders((0, 1, 2), 2, split=False), costs))
    busy = [t.makespan for t in timelines if not waits_on_purpose(t)]
    found = best_schedule(Problem((0, 1, 2), 2, costs))
    assert (found.makespan, min(busy)) == (31, 33)
    assert waits_on_purpose(simulate(found.schedule, costs))


def test_what_has_arrived_is_alike_and_what_is_on_its_way_is_not():
    early, late, on_its_way = (
        Moment(time, ((), (arrival,)), (time, time), None)
        for time, arrival in [(5.0, 2.0), (9.0, 9.0), (9.0, 10.0)]
    )
    assert what_matters(early) == what_matters(late) != what_matters(on_its_way)


def test_where_a_rank_may_hold_nothing_there_is_no_schedule():
    assert best_schedule(Problem((0, 1), 2, WHOLE, room=(1, 0))) is None


def test_links_that_messages_occupy_are_rejected_as_the_search_has_none():
    with pytest.raises(ValueError, match="leave occupancy out"):
        Problem((0, 1), 2, Costs(1, 2, occupancy=1))


def test_a_search_that_gives_up_claims_no_proof_and_says_what_is_impossible():
    found = best_schedule(PUZZLES[11].problem, most_moments=100)
    assert not found.proven
    assert found.bound == 1040 < found.makespan


@pytest.mark.parametrize("number", [n for n, puzzle in PUZZLES.items() if puzzle.bound is None])
def test_what_a_puzzle_says_is_best_is_what_the_search_proves(number):
    puzzle = PUZZLES[number]
    found = best_schedule(puzzle.problem)
    assert found.proven
    timeline = simulate(found.schedule, puzzle.costs)
    assert fits(timeline, puzzle.room, puzzle.until_weight)
    if puzzle.measure == "makespan":
        assert found.makespan == puzzle.best <= puzzle.target
    else:  # nothing is less than no idle time, and it can be reached
        schedule = zb_v(2, 4) if len(puzzle.rank_of_stage) == 4 else zb_h2(2, 4)
        reached = simulate(schedule, puzzle.costs)
        assert puzzle.measured(reached) == puzzle.best == puzzle.target == 0
        assert fits(reached, puzzle.room, puzzle.until_weight)


def test_the_best_that_is_known_of_the_open_puzzle_is_there_and_the_bound_is_the_searchs():
    puzzle = PUZZLES[11]
    known = read_csv(NOTEBOOKS / "solutions" / "12_two_nodes.csv")
    timeline = simulate(known, puzzle.costs)
    assert timeline.makespan == puzzle.best < puzzle.target
    assert fits(timeline, puzzle.room, puzzle.until_weight)
    assert bound_of(puzzle.problem, first_moment(puzzle.problem)) == puzzle.bound
