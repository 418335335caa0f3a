"""What the fullest rank holds over time, and the map of the schedules: figures of the papers."""

import re

import pytest
from schedule_map import comparable, draw_map, places, same_work

from lab.figures import draw_timelines
from lab.held_curve import draw_held, fullest_rank, held_over_time


@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 8), (4, 2)])
def test_gpipe_and_1f1b_have_one_bubble_and_hold_m_and_at_most_p_micro_batches(p, m):
    found = places(comparable(p, m))
    bubble = pytest.approx((p - 1) / (m + p - 1))
    assert found["gpipe"] == (m, bubble)
    assert found["1f1b"] == (min(p, m), bubble)


def test_rank_r_of_1f1b_holds_p_minus_r_micro_batches_at_most_and_none_at_the_end():
    timeline = same_work("1f1b", 4, 8)
    for rank in range(4):
        steps = held_over_time(timeline, rank)
        assert max(held for _, held in steps) == 4 - rank
        assert steps[-1][1] == 0
        times = [time for time, _ in steps]
        assert times == sorted(set(times)), "one value at one time"
    assert fullest_rank(timeline) == (0, 4)


def test_two_stages_per_rank_count_half_a_micro_batch_each():
    assert fullest_rank(same_work("interleaved-1f1b", 4, 8)) == (0, 5.5)
    assert fullest_rank(same_work("zb-v", 4, 8))[1] == 4, "as 1F1B"
    assert fullest_rank(same_work("v-min", 4, 8))[1] == 2
    assert same_work("looped-bfs", 4, 8).makespan == 285, "the same work, half of the bubble"


def test_a_schedule_that_has_not_these_sizes_is_not_on_the_map():
    assert "dualpipe-v" not in comparable(4, 2) and "dualpipe-v" in comparable(4, 8)
    assert "naive" not in comparable(4, 8) and "pipedream" not in comparable(4, 8)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 32), (4, 64)])
def test_the_map_has_a_dot_and_a_name_for_every_schedule_within_the_drawing(p, m):
    svg = draw_map(p, m).svg
    wide = float(re.search(r'viewBox="0 0 (\d+)', svg)[1])
    names = comparable(p, m)
    assert svg.count("<circle") == len(names) >= 8
    for name in names:
        assert f">{name}</text>" in svg
    assert all(0 < float(x) < wide for x in re.findall(r'c?x="([\d.-]+)"', svg))


def test_what_is_held_is_drawn_for_both_timelines_on_one_scale():
    svg = draw_held({"predicted": same_work("gpipe", 4, 8), "to compare": same_work("1f1b", 4, 8)})
    assert "gpipe 8 (rank 0), dashed: 1f1b 4 (rank 0)" in svg
    area, line = re.findall(r'<path d="(M62.*?)"', svg)[:2]
    tops = [min(float(y) for y in re.findall(r"V([\d.]+)", path)) for path in (area, line)]
    assert tops == pytest.approx([26, 53]), "eight are twice as high as four"


def test_what_one_rank_holds_stands_below_the_timelines_on_their_axis():
    both = {name: same_work(name, 4, 8) for name in ("1f1b", "gpipe")}
    picture = draw_timelines(both, held=3)
    assert picture.alt.endswith("micro-batches that rank 3 holds, at the peak: 1f1b 1, gpipe 8")
    area = re.search(r'<path d="M62.0 [\d.]+H([\d.]+)[^"]*" fill="#D55E00"', picture.svg)
    start = both["1f1b"].by_rank[3][0].start
    first = re.search(rf'<rect x="{area[1]}"', picture.svg)
    assert start > 0 and first, "the curve rises where rank 3's first block begins"
