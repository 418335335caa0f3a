"""The simulator against the formulas of the papers.

p ranks, m micro-batches, f, b and c: the costs of a forward, of a full backward and of a transfer.
The costs are sums of powers of two, so that every time is exact and nothing is rounded.
"""

from dataclasses import replace

import pytest

from lab.simulator import Costs, simulate
from pipeline.schedule import ScheduleError, message_of
from pipeline.schedules import (
    SCHEDULES,
    build_schedule,
    gpipe,
    naive,
    one_f_one_b,
    pipedream,
    pipedream_round_robin,
)
from pipeline.schedules.text_form import from_csv

RANKS = range(1, 9)
MICROBATCHES = range(1, 17)
COSTS = [
    Costs(forward=1, backward=2, transfer=0),
    Costs(forward=1, backward=1, transfer=0.5),
    Costs(forward=3, backward=5, transfer=0.25),
    Costs(forward=0.5, backward=2, transfer=4),
    Costs(forward=4, backward=1, transfer=1),
]
WITHOUT_TRANSFER = [
    Costs(forward=1, backward=2),
    Costs(forward=3, backward=5),
    Costs(forward=4, backward=1),
]
EVERY_SIZE = [(p, m) for p in RANKS for m in MICROBATCHES]


# Golden values: 4 ranks, 8 micro-batches, F = 1, B = 2


def test_gpipe_of_4_ranks_and_8_microbatches_takes_33_and_every_rank_is_idle_for_9():
    timeline = simulate(gpipe(4, 8), Costs(forward=1, backward=2))
    assert timeline.makespan == 33
    assert timeline.idle_per_rank == [9, 9, 9, 9]
    assert timeline.bubble_over_total == pytest.approx(0.2727, abs=0.00005)
    assert timeline.bubble_over_ideal == 0.375
    assert timeline.peak_held_per_rank == [8, 8, 8, 8]
    assert timeline.span_per_rank == [33, 30, 27, 24]


def test_naive_of_4_ranks_and_8_microbatches_takes_96_and_every_rank_is_idle_for_72():
    timeline = simulate(naive(4, 8), Costs(forward=1, backward=2))
    assert timeline.makespan == 96
    assert timeline.idle_per_rank == [72, 72, 72, 72]
    assert timeline.bubble_over_total == 0.75
    assert timeline.bubble_over_ideal == 3
    assert timeline.peak_held_per_rank == [1, 1, 1, 1]


def test_gpipe_of_2_ranks_and_2_microbatches_event_by_event():
    timeline = simulate(gpipe(2, 2), Costs(forward=1, backward=2, transfer=0.5))
    times = {str(event.action): (event.start, event.end) for event in timeline.events}
    assert times == {
        "0F0": (0, 1),
        "0F1": (1, 2),
        "1F0": (1.5, 2.5),
        "1F1": (2.5, 3.5),
        "1B0": (3.5, 5.5),
        "1B1": (5.5, 7.5),
        "0B0": (6, 8),
        "0B1": (8, 10),
    }


# GPipe


@pytest.mark.parametrize("costs", COSTS, ids=str)
def test_gpipe_makespan_is_m_plus_p_minus_1_passages_and_2_times_p_minus_1_transfers(costs):
    for p, m in EVERY_SIZE:
        passage = costs.forward + costs.backward
        expected = (m + p - 1) * passage + 2 * (p - 1) * costs.transfer
        assert simulate(gpipe(p, m), costs).makespan == expected, (p, m)


@pytest.mark.parametrize("costs", COSTS, ids=str)
def test_gpipe_leaves_every_rank_idle_for_p_minus_1_passages_megatron_section_2_2_1(costs):
    for p, m in EVERY_SIZE:
        idle = (p - 1) * (costs.forward + costs.backward + 2 * costs.transfer)
        assert simulate(gpipe(p, m), costs).idle_per_rank == [idle] * p, (p, m)


@pytest.mark.parametrize("costs", WITHOUT_TRANSFER, ids=str)
def test_gpipe_bubble_is_p_minus_1_over_m_plus_p_minus_1_gpipe_section_2_3(costs):
    for p, m in EVERY_SIZE:
        timeline = simulate(gpipe(p, m), costs)
        assert timeline.bubble_over_total == pytest.approx((p - 1) / (m + p - 1), abs=1e-15)
        assert timeline.idle_fraction == pytest.approx((p - 1) / (m + p - 1), abs=1e-15)


@pytest.mark.parametrize("costs", WITHOUT_TRANSFER, ids=str)
def test_gpipe_bubble_over_ideal_is_p_minus_1_over_m_megatron_section_2_2_1(costs):
    for p, m in EVERY_SIZE:
        timeline = simulate(gpipe(p, m), costs)
        assert timeline.bubble_over_ideal == pytest.approx((p - 1) / m, abs=1e-14)


@pytest.mark.parametrize("costs", COSTS, ids=str)
def test_gpipe_holds_all_m_microbatches_on_every_rank_whatever_things_cost(costs):
    for p, m in EVERY_SIZE:
        timeline = simulate(gpipe(p, m), costs)
        assert timeline.peak_held_per_rank == [m] * p
        assert timeline.peak_held_until_weight_per_rank == [m] * p


def test_with_one_microbatch_gpipe_is_idle_as_long_as_naive():
    for p in RANKS:
        gpiped, passed = simulate(gpipe(p, 1), Costs()), simulate(naive(p, 1), Costs())
        assert gpiped.events == passed.events
        assert gpiped.bubble_over_total == pytest.approx((p - 1) / p)


def test_gpipe_bubble_is_below_a_fifth_from_4_microbatches_a_rank_on_gpipe_section_2_3():
    # The paper calls it negligible when M >= 4K; (K - 1)/(5K - 1) is the largest it is there.
    for p in RANKS:
        bubbles = [
            simulate(gpipe(p, m), Costs()).bubble_over_total for m in range(4 * p, 4 * p + 9)
        ]
        assert max(bubbles) == bubbles[0] == pytest.approx((p - 1) / (5 * p - 1))
        assert bubbles[0] < 0.2


# Naive


@pytest.mark.parametrize("costs", WITHOUT_TRANSFER, ids=str)
def test_naive_is_idle_for_p_minus_1_over_p_for_every_number_of_microbatches(costs):
    for p, m in EVERY_SIZE:
        timeline = simulate(naive(p, m), costs)
        assert timeline.bubble_over_total == pytest.approx((p - 1) / p, abs=1e-15)
        assert timeline.bubble_over_ideal == pytest.approx(p - 1, abs=1e-14)


@pytest.mark.parametrize("costs", COSTS, ids=str)
def test_naive_makespan_is_m_times_all_stages_and_all_transfers(costs):
    for p, m in EVERY_SIZE:
        one_passage = p * (costs.forward + costs.backward) + 2 * (p - 1) * costs.transfer
        timeline = simulate(naive(p, m), costs)
        assert timeline.makespan == m * one_passage
        assert timeline.peak_held_per_rank == [1] * p


def test_naive_never_has_two_ranks_at_work():
    for p, m in EVERY_SIZE:
        events = sorted(simulate(naive(p, m), COSTS[2]).events, key=lambda event: event.start)
        assert all(after.start >= before.end for before, after in zip(events, events[1:]))


# Stages that do not cost the same

UNEVEN = [
    Costs(forward=[1, 1, 2, 1], backward=[2, 2, 4, 2], transfer=0),
    Costs(forward=[1, 4, 2, 1], backward=[2, 8, 4, 2], transfer=0.5),
    Costs(forward=[5, 1, 1, 1], backward=[1, 1, 1, 9], transfer=0.25),  # slowest: 0 and 3
    Costs(forward=[0.5, 2], backward=[4, 1], transfer=2),
    Costs(forward=[1, 2, 3, 4, 5, 6, 7, 8], backward=[8, 7, 6, 5, 4, 3, 2, 1], transfer=1),
]


@pytest.mark.parametrize("costs", UNEVEN, ids=str)
def test_gpipe_takes_one_passage_and_m_minus_1_paces_of_the_slowest_stages(costs):
    """Derived: a line of stations that handles equal pieces in one order ends piece k at the last
    station k - 1 paces of its slowest station after the first. GPipe is two such lines, forwards
    then backwards, and the last rank goes from one to the other without waiting.
    """
    p = len(costs.forward)
    for m in MICROBATCHES:
        first = sum(costs.forward) + sum(costs.backward) + 2 * (p - 1) * costs.transfer
        further = (m - 1) * (max(costs.forward) + max(costs.backward))
        assert simulate(gpipe(p, m), costs).makespan == first + further


def test_one_stage_of_twice_the_cost_makes_4_ranks_and_8_microbatches_take_57_instead_of_33():
    # 15 for the first micro-batch to pass forward and back, then 7 paces of 6 of the slow stage.
    even = simulate(gpipe(4, 8), Costs(forward=1, backward=2))
    uneven = simulate(gpipe(4, 8), Costs(forward=[1, 1, 2, 1], backward=[2, 2, 4, 2]))
    assert (even.makespan, uneven.makespan) == (33, 57)
    assert uneven.busy_per_rank == [24, 24, 48, 24]
    assert uneven.ideal == 48


@pytest.mark.parametrize("costs", UNEVEN, ids=str)
def test_naive_adds_up_uneven_stages_and_no_stage_sets_the_pace(costs):
    p = len(costs.forward)
    for m in MICROBATCHES:
        passage = sum(costs.forward) + sum(costs.backward) + 2 * (p - 1) * costs.transfer
        assert simulate(naive(p, m), costs).makespan == m * passage


# The rules of play


@pytest.mark.parametrize("make", [naive, gpipe])
@pytest.mark.parametrize("costs", COSTS + UNEVEN[1:3], ids=str)
def test_an_action_starts_at_the_first_moment_at_which_it_can(make, costs):
    schedule = make(4, 6)
    events = {message_of(event.action): event for event in simulate(schedule, costs).events}
    assert len(events) == sum(map(len, schedule.orders))
    for rank, order in enumerate(schedule.orders):
        free = 0
        for action in order:
            event = events[message_of(action)]
            arrivals = [
                needed.end + (costs.transfer if needed.rank != rank else 0)
                for needed in (events[need] for need in schedule.needs_of(action))
            ]
            assert event.rank == rank
            assert event.start == max([free, *arrivals])
            assert event.end == event.start + costs.of(action)
            free = event.end


def test_a_split_backward_costs_in_two_parts_what_the_full_one_costs():
    full = simulate(from_csv("0F0,0B0"), Costs(1, 3))
    halves = simulate(from_csv("0F0,0I0,0W0"), Costs(1, 3))
    assert [event.end for event in full.events] == [1, 4]
    assert [event.end for event in halves.events] == [1, 2.5, 4]
    given = simulate(from_csv("0F0,0I0,0W0"), Costs(1, 3, backward_weight=1))
    assert [event.end for event in given.events] == [1, 3, 4]


def test_the_weights_part_delays_only_its_own_rank():
    # Rank 0 can go on when the gradient for the input is there: after 1I0, not after 1W0.
    timeline = simulate(from_csv("0F0,0B0\n1F0,1I0,1W0"), Costs(1, 2, backward_weight=0.5))
    times = {str(event.action): (event.start, event.end) for event in timeline.events}
    assert times["1I0"] == (2, 3.5)
    assert times["1W0"] == (3.5, 4)
    assert times["0B0"] == (3.5, 5.5)


def test_a_transfer_is_paid_between_ranks_and_never_within_one():
    costs = Costs(1, 2, transfer=10)
    assert simulate(from_csv("0F0,1F0,1B0,0B0"), costs).makespan == 6
    assert simulate(from_csv("0F0,0B0\n1F0,1B0"), costs).makespan == 26


def test_a_sender_is_not_held_up_by_its_message():
    timeline = simulate(gpipe(2, 3), Costs(1, 2, transfer=100))
    assert [event.start for event in timeline.by_rank[0][:3]] == [0, 1, 2]


def test_a_deadlock_cannot_be_simulated():
    with pytest.raises(ScheduleError, match="^deadlock: rank 0 .*; rank 1 "):
        simulate(from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1"), Costs())


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("forward, backward", [(1.0, 2.0), (10.0, 10.0), (3.0, 1.0)])
def test_1f1b_has_gpipes_bubble_p_minus_1_over_m_megatron_section_2_2_1(
    num_ranks, num_microbatches, forward, backward
):
    costs = Costs(forward, backward)
    timeline = simulate(one_f_one_b(num_ranks, num_microbatches), costs)
    as_long_as = simulate(gpipe(num_ranks, num_microbatches), costs)
    assert timeline.makespan == pytest.approx(as_long_as.makespan, abs=1e-9)
    wanted = (num_ranks - 1) / num_microbatches
    assert timeline.bubble_over_ideal == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 8, 16])
def test_1f1b_rank_r_holds_min_m_p_minus_r_microbatches(num_ranks, num_microbatches):
    timeline = simulate(one_f_one_b(num_ranks, num_microbatches), Costs(1, 2))
    wanted = [min(num_microbatches, num_ranks - rank) for rank in range(num_ranks)]
    assert timeline.peak_held_per_rank == wanted


# Stages on several ranks: PipeDream's 1F1B-RR


def pace_of_round_robin(replicas):
    """Time from one mini-batch to the next where a stage costs as much as it has replicas."""
    costs = Costs(forward=list(replicas), backward=[2 * count for count in replicas])
    timeline = simulate(pipedream_round_robin(replicas, 120), costs)
    ends = sorted(event.end for event in timeline.events if event.action[:2] == (0, "B"))
    return (ends[95] - ends[35]) / 60


@pytest.mark.parametrize("replicas", [(2, 1), (3, 1), (3, 3), (4, 4, 4)])
def test_replicas_of_a_slow_stage_make_it_as_fast_as_the_others_pipedream_section_3_2(replicas):
    assert pace_of_round_robin(replicas) == 3  # a forward of 1 and a backward of 2


def test_replicas_that_wait_for_each_others_gradients_may_lose_half_a_pace():
    # The other gradient comes half a round later, and meanwhile the next forward is not taken.
    assert pace_of_round_robin((2, 1, 1)) == 4.5


def test_the_update_of_a_replica_waits_for_the_gradient_of_the_other_and_its_way():
    timeline = simulate(from_csv("0F0,0B0,0U0\n0F1,0B1,0U1"), Costs(1, 2, transfer=0.5))
    times = {str(event.action): event.start for event in timeline.events}
    assert (times["0U0"], times["0U1"]) == (3.5, 3.5)


def test_the_updates_of_pipedream_cost_nothing_and_delay_nothing():
    with_updates = simulate(pipedream(4, 8), Costs(1, 2)).events
    without = simulate(one_f_one_b(4, 8), Costs(1, 2)).events
    assert [event for event in with_updates if event.action.kind != "U"] == list(without)


# Links that serve one message at a time

FAR = {"transfer": {(1, 2): 30, (2, 1): 30}}
NARROW = {"occupancy": {(1, 2): 30, (2, 1): 30}}


@pytest.mark.parametrize(
    ("make", "m", "far", "narrow"),
    [
        (gpipe, 8, 390, 600),
        (gpipe, 16, 630, 1080),
        (gpipe, 32, 1110, 2040),
        (one_f_one_b, 8, 570, 570),
        (one_f_one_b, 16, 1050, 1050),
        (one_f_one_b, 32, 2010, 2010),
    ],
)
def test_over_a_far_hop_of_30_gpipe_takes_390_and_1f1b_570_over_a_narrow_one_600_and_570(
    make, m, far, narrow
):
    assert simulate(make(4, m), Costs(10, 20, **FAR)).makespan == far
    assert simulate(make(4, m), Costs(10, 20, **NARROW)).makespan == narrow


@pytest.mark.parametrize("m", [8, 16, 32])
@pytest.mark.parametrize("kind", ["transfer", "occupancy"])
def test_1f1b_pays_for_a_hop_in_the_middle_of_4_ranks_m_times_and_gpipe_twice_if_it_is_far(kind, m):
    for time in (1, 5, 10, 20, 30):
        costs = Costs(10, 20, **{kind: {(1, 2): time, (2, 1): time}})
        assert simulate(one_f_one_b(4, m), costs).makespan == (m + 3) * 30 + m * time
        if kind == "transfer" or time <= 10:  # a link that is as fast as a forward holds nothing up
            assert simulate(gpipe(4, m), costs).makespan == (m + 3) * 30 + 2 * time


def test_1f1b_is_the_shorter_one_over_a_narrow_hop_of_nearly_a_forward_and_a_backward():
    for m, time in ((8, 27), (16, 29), (32, 30)):
        for longer in (time - 1, time):
            costs = Costs(10, 20, occupancy={(1, 2): longer, (2, 1): longer})
            shorter = (
                simulate(one_f_one_b(4, m), costs).makespan < simulate(gpipe(4, m), costs).makespan
            )
            assert shorter == (longer == time)


@pytest.mark.parametrize("costs", COSTS, ids=str)
@pytest.mark.parametrize("occupancy", [0.25, 2, 8])
def test_a_narrow_link_is_one_more_station_in_gpipes_line(costs, occupancy):
    """Derived: the first micro-batch passes every stage and link, and the others follow it at the
    pace of the slowest of them. The links back start when the last forward has long arrived.
    """
    costs = replace(costs, occupancy=occupancy)
    for p, m in EVERY_SIZE:
        passage, message = costs.forward + costs.backward, costs.transfer + occupancy
        slowest = max(costs.forward, occupancy) + max(costs.backward, occupancy)
        further = (m - 1) * (slowest if p > 1 else passage)
        expected = p * passage + 2 * (p - 1) * message + further
        assert simulate(gpipe(p, m), costs).makespan == expected, (p, m)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("transfer", [0, 4])
def test_a_link_serves_messages_in_turn_and_every_ordered_pair_of_ranks_has_its_own(name, transfer):
    schedule = build_schedule(name, 4, 8)
    timeline = simulate(schedule, Costs(1, 2, transfer=transfer, occupancy=5))
    end_of = {message_of(event.action): event.end for event in timeline.events}
    start_of = {(event.rank, event.action): event.start for event in timeline.events}
    served = {}  # (source, destination) -> until when
    for route in schedule.messages:  # in the order in which each sender sends
        link = route.source, route.destination
        served[link] = max(end_of[route.message], served.get(link, 0)) + 5
        arrival = timeline.arrivals[route.destination, route.message]
        assert arrival == served[link] + transfer
        assert all(
            start >= arrival
            for (rank, action), start in start_of.items()
            if rank == route.destination and route.message in schedule.needs_of(action)
        )
    assert len(timeline.arrivals) == len(schedule.messages)


def test_the_two_directions_of_a_hop_do_not_disturb_each_other():
    # Micro-batch 0 goes from rank 0 to rank 1 and back, and micro-batch 1 the other way round.
    schedule = from_csv("0F0,1F1,1B1,0B0\n0F1,1F0,1B0,0B1")
    assert simulate(schedule, Costs(1, 2, occupancy=10)).makespan == 1 + 10 + 1 + 2 + 10 + 2


def test_pairs_that_are_not_in_the_dictionary_occupy_nothing_and_may_be_far_nevertheless():
    costs = Costs(1, 2, transfer=3, occupancy={(0, 1): 5})
    timeline = simulate(from_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1"), costs)
    assert timeline.arrivals == {
        (1, ("activation", 0, 0)): 1 + 5 + 3,
        (1, ("activation", 0, 1)): 6 + 5 + 3,  # the link is busy until 6
    }
    starts = {str(event.action): event.start for event in timeline.events}
    assert (starts["1F0"], starts["1F1"], starts["0B0"]) == (9, 14, 17 + 3)
