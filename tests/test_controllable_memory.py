"""V-Half and V-Min against the paper and its repository: Qi et al. 2024, arXiv 2405.15362.

p ranks, m micro-batches; F, I and W: the costs of a forward, of a backward for the input and of one
for the weights, of one action on one stage. A rank has two stages, so a micro-batch is two chunks.
"""

import pytest

from lab.simulator import Costs, simulate
from pipeline.schedules import v_half, v_min
from pipeline.schedules.text_form import to_csv

EQUAL_COSTS = Costs(forward=1, backward=2, backward_weight=1)


def rows(schedule):
    return to_csv(schedule).splitlines()


def test_v_half_of_4_ranks_and_8_microbatches_written_out():
    assert rows(v_half(4, 8)) == [
        "0F0,0F1,0F2,0F3,0F4,7F0,7I0,7W0,7F1,7I1,7W1,7F2,7I2,0I0,0W0,7W2,"
        "7F3,0F5,7I3,0I1,0W1,7W3,7F4,0F6,7I4,0I2,0W2,7W4,7F5,0F7,7I5,0I3,"
        "0W3,7W5,7F6,7I6,7W6,0I4,0W4,7F7,7I7,0I5,0W5,0I6,7W7,0W6,0I7,0W7",
        "1F0,1F1,1F2,1F3,6F0,6F1,6I0,6W0,6I1,6F2,6W1,1I0,1W0,1F4,6F3,6I2,"
        "6W2,1I1,1W1,1F5,6F4,6I3,6W3,1I2,1W2,1F6,6F5,6I4,6W4,1I3,1W3,1F7,"
        "6F6,6I5,6W5,1I4,1W4,6I6,6F7,6W6,1I5,6I7,1I6,1W5,6W7,1W6,1I7,1W7",
        "2F0,2F1,2F2,5F0,2F3,5F1,5I0,5W0,5F2,5I1,2I0,2W0,5W1,5F3,2F4,2I1,"
        "5I2,2W1,5F4,5W2,2F5,2I2,5I3,2W2,5F5,5W3,2F6,2I3,5I4,2W3,5F6,5W4,"
        "2F7,2I4,5I5,2W4,5F7,5I6,2I5,5W5,2I6,5I7,2W5,5W6,2I7,2W6,5W7,2W7",
        "3F0,4F0,3F1,4F1,3F2,4F2,4I0,4W0,3I0,3W0,3F3,4F3,4I1,4W1,3I1,3W1,"
        "3F4,4F4,4I2,4W2,3I2,3W2,3F5,4F5,4I3,4W3,3I3,3W3,3F6,4F6,4I4,4W4,"
        "3I4,3W4,3F7,4F7,4I5,3I5,4I6,3I6,4W5,3W5,4I7,3I7,4W6,3W6,4W7,3W7",
    ]


def test_v_min_of_3_ranks_and_2_microbatches_written_out():
    assert rows(v_min(3, 2)) == [
        "0F0,0F1,5F0,5I0,5W0,5F1,5I1,5W1,0I0,0W0,0I1,0W1",
        "1F0,1F1,4F0,4F1,4I0,4W0,1I0,4I1,1W0,4W1,1I1,1W1",
        "2F0,3F0,2F1,3F1,3I0,2I0,3W0,2W0,3I1,2I1,3W1,2W1",
    ]


@pytest.mark.parametrize(
    ("make", "most"),
    [(v_half, lambda p: (p + 2) // 2), (v_min, lambda p: (p + 4) // 3)],
    ids=["v-half, (p + 2) / 2", "v-min, (p + 4) / 3"],
)
def test_every_rank_holds_half_or_a_third_of_1f1bs_microbatches_controllable_memory(make, most):
    for p in range(2, 13):
        for m in (1, p, 2 * p, 2 * p + 3, 4 * p):
            timeline = simulate(make(p, m), EQUAL_COSTS)
            held = timeline.peak_held_until_weight_per_rank
            assert max(held) <= 2 * most(p)
            if m >= 2 * p:  # two chunks per micro-batch
                assert held == [2 * most(p)] * p, (p, m)


def test_with_k_chunks_held_a_v_is_idle_for_6p_minus_1_minus_3k_controllable_memory_code():
    for make, sizes in ((v_half, (3, 4, 6, 8, 10, 12)), (v_min, (3, 4, 6, 7, 9, 10, 12))):
        for p in sizes:
            for m in (p, 2 * p, 3 * p):
                timeline = simulate(make(p, m), EQUAL_COSTS)
                held = max(timeline.peak_held_until_weight_per_rank)
                assert timeline.idle_per_rank == [6 * p - 1 - 3 * held] * p, (make, p, m)


def test_v_half_of_9_ranks_and_v_min_of_8_are_idle_for_little_more():
    assert simulate(v_half(9, 18), EQUAL_COSTS).idle_per_rank == [25] * 9  # and not 23
    assert simulate(v_min(8, 16), EQUAL_COSTS).idle_per_rank == [27] * 8  # and not 23


def test_for_many_ranks_the_bubble_is_half_of_1f1bs_and_two_thirds_controllable_memory_readme():
    p, m = 64, 128
    whole = 6 * (p - 1)  # of 1F1B, whose stages are twice as large
    assert simulate(v_half(p, m), EQUAL_COSTS).idle_per_rank[0] / whole == pytest.approx(
        1 / 2, 0.03
    )
    assert simulate(v_min(p, m), EQUAL_COSTS).idle_per_rank[0] / whole == pytest.approx(2 / 3, 0.03)


@pytest.mark.parametrize(
    ("forward", "for_input", "weight"),
    [(1, 1, 1), (1, 1.25, 0.75), (1, 1.5, 0.5), (1.5, 1, 1), (1, 1, 0.5), (1, 1, 1.5), (2, 1, 1)],
)
def test_v_min_waits_in_every_microbatch_where_times_differ_and_v_half_only_where_they_differ_much(
    forward, for_input, weight
):
    work = 2 * (forward + for_input + weight)
    costs = Costs(forward, for_input + weight, weight)
    for p in range(4, 9):
        steady = {}
        for make in (v_half, v_min):
            fewer, more = (simulate(make(p, m * p), costs).makespan for m in (5, 7))
            steady[make] = (more - fewer) / (2 * p)
        assert steady[v_min] == pytest.approx(max(work, 6 * forward, 6 * for_input))
        unhidden = abs(2 * forward - 2 * for_input) - weight
        assert steady[v_half] == pytest.approx(work + max(0, unhidden))
