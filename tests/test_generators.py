"""The generators against the tables and formulas of the papers, and against torch's orders.

p ranks, m micro-batches, v chunks; F, I and W: the costs of a forward, of a backward for the input
and of one for the weights, of one action on one stage.
"""

import json
import sys
from unittest import mock

import predict
import pytest
from further import first_of
from torch_orders import torch_order

from lab.simulator import Costs, simulate
from pipeline.schedule import ScheduleError
from pipeline.schedules import (
    SCHEDULES,
    build_schedule,
    chunked_schedules,
    dualpipe_v,
    gpipe,
    interleaved_1f1b,
    looped_bfs,
    one_f_one_b,
    synchronous_schedules,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zb_v,
)
from pipeline.schedules.legal import check_legal
from pipeline.schedules.text_form import from_csv, to_csv

RANKS = range(1, 9)
MICROBATCHES = range(1, 21)
EVERY_SIZE = [(p, m) for p in RANKS for m in MICROBATCHES]
# Sums of powers of two, so that every time is exact.
UNEQUAL_COSTS = [Costs(3, 5, 1), Costs(2, 5.5, 1.5), Costs(0.5, 2, 0.5)]
EQUAL_COSTS = Costs(forward=1, backward=2, backward_weight=1)


def rows(schedule):
    return to_csv(schedule).splitlines()


def sizes_of(name):
    """Every (ranks, micro-batches, chunks) up to 6, 14 and 4 that the schedule allows."""
    row = SCHEDULES[name]
    chunks = [row.chunks] if row.fixed_chunks or not row.chunks else [2, 3, 4]
    for p in range(1, 7):
        for m in range(1, 15):
            allowed = {
                "dualpipe-v": m >= 2 * p,
                "interleaved-1f1b": m % max(1, m // p) == 0,
            }.get(name, True)
            if allowed:
                yield from ((p, m, v) for v in chunks)


# Every generator


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_allowed_size_gives_a_valid_schedule_of_that_size(name):
    for p, m, v in sizes_of(name):
        schedule = build_schedule(name, p, m, v)
        assert check_legal(schedule) is schedule
        assert schedule.name == name
        assert (schedule.num_ranks, schedule.num_microbatches) == (p, m)
        assert schedule.num_stages == p * (v or 1)


@pytest.mark.parametrize("name", [name for name, row in SCHEDULES.items() if row.options])
def test_every_value_of_an_option_gives_a_legal_schedule_or_a_sentence(name):
    for option in SCHEDULES[name].options:
        with pytest.raises(ScheduleError, match=rf"^{name} .* not -1$"):
            build_schedule(name, 4, 8, **{option: -1})
        for p, m, v in sizes_of(name):
            for value in range(1, p + 2):
                try:
                    schedule = build_schedule(name, p, m, v, **{option: value})
                except ScheduleError as error:
                    assert value > 1 and str(error).startswith(name)
                    assert str(error).endswith(f"not {value}")
                    continue
                assert check_legal(schedule) is schedule
                assert (schedule.num_ranks, schedule.num_microbatches) == (p, m)


def test_an_option_that_a_schedule_has_not_is_refused_with_those_it_has():
    with pytest.raises(ScheduleError) as refused:
        build_schedule("1f1b", 4, 8, width=2)
    assert str(refused.value) == "1f1b has no option 'width'; it has depth"
    with pytest.raises(ScheduleError) as refused:
        build_schedule("gpipe", 4, 8, depth=2)
    assert str(refused.value) == "gpipe has no option 'depth'; it has none"
    for size in ("name", "num_ranks", "num_microbatches", "chunks"):  # sizes, not options
        with pytest.raises(ScheduleError, match=f"1f1b has no option '{size}'; it has depth"):
            build_schedule("1f1b", 4, 8, **{size: 2})


def test_the_row_says_which_schedules_are_synchronous_those_without_updates():
    for name in SCHEDULES:
        kinds = {action.kind for order in build_schedule(name, 3, 6).orders for action in order}
        assert (name in synchronous_schedules()) == ("U" not in kinds)


def test_1f1b_with_a_depth_holds_one_microbatch_more_than_its_warm_up():
    for p, m in EVERY_SIZE:
        assert one_f_one_b(p, m, depth=p - 1) == one_f_one_b(p, m)
        for depth in range(p):
            held = simulate(one_f_one_b(p, m, depth), Costs()).peak_held_per_rank
            assert held == [min(m, min(p - 1 - rank, depth) + 1) for rank in range(p)]


@pytest.mark.further
@pytest.mark.parametrize("costs", [Costs(1, 2), Costs(1, 1), Costs(3, 1)], ids=str)
def test_while_messages_are_free_a_single_warm_up_interleaves_in_the_same_time_and_holds_less(
    costs,
):
    for p, m, v in sizes_of("interleaved-1f1b"):
        single, double = interleaved_1f1b(p, m, v, ahead=1), interleaved_1f1b(p, m, v)
        assert check_legal(single) and double == interleaved_1f1b(p, m, v, ahead=2)
        times = [simulate(schedule, costs) for schedule in (single, double)]
        assert times[0].makespan == times[1].makespan, (p, m, v)
        for rank, (less, more) in enumerate(zip(*(t.peak_held_per_rank for t in times))):
            group = m // max(1, m // p)
            assert less == min(v * m, (v - 1) * group + (p - 1 - rank) + 1)
            assert more == min(v * m, (v - 1) * group + 2 * (p - 1 - rank) + 1)


def test_the_double_warm_up_of_interleaved_1f1b_buys_696_ms_for_840_when_a_message_takes_9():
    """4 ranks, 8 micro-batches, 2 chunks, shares of 20 and 40 ms: 11 chunks held instead of 8."""
    single, double = interleaved_1f1b(4, 8, 2, ahead=1), interleaved_1f1b(4, 8, 2)
    assert [simulate(s, Costs(10, 20)).makespan for s in (single, double)] == [570, 570]
    assert simulate(single, Costs()).peak_held_per_rank == [8, 7, 6, 5]
    assert simulate(double, Costs()).peak_held_per_rank == [11, 9, 7, 5]
    for hop in ({"transfer": 9}, {"occupancy": 9}):
        assert simulate(single, Costs(10, 20, **hop)).makespan == 840
        assert simulate(double, Costs(10, 20, **hop)).makespan == 696
        # 1F1B stays behind with a single warm-up and comes close with a double one.
        assert simulate(one_f_one_b(4, 8), Costs(20, 40, **hop)).makespan == 804


def test_three_forwards_ahead_are_rejected_as_they_can_deadlock():
    with pytest.raises(ScheduleError, match="takes 0 to 2 forwards ahead, not 3"):
        build_schedule("interleaved-1f1b", 4, 8, ahead=3)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_stage_is_where_its_placement_puts_it(name):
    for p, m, v in sizes_of(name):
        ranks = build_schedule(name, p, m, v).ranks_of_stage
        in_loops = {stage: (stage % p,) for stage in range(p * (v or 1))}
        in_a_v = {stage: (min(stage, 2 * p - 1 - stage),) for stage in range(2 * p)}
        assert ranks == (in_a_v if SCHEDULES[name].fixed_chunks else in_loops)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("sizes", [(0, 8), (4, 0), (-1, 8), (4, -3)])
def test_less_than_one_rank_or_microbatch_is_refused(name, sizes):
    with pytest.raises(ScheduleError) as refused:
        build_schedule(name, *sizes)
    assert str(refused.value) == (
        f"a schedule needs at least one rank and one micro-batch, not {sizes[0]} and {sizes[1]}"
    )


@pytest.mark.parametrize("name", chunked_schedules())
def test_without_a_number_of_chunks_there_are_2(name):
    assert build_schedule(name, 2, 4) == build_schedule(name, 2, 4, 2)


REFUSED = {
    ("gpipe", 4, 8, 2): "gpipe has one stage per rank, not 2 chunks; use one of interleaved-1f1b, "
    "looped-bfs, zb-v, v-half, v-min, dualpipe-v for several",
    (
        "interleaved-1f1b",
        4,
        8,
        1,
    ): "interleaved-1f1b has at least 2 chunks per rank, not 1; with one it is 1f1b",
    (
        "looped-bfs",
        4,
        8,
        1,
    ): "looped-bfs has at least 2 chunks per rank, not 1; with one it is gpipe",
    ("zb-v", 4, 8, 3): "zb-v has 2 chunks per rank, one on each side of the V, not 3",
    ("v-half", 4, 8, 1): "v-half has 2 chunks per rank, one on each side of the V, not 1",
    ("v-min", 4, 8, 3): "v-min has 2 chunks per rank, one on each side of the V, not 3",
    ("dualpipe-v", 4, 8, 1): "dualpipe-v has 2 chunks per rank, one on each side of the V, not 1",
    ("dualpipe-v", 4, 7, 2): "dualpipe-v needs at least two micro-batches per rank, 8 for 4 ranks, "
    "not 7; use more micro-batches or fewer ranks",
    ("interleaved-1f1b", 4, 9, 2): "interleaved-1f1b takes micro-batches in groups of 4 or more, "
    "all equally large, and 9 do not divide into 2 groups; use 8 or 12",
}


@pytest.mark.parametrize("sizes", REFUSED, ids=str)
def test_sizes_that_a_schedule_does_not_allow_get_a_sentence(sizes):
    with pytest.raises(ScheduleError) as refused:
        build_schedule(*sizes)
    assert str(refused.value) == REFUSED[sizes]


def test_what_interleaved_1f1b_advises_is_allowed():
    for p in RANKS:
        for m in range(1, 40):
            if m % max(1, m // p):
                least = m // p * p
                assert least < m < least + p
                interleaved_1f1b(p, least)
                interleaved_1f1b(p, least + p)


# Orders written out


def test_interleaved_1f1b_of_2_ranks_4_microbatches_and_2_chunks_written_out():
    assert rows(interleaved_1f1b(2, 4, 2)) == [
        "0F0,0F1,2F0,2F1,0F2,2B0,0F3,2B1,2F2,0B0,2F3,0B1,2B2,2B3,0B2,0B3",
        "1F0,1F1,3F0,3B0,3F1,3B1,1F2,1B0,1F3,1B1,3F2,3B2,3F3,3B3,1B2,1B3",
    ]


def test_looped_bfs_of_2_ranks_and_2_microbatches_written_out():
    assert rows(looped_bfs(2, 2)) == [
        "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1",
        "1F0,1F1,3F0,3F1,3B0,3B1,1B0,1B1",
    ]


def test_zb_h1_of_3_ranks_and_4_microbatches_written_out():
    assert rows(zb_h1(3, 4)) == [
        "0F0,0F1,0F2,0I0,0W0,0F3,0I1,0W1,0I2,0W2,0I3,0W3",
        "1F0,1F1,1I0,1F2,1I1,1W0,1F3,1I2,1W1,1I3,1W2,1W3",
        "2F0,2I0,2F1,2I1,2F2,2I2,2W0,2F3,2I3,2W1,2W2,2W3",
    ]


def test_zb_h2_warms_up_twice_as_long_as_1f1b():
    for p, m in EVERY_SIZE:
        for rank, order in enumerate(zb_h2(p, m).orders):
            kinds = "".join(action.kind for action in order)
            assert kinds.index("I") == min(m, 2 * (p - 1 - rank) + 1)


def test_dualpipe_v_of_2_ranks_and_4_microbatches_written_out():
    assert rows(dualpipe_v(2, 4)) == [
        "0F0,0F1,0F2,3F0,3I0,3W0,3F1,0F3,3B1,3F2,0B0,3B2,3F3,0B1,3B3,0I2,0W2,0I3,0W3",
        "1F0,2F0,1F1,2F1,1F2,2B0,2F2,1B0,1F3,2B1,2F3,1B1,2B2,1B2,2I3,1I3,2W3,1W3",
    ]


# torch's orders: the same where the source is the same


@pytest.mark.parametrize(
    "name, theirs",
    first_of(
        [
            ("gpipe", "GPipe"),
            ("interleaved-1f1b", "Interleaved1F1B"),
            ("zb-v", "ZBVZeroBubble"),
            ("dualpipe-v", "DualPipeV"),
        ],
        2,
    ),
)
def test_the_order_is_that_of_torchs_class_for_every_size(name, theirs):
    for p, m, v in sizes_of(name):
        wanted = from_csv(torch_order(theirs, p, m, v or 1), name)
        assert build_schedule(name, p, m, v) == wanted, (p, m, v)


@pytest.mark.further
def test_torchs_looped_bfs_runs_each_chunks_backwards_in_reverse_and_takes_as_long():
    for p, m, v in sizes_of("looped-bfs"):
        theirs = check_legal(from_csv(torch_order("LoopedBFS", p, m, v)))
        ours = looped_bfs(p, m, v)
        for our_order, their_order in zip(ours.orders, theirs.orders):
            assert [a[:2] for a in our_order] == [a[:2] for a in their_order]
        assert simulate(theirs, Costs(1, 2)).makespan == simulate(ours, Costs(1, 2)).makespan


def test_torch_2_13s_own_1f1b_order_is_wrong_on_the_last_rank_and_refused():
    with pytest.raises(ScheduleError) as refused:
        check_legal(from_csv(torch_order("1F1B", 4, 8, 1)))
    assert str(refused.value) == (
        "rank 3 runs the backward of micro-batch 0 on stage 3 at step 1, but never the forward of "
        "micro-batch 0 on stage 3"
    )


# Golden values: p = 4, m = 8, F = I = W = 1, no transfer

GOLDEN = {
    # name, chunks: makespan, idle, bubble over total, by span, peak held, until W
    ("gpipe", None): (33, 9, 0.2727, 0.2727, [8, 8, 8, 8], [8, 8, 8, 8]),
    ("1f1b", None): (33, 9, 0.2727, 0.2727, [4, 3, 2, 1], [4, 3, 2, 1]),
    ("zb-h1", None): (27, 3, 0.1111, 0.1111, [4, 3, 2, 1], [4, 4, 4, 4]),
    ("zb-h2", None): (27, 3, 0.1111, 0, [7, 5, 3, 1], [7, 7, 7, 7]),
    ("interleaved-1f1b", 2): (57, 9, 0.1579, 0.1579, [11, 9, 7, 5], [11, 9, 7, 5]),
    ("interleaved-1f1b", 4): (105, 9, 0.0857, 0.0857, [19, 17, 15, 13], [19, 17, 15, 13]),
    ("looped-bfs", 2): (57, 9, 0.1579, 0.1579, [16, 16, 16, 16], [16, 16, 16, 16]),
    ("zb-v", 2): (51, 3, 0.0588, 0, [8, 8, 8, 8], [8, 8, 8, 8]),
    ("v-half", 2): (53, 5, 0.0943, 0.0943, [6, 6, 6, 6], [6, 6, 6, 6]),
    ("v-min", 2): (59, 11, 0.1864, 0.1864, [4, 4, 4, 4], [4, 4, 4, 4]),
    # As one block of 3 each, DeepSeek's overlapped pairs make it 54.
    ("dualpipe-v", 2): (51, 3, 0.0588, 0.0588, [9, 9, 9, 9], [9, 9, 9, 9]),
}


@pytest.mark.parametrize("name, chunks", GOLDEN)
def test_of_4_ranks_and_8_microbatches_every_figure_is_the_known_one(name, chunks):
    makespan, idle, bubble, by_span, held, until_weight = GOLDEN[name, chunks]
    timeline = simulate(build_schedule(name, 4, 8, chunks), EQUAL_COSTS)
    assert timeline.makespan == makespan
    assert timeline.idle_per_rank == [idle] * 4
    assert timeline.bubble_over_total == pytest.approx(bubble, abs=0.00005)
    assert timeline.bubble_by_span == pytest.approx(by_span, abs=0.00005)
    assert timeline.peak_held_per_rank == held
    assert timeline.peak_held_until_weight_per_rank == until_weight


def test_torchs_interleaved_zero_bubble_of_4_ranks_and_8_microbatches_takes_51():
    theirs = check_legal(from_csv(torch_order("InterleavedZeroBubble", 4, 8, 2)))
    timeline = simulate(theirs, EQUAL_COSTS)
    assert timeline.makespan == 51
    assert timeline.peak_held_per_rank == [8, 7, 6, 5]
    assert timeline.peak_held_until_weight_per_rank == [8, 8, 8, 8]


# Interleaved 1F1B and looped BFS


@pytest.mark.parametrize("costs", UNEQUAL_COSTS, ids=str)
@pytest.mark.parametrize("generator", [interleaved_1f1b, looped_bfs])
def test_chunks_divide_the_bubble_by_v_megatron_section_2_2_2(generator, costs):
    # A rank's whole share costs v chunks, so its idle time (p - 1)(F + B)/v is that of one chunk.
    for p in RANKS:
        for m in (p, 2 * p, 4 * p):
            for v in (2, 3, 4):
                timeline = simulate(generator(p, m, v), costs)
                idle = (p - 1) * (costs.forward + costs.backward)
                assert timeline.idle_per_rank == [idle] * p, (p, m, v)
                assert timeline.bubble_over_ideal == pytest.approx((p - 1) / (v * m), abs=1e-12)


@pytest.mark.parametrize("generator", [interleaved_1f1b, looped_bfs])
def test_chunks_multiply_the_messages_megatron_section_2_2_2(generator):
    for p in range(2, 7):
        for v in (2, 3, 4):
            # With v - 1 more ways from the last rank to the first than v times 2m(p - 1).
            assert len(generator(p, 2 * p, v).messages) == 2 * (2 * p) * (p * v - 1)


def test_interleaved_1f1b_holds_its_warm_up_and_one_more_megatron_section_2_2_2():
    for p in RANKS:
        for m in (p, 2 * p, 3 * p):
            for v in (2, 3, 4):
                held = [min(m * v, (v - 1) * p + 2 * (p - 1 - i) + 1) for i in range(p)]
                assert simulate(interleaved_1f1b(p, m, v), Costs()).peak_held_per_rank == held


def test_looped_bfs_holds_all_microbatches_of_all_chunks():
    for p, m, v in sizes_of("looped-bfs"):
        assert simulate(looped_bfs(p, m, v), Costs()).peak_held_per_rank == [m * v] * p


# Zero bubble


@pytest.mark.parametrize("costs", [EQUAL_COSTS, Costs(3, 6, 3), Costs(2, 4.5, 1.5)], ids=str)
def test_zb_h1_is_idle_for_p_minus_1_times_f_plus_i_minus_w_zero_bubble_table_2(costs):
    weight = costs.backward_weight
    for p in RANKS:
        for m in (2 * p, 3 * p, 5 * p):
            timeline = simulate(zb_h1(p, m), costs)
            idle = (p - 1) * (costs.forward + costs.backward - 2 * weight)
            assert timeline.makespan == m * (costs.forward + costs.backward) + idle, (p, m)


def test_zb_h1_has_a_third_of_1f1bs_idle_time_at_equal_costs():
    for p in RANKS:
        for m in range(2 * p, 3 * p):
            ours = simulate(zb_h1(p, m), EQUAL_COSTS)
            theirs = simulate(one_f_one_b(p, m), EQUAL_COSTS)
            assert [3 * idle for idle in ours.idle_per_rank] == theirs.idle_per_rank


def test_zb_h2_and_zb_v_have_no_bubble_by_span_from_2p_minus_1_microbatches_on():
    for p in RANKS:
        for m in range(2 * p - 1, 2 * p + 9):
            for schedule in (zb_h2(p, m), zb_v(p, m)):
                timeline = simulate(schedule, EQUAL_COSTS)
                assert timeline.bubble_by_span == 0, (schedule.name, p, m)
                assert timeline.makespan == timeline.ideal + p - 1  # the ranks start in turn


def test_up_to_p_microbatches_zero_bubble_takes_m_plus_p_minus_1_passages_zero_bubble_appendix_h():
    costs = Costs(forward=3, backward=5, backward_weight=2)
    for p in RANKS:
        for m in range(1, p + 1):
            for generator in (zb_h1, zb_h2):
                makespan = simulate(generator(p, m), costs).makespan
                assert makespan == (m + p - 1) * (3 + 3) + 2, (generator, p, m)


def test_zb_h1_holds_as_much_as_1f1b_and_with_the_weights_p_everywhere_zero_bubble_table_2():
    for p in RANKS:
        for m in range(2 * p, 3 * p):
            timeline = simulate(zb_h1(p, m), EQUAL_COSTS)
            assert timeline.peak_held_per_rank == [p - i for i in range(p)]
            assert timeline.peak_held_until_weight_per_rank == [p] * p


def test_zb_h2_holds_2p_minus_1_zero_bubble_table_2():
    for p in RANKS:
        for m in range(3 * p, 4 * p):
            timeline = simulate(zb_h2(p, m), EQUAL_COSTS)
            assert timeline.peak_held_per_rank == [2 * (p - i) - 1 for i in range(p)]
            assert timeline.peak_held_until_weight_per_rank == [2 * p - 1] * p


def test_zb_v_holds_2p_chunks_on_every_rank_the_memory_of_1f1bs_first_zero_bubble_section_6():
    for p in RANKS:
        for m in range(2 * p, 3 * p):
            timeline = simulate(zb_v(p, m), EQUAL_COSTS)
            assert timeline.peak_held_per_rank == [2 * p] * p


def test_a_v_sends_4m_times_p_minus_1_messages_and_turns_round_without_one():
    for p in RANKS:
        m = 2 * p
        for make in (zb_v, v_half, v_min, dualpipe_v):
            schedule = make(p, m)
            assert len(schedule.messages) == 4 * m * (p - 1)


def test_dualpipe_v_holds_2p_plus_1_chunks_on_every_rank_dualpipe_readme():
    for p in range(2, 9):
        for m in range(2 * p, 3 * p):
            assert simulate(dualpipe_v(p, m), EQUAL_COSTS).peak_held_per_rank == [2 * p + 1] * p


def test_a_split_backward_never_takes_longer_than_1f1b():
    for p, m in EVERY_SIZE:
        longest = simulate(one_f_one_b(p, m), EQUAL_COSTS).makespan
        assert simulate(gpipe(p, m), EQUAL_COSTS).makespan == longest
        assert simulate(zb_h1(p, m), EQUAL_COSTS).makespan <= longest
        assert simulate(zb_h2(p, m), EQUAL_COSTS).makespan <= longest


# The zero-bubble paper's table 5, with the times of its table 9

TABLE_9 = {
    "1.5B, p=8, m=24": (8, 24, 18.522, 18.086, 9.337, 0.601),
    "1.5B, p=8, m=32": (8, 32, 18.513, 18.086, 9.331, 0.626),
    "1.5B, p=8, m=64": (8, 64, 18.546, 18.097, 9.321, 0.762),
    "6.2B, p=8, m=24": (8, 24, 29.718, 29.444, 19.927, 0.527),
}
TABLE_5 = {
    "1.5B, p=8, m=24": {"1f1b": 0.2431, "zb-h1": 0.1585, "zb-h2": 0.1083},
    "1.5B, p=8, m=32": {"1f1b": 0.1985, "zb-h1": 0.1242, "zb-h2": 0.0837},
    "1.5B, p=8, m=64": {"1f1b": 0.1240, "zb-h1": 0.0674, "zb-h2": 0.0444},
    "6.2B, p=8, m=24": {"1f1b": 0.2347, "zb-h1": 0.1323, "zb-h2": 0.0698},
}


@pytest.mark.parametrize("model", TABLE_9)
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2"])
def test_bubble_rates_of_zero_bubble_table_5_to_four_decimals(model, name, capsys):
    p, m, forward, for_input, for_weights, transfer = TABLE_9[model]
    flags = (
        f"{name} --ranks {p} --microbatches {m} --forward {forward} --transfer {transfer} "
        f"--backward {for_input + for_weights} --backward-weight {for_weights} --json"
    )
    with mock.patch.object(sys, "argv", ["predict.py", *flags.split()]):
        assert predict.main() == 0
    figures = json.loads(capsys.readouterr().out)
    assert round(figures["bubble_by_span"], 4) == TABLE_5[model][name]
