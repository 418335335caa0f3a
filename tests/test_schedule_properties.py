"""The validator accepts exactly what can be played to its end, on schedules nobody thought of.

Legal schedules of every kind are spoilt at random: actions swapped, dropped, repeated, moved to
another rank. The verdict is compared with a player that works by itself, round by round, and with
the simulator's.
"""

import itertools
import os
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.simulator import Costs, simulate
from pipeline.schedule import Action, Schedule, ScheduleError
from pipeline.schedules import SCHEDULES, build_schedule, pipedream, pipedream_round_robin
from pipeline.schedules.legal import check_legal
from pipeline.schedules.text_form import from_csv, to_csv

FEW = settings(max_examples=400, deadline=None, derandomize=True)
# `make soak` tries 10,000.
MANY = settings(FEW, max_examples=int(os.environ.get("FUZZ_INPUTS", "1500")))


def legal_schedules():
    """Small ones of every generator."""
    schedules = [pipedream(2, 6, microbatches_per_update=3), pipedream_round_robin((1, 2), 5)]
    schedules += [pipedream_round_robin((2, 1), 4), pipedream_round_robin((2, 3), 6)]
    for name in SCHEDULES:
        for num_ranks, num_microbatches in [(1, 2), (2, 2), (2, 4), (3, 3), (3, 6)]:
            if name != "dualpipe-v" or num_microbatches >= 2 * num_ranks:
                schedules.append(build_schedule(name, num_ranks, num_microbatches))
    return schedules


LEGAL = legal_schedules()


def swap(draw, orders):
    """Two actions of one rank trade places; more often close ones, which may stay legal."""
    order = draw(st.sampled_from(orders))
    i = draw(st.integers(0, len(order) - 1))
    j = draw(st.one_of(st.just((i + 1) % len(order)), st.integers(0, len(order) - 1)))
    order[i], order[j] = order[j], order[i]


def drop(draw, orders):
    order = draw(st.sampled_from(orders))
    del order[draw(st.integers(0, len(order) - 1))]


def repeat(draw, orders):
    order = draw(st.sampled_from(orders))
    action = draw(st.sampled_from(order))
    order.insert(draw(st.integers(0, len(order))), action)


def move(draw, orders):
    """An action goes to any place of any rank."""
    order = draw(st.sampled_from(orders))
    action = order.pop(draw(st.integers(0, len(order) - 1)))
    there = draw(st.sampled_from(orders))
    there.insert(draw(st.integers(0, len(there))), action)


def split(draw, orders):
    """A full backward becomes two parts, of which the second may go anywhere behind."""
    order = draw(st.sampled_from(orders))
    full = [step for step, action in enumerate(order) if action.kind == "B"]
    if full:
        step = draw(st.sampled_from(full))
        backward = order[step]
        order[step] = backward._replace(kind="I")
        order.insert(draw(st.integers(step, len(order))), backward._replace(kind="W"))


@st.composite
def spoilt_schedules(draw, faults):
    schedule = draw(st.sampled_from(LEGAL))
    orders = [list(order) for order in schedule.orders]
    for fault in draw(st.lists(st.sampled_from(faults), min_size=0, max_size=3)):
        if all(orders):
            fault(draw, orders)
    return Schedule("spoilt", tuple(map(tuple, orders)))


def can_be_played(schedule):
    """Whether the schedule does the whole of a training run and comes to its end: worked out alone.

    What the training is, is taken from the actions that are there, and every rule is asked anew in
    every round, so this shares nothing with the code it judges.
    """
    cells = [(rank, *action) for rank, order in enumerate(schedule.orders) for action in order]
    if len({cell[1:] for cell in cells}) < len(cells) or not all(schedule.orders):
        return False
    num_stages = 1 + max(stage for _, stage, _, _ in cells)
    num_microbatches = 1 + max(k for _, _, _, k in cells)
    rank_of = {}
    for rank, stage, _, k in cells:
        if rank_of.setdefault((stage, k), rank) != rank:
            return False
    taken = {cell[1:] for cell in cells}
    replicas = {}
    for stage in range(num_stages):
        ranks = [rank_of.get((stage, k)) for k in range(num_microbatches)]
        replicas[stage] = len(set(ranks))
        updates = [k for k in range(num_microbatches) if (stage, "U", k) in taken]
        if replicas[stage] > 1:
            in_turn = all(rank == ranks[k % replicas[stage]] for k, rank in enumerate(ranks))
            whole = range(num_microbatches // replicas[stage] * replicas[stage])
            if not in_turn or updates != list(whole):
                return False
        for k in range(num_microbatches):
            kinds = "".join(kind for kind in "FBIW" if (stage, kind, k) in taken)
            if kinds not in ("FB", "FIW"):
                return False
    done, left = set(), [list(order) for order in schedule.orders]

    def has_gradient(stage, k):
        return stage == num_stages or (stage, "B", k) in done or (stage, "I", k) in done

    def can_start(stage, kind, k):
        if kind == "F":
            return stage == 0 or (stage - 1, "F", k) in done
        if kind in "BI":
            return (stage, "F", k) in done and has_gradient(stage + 1, k)
        if kind == "W":
            return (stage, "I", k) in done
        first = k // replicas[stage] * replicas[stage]
        group = range(first, first + replicas[stage])
        own = (stage, "B", k) in done or (stage, "W", k) in done
        return own and all(has_gradient(stage, other) for other in group)

    moved = True
    while moved:
        moved = False
        for order in left:
            if order and can_start(*order[0]):
                done.add(tuple(order.pop(0)))
                moved = True
    return not any(left)


def verdict(judge, schedule):
    try:
        judge(schedule)
    except ScheduleError as error:
        return str(error)
    return None


def every_order(*actions_of_each_rank):
    """Every schedule in which the ranks take these actions, in whatever order."""
    each = [itertools.permutations(from_csv(row).orders[0]) for row in actions_of_each_rank]
    return [Schedule("custom", orders) for orders in itertools.product(*each)]


@pytest.mark.parametrize(
    "actions, num_playable",
    [
        (["0F0,0F1,0B0,0B1", "1F0,1F1,1B0,1B1"], 26),
        (["0F0,0I0,0W0", "1F0,1I0,1W0"], 1),
        (["0F0,0B0,2F0,2B0", "1F0,1B0"], 1),
        (["0F0,1F0,0F1,1F1,0B0,1B0,1B1,0B1"], 70),
    ],
)
def test_of_all_orders_exactly_those_that_can_be_played_are_valid(actions, num_playable):
    schedules = every_order(*actions)
    playable = [schedule for schedule in schedules if can_be_played(schedule)]
    assert [one for one in schedules if verdict(check_legal, one) is None] == playable
    assert len(playable) == num_playable


@MANY
@given(spoilt_schedules([swap, drop, repeat, move, split]))
def test_the_validator_accepts_exactly_what_can_be_played_to_its_end(schedule):
    sentence = verdict(check_legal, schedule)
    assert (sentence is None) == can_be_played(schedule), f"{sentence}\n{to_csv(schedule)}"


@pytest.mark.further
@MANY
@given(spoilt_schedules([swap, split]))
def test_of_reordered_schedules_the_simulator_plays_exactly_the_valid_ones(schedule):
    # The simulator only knows what an action needs; that an update follows the weights' part of
    # its own backward, which no other rank waits for, is the validator's alone.
    sentence = verdict(lambda schedule: simulate(schedule, Costs()), schedule)
    valid = verdict(check_legal, schedule) is None
    if not any(action.kind == "U" for order in schedule.orders for action in order):
        assert (sentence is None) == valid, f"{sentence}\n{to_csv(schedule)}"
    assert not valid or sentence is None


@FEW
@given(spoilt_schedules([swap, drop, repeat, move, split]))
def test_a_refusal_names_a_rank_or_a_stage_and_what_is_wrong(schedule):
    sentence = verdict(check_legal, schedule)
    if sentence is not None:
        assert re.search(r"\b(rank|stage) \d+\b", sentence), sentence
        assert "\n" not in sentence


@FEW
@given(spoilt_schedules([swap, drop, repeat, move, split]))
def test_whatever_its_faults_a_schedule_comes_back_from_its_text(schedule):
    if all(schedule.orders):
        assert from_csv(to_csv(schedule), "spoilt") == schedule


@FEW
@given(spoilt_schedules([drop, repeat, move]))
def test_the_simulator_ends_with_a_timeline_or_a_sentence(schedule):
    if all(schedule.orders):
        sentence = verdict(lambda schedule: simulate(schedule, Costs()), schedule)
        assert sentence is None or sentence.startswith(("deadlock: rank", "rank"))


@pytest.mark.parametrize("schedule", LEGAL, ids=lambda s: f"{s.name} {s.num_ranks}")
def test_the_player_of_this_file_plays_every_schedule_and_none_without_an_action(schedule):
    assert can_be_played(schedule)
    for rank, order in enumerate(schedule.orders):
        for step, action in enumerate(order):
            if action.kind == "U" and schedule.name == "pipedream":
                continue  # one update less is another training run
            shorter = list(schedule.orders)
            shorter[rank] = order[:step] + order[step + 1 :]
            assert not can_be_played(Schedule("shorter", tuple(shorter))), action


def test_the_player_of_this_file_knows_an_action_by_its_parts():
    assert can_be_played(Schedule("one", ((Action(0, "F", 0), Action(0, "B", 0)),)))
    assert not can_be_played(Schedule("one", ((Action(0, "B", 0), Action(0, "F", 0)),)))
