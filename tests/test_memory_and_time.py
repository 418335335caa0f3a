"""What the explorer says of memory and of time against a slider, without a browser."""

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from course.browser.explorer_page import SIZES_START, START
from course.browser.page import answer
from course.views.explorer import Panel, explore
from course.views.explorer_view import View
from course.views.memory_and_time import AXES, FIELD, MemoryAndTime, Sizes, gib_per_rank, point_of
from lab.curves import SPACE, Curve, draw_plot
from pipeline.schedules.text_form import from_csv
from planning.microbatches_held import held_by

SETTINGS = explore(compare="1f1b").settings
SIZES = Sizes(kept=0.65, states=4.0, limit=8.0)


def shown(moved="microbatches", limits=(1, 64), sizes=SIZES, **changed):
    return MemoryAndTime(View(replace(SETTINGS, **changed)), sizes, moved, limits)


def curve(name, **changed):
    """{value of the slider: Point} of one schedule."""
    return dict(shown(**changed).curves)[name]


def test_over_micro_batches_gpipe_and_1f1b_take_the_closed_form_of_gpipe_section_2_3():
    # (m + p - 1)(t_f + t_b) for the step; with transfers that take no time 1F1B takes as long.
    for ranks in (4, 7):
        for name in ("gpipe", "1f1b"):
            points = curve(name, ranks=ranks)
            assert {1, ranks, 2 * ranks, 4 * ranks, 8} <= set(points)
            for m, point in points.items():
                assert point.milliseconds == pytest.approx((m + ranks - 1) * 30 / m, rel=1e-12)


def test_interleaving_divides_the_bubble_of_the_curve_by_the_stages_per_rank():
    # Narayanan et al. 2021, 2104.04473, section 2.2.2: (p - 1)/(v m) of the ideal time.
    for chunks in (2, 4):
        points = curve("interleaved-1f1b", chunks=chunks)
        for m in (4, 8, 16, 32, 64):
            assert points[m].milliseconds == pytest.approx(30 * (1 + 3 / (chunks * m)), rel=1e-12)


def test_gpipe_holds_m_micro_batches_and_1f1b_p_minus_r():
    for m, point in curve("gpipe").items():
        assert point.held == (m,) * 4
    for m, point in curve("1f1b").items():
        assert point.held == tuple(min(m, 4 - rank) for rank in range(4))


@pytest.mark.parametrize("name", FIELD)
def test_what_ranks_hold_is_what_the_planner_counts(name):
    chunks = 2 if name in ("interleaved-1f1b", "zb-v") else 1
    for m in (8, 16):
        point = point_of(replace(SETTINGS, schedule=name, compare=None, microbatches=m))
        assert [held * chunks for held in point.held] == held_by(name, 4, chunks, m)


def test_the_bytes_of_a_rank_are_its_held_micro_batches_and_its_states():
    needs = gib_per_rank(curve("1f1b")[8], SIZES)
    assert needs == pytest.approx([6.6, 5.95, 5.3, 4.65], rel=1e-12)


def test_the_fullest_rank_is_said_in_a_sentence_that_changes_at_the_limit():
    gpipe, one_f_one_b = ElementTree.fromstring(f"<p>{shown().verdict}</p>")
    assert gpipe.text == (
        "gpipe: each rank needs 9.2 GiB of 8, which does not fit: 8 micro-batches at 0.65 GiB, "
        "and 4 GiB of weights, gradients and optimizer"
    )
    assert one_f_one_b.text.startswith("1f1b: rank 0 needs 6.6 GiB of 8, which fits: 4 micro-")
    for limit, fits in [(6.6, "fits"), (6.59, "does not fit")]:
        said = shown(sizes=replace(SIZES, limit=limit)).verdict
        assert f"1f1b: rank 0 needs 6.6 GiB of {limit}, which {fits}:" in said
    assert "stored weight versions" in shown(schedule="pipedream").verdict
    assert "backward for the weights has ended" in shown(schedule="zb-h1").verdict


@pytest.mark.parametrize("moved", AXES)
def test_along_every_slider_the_curves_meet_the_present_value_and_the_table_says_all(moved):
    both = shown(moved, (2, 4) if moved == "chunks" else (1, 8), ranks=3, microbatches=6)
    table = ElementTree.fromstring(both.table)
    heads, *rows = [["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]
    assert heads == [AXES[moved], "gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v"]
    assert len(rows) == len(both.values)
    (now,) = [row for row in rows if row[0].endswith("(now)")]
    (gpipe, *_) = both.present
    assert now[1] == f"{gpipe[0].timeline.makespan / 6:.4g} ms, 7.9 GiB"
    picture = ElementTree.fromstring(both.picture.svg)
    assert picture.get("aria-label") == both.alt and "gpipe over" in both.alt


def test_what_a_generator_rejects_is_not_possible_in_the_table_and_left_out_of_the_curve():
    both = shown(schedule="dualpipe-v")
    assert list(dict(both.curves)["dualpipe-v"]) == [8, 16, 32, 64]
    assert both.table.count("not possible") == 3  # at 1, 2 and 4


def test_a_schedule_of_ones_own_is_a_point_at_its_own_size():
    own = from_csv("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1", name="own")
    both = shown(schedule=own, ranks=2)
    (points,) = [points for choice, points in both.curves if choice is own]
    assert {m: point.held for m, point in points.items()} == {2: (1, 1)}
    assert points[2].milliseconds == 120 / 2
    assert len(dict(shown("forward", (0.5, 50), schedule=own, ranks=2).curves)[own]) > 5


def test_names_beside_the_curves_do_not_lie_on_each_other():
    curves = [Curve(f"name {i}", ((1, 30.0), (2, 30.0 + i / 10))) for i in range(6)]
    parts = draw_plot(0, 0, "", "", curves, 1, limit=30)
    named = [re.search(r' y="([\d.]+)".*>(?:name \d|limit)<', part) for part in parts]
    heights = sorted(float(found[1]) for found in named if found)
    assert len(heights) == 7
    assert min(b - a for a, b in zip(heights, heights[1:])) >= SPACE - 0.11


def test_an_explorer_has_memory_and_time_where_sizes_are_given_and_stores_their_picture():
    plain = Panel(SETTINGS)
    assert not plain.size_controls and explore().sizes is None
    given = explore("gpipe", compare="1f1b", kept=0.65, states=4.0, limit=8.0)
    assert given.sizes == SIZES and given.view.stored_picture.alt == shown().alt
    refused = explore("dualpipe-v", microbatches=7, kept=0.65)
    assert refused.view.refusal and refused.make_panel().verdict.value == ""


def test_the_panel_plots_along_the_slider_that_was_moved_and_follows_the_limit():
    panel = explore("gpipe", compare="1f1b", kept=0.65).make_panel()
    assert "does not fit" in panel.verdict.value and ">micro-batches<" in panel.curves.value
    panel.size_controls["limit"].value = 10.0
    assert "does not fit" not in panel.verdict.value
    panel.controls["transfer"].value = 3.0
    assert ">transfer, ms<" in panel.curves.value
    panel.controls["schedule"].value = "zb-h1"
    assert ">transfer, ms<" in panel.curves.value and "zb-h1: " in panel.verdict.value


def test_a_page_gets_one_curve_after_the_other_until_there_are_all():
    def asked(lines, **changed):
        settings = START | SIZES_START | changed
        question = {"do": "memory_and_time", "settings": settings, "lines": lines}
        return json.loads(answer(json.dumps(question)))

    answers = [asked(lines) for lines in range(1, len(FIELD) + 1)]
    assert [each["complete"] for each in answers] == [False] * (len(FIELD) - 1) + [True]
    assert "9.2 GiB of 8" in answers[0]["verdict"]
    assert ">zb-v<" in answers[-1]["svg"] and ">zb-v<" not in answers[0]["svg"]
    assert asked(9, schedule="dualpipe-v", microbatches=1)["verdict"] == ""
    assert asked(9, moved="rows")["complete"]
