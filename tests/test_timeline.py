"""A timeline measured, written, read and drawn."""

import json
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pytest
from PIL import ImageFont

from lab.drawing import FONT, MOST_NUMBERS, ROW, arrange, draw_cursor
from lab.figures import draw_timelines
from lab.simulator import Costs, simulate
from lab.timeline import Event, Timeline, from_chrome_trace, to_chrome_trace
from pipeline.schedules import gpipe, interleaved_1f1b, naive
from pipeline.schedules.text_form import from_csv

SVG = "{http://www.w3.org/2000/svg}"


def timeline_of(*rows, name="mine"):
    """A timeline from a row a rank, such as "0F0 2-3, 0B0 5-9"."""
    events = []
    for rank, row in enumerate(rows):
        for cell in row.split(", "):
            action, times = cell.split()
            start, end = map(float, times.split("-"))
            events.append(Event(rank, from_csv(action).orders[0][0], start, end))
    return Timeline(name, tuple(events))


LATE_AND_UNEVEN = timeline_of("0F0 2-3, 0B0 9-11", "1F0 4-6, 1B0 6-9")


# Measured


def test_the_makespan_is_from_the_first_start_to_the_last_end_over_all_ranks():
    assert LATE_AND_UNEVEN.start == 2
    assert LATE_AND_UNEVEN.makespan == 9


def test_busy_and_idle_of_a_rank_add_up_to_the_makespan():
    assert LATE_AND_UNEVEN.busy_per_rank == [3, 5]
    assert LATE_AND_UNEVEN.idle_per_rank == [6, 4]


def test_the_span_of_a_rank_is_its_last_end_minus_its_first_start_zero_bubble_section_2_3():
    assert LATE_AND_UNEVEN.span_per_rank == [9, 5]
    assert LATE_AND_UNEVEN.bubble_by_span == 1 - 5 / 9


def test_spans_of_gpipe_shrink_by_a_forward_and_a_backward_a_rank():
    timeline = simulate(gpipe(4, 8), Costs(forward=3, backward=5))
    assert timeline.span_per_rank == [88, 80, 72, 64]


def test_both_bubbles_are_measured_from_the_busiest_rank():
    assert LATE_AND_UNEVEN.ideal == 5
    assert LATE_AND_UNEVEN.bubble_over_total == pytest.approx(4 / 9)
    assert LATE_AND_UNEVEN.bubble_over_ideal == pytest.approx(4 / 5)


def test_the_idle_fraction_is_the_mean_over_the_ranks_and_not_the_bubble_of_uneven_ranks():
    assert LATE_AND_UNEVEN.idle_fraction == pytest.approx((6 + 4) / 18)
    assert LATE_AND_UNEVEN.idle_fraction > LATE_AND_UNEVEN.bubble_over_total


@pytest.mark.parametrize("make", [naive, gpipe])
@pytest.mark.parametrize("p, m", [(1, 1), (2, 3), (4, 8), (8, 16)])
@pytest.mark.parametrize("transfer", [0, 1.5])
def test_bubble_over_total_is_bubble_over_ideal_over_one_plus_it(make, p, m, transfer):
    timeline = simulate(make(p, m), Costs(1, 2, transfer=transfer))
    over_ideal = timeline.bubble_over_ideal
    assert timeline.bubble_over_total == pytest.approx(over_ideal / (1 + over_ideal), abs=1e-15)


def test_one_rank_without_a_pause_has_no_bubble():
    timeline = simulate(gpipe(1, 5), Costs(1, 2))
    assert timeline.bubble_over_total == timeline.bubble_over_ideal == timeline.bubble_by_span == 0


def test_events_of_a_rank_come_in_the_order_of_time_however_they_are_listed():
    shuffled = Timeline("mine", LATE_AND_UNEVEN.events[::-1])
    assert shuffled.by_rank == LATE_AND_UNEVEN.by_rank
    assert [str(event.action) for event in shuffled.by_rank[1]] == ["1F0", "1B0"]


def test_an_activation_is_held_from_the_start_of_its_forward_to_the_end_of_its_backward():
    timeline = timeline_of("0F0 0-1, 0F1 1-2, 0B0 2-4, 0F2 4-5, 0B1 5-7, 0B2 7-9")
    assert timeline.peak_held_per_rank == [2]


def test_a_backward_that_ends_when_a_forward_starts_has_let_go_first():
    assert timeline_of("0F0 0-1, 0B0 1-2, 0F1 2-3, 0B1 3-4").peak_held_per_rank == [1]


def test_a_split_backward_lets_go_after_its_input_part_or_after_its_weights_part():
    timeline = timeline_of("0F0 0-1, 0I0 1-2, 0F1 2-3, 0I1 3-4, 0W0 4-5, 0W1 5-6")
    assert timeline.peak_held_per_rank == [1]
    assert timeline.peak_held_until_weight_per_rank == [2]


def test_two_stages_of_a_rank_hold_one_activation_each():
    timeline = timeline_of("0F0 0-1, 1F0 1-2, 1B0 2-4, 0B0 4-6")
    assert timeline.peak_held_per_rank == [2]


# Written and read


@pytest.mark.parametrize(
    "timeline",
    [
        LATE_AND_UNEVEN,
        simulate(gpipe(4, 8), Costs(0.1, 0.3, transfer=0.07)),
        simulate(from_csv("0F0,0B0\n1F0,1I0,1W0", name="split"), Costs(1, 2)),
    ],
    ids=["late", "gpipe", "split"],
)
def test_a_timeline_comes_back_from_the_chrome_trace_format_counted_from_its_start(timeline):
    returned = from_chrome_trace(to_chrome_trace(timeline))
    assert returned.name == timeline.name
    assert len(returned.events) == len(timeline.events)
    for ours, theirs in zip(returned.events, timeline.events):
        assert (ours.rank, ours.action) == (theirs.rank, theirs.action)
        assert ours.start == pytest.approx(theirs.start - timeline.start, abs=1e-9)
        assert ours.end == pytest.approx(theirs.end - timeline.start, abs=1e-9)


def test_the_chrome_trace_has_a_named_row_a_rank_and_times_in_microseconds():
    rows = json.loads(to_chrome_trace(LATE_AND_UNEVEN))["traceEvents"]
    names = {row["pid"]: row["args"]["name"] for row in rows if row["ph"] == "M"}
    assert names == {0: "rank 0", 1: "rank 1"}
    drawn = [
        (row["pid"], row["name"], row["cat"], row["ts"], row["dur"])
        for row in rows
        if row["ph"] == "X"
    ]
    assert drawn == [
        (0, "0F0", "forward", 0, 1000),
        (0, "0B0", "backward", 7000, 2000),
        (1, "1F0", "forward", 2000, 2000),
        (1, "1B0", "backward", 4000, 3000),
    ]


# Drawn


def blocks_of(root):
    """The blocks of a drawing: (story, left, top, width, fill) of each."""
    return [
        (
            rect.find(f"{SVG}title").text,
            float(rect.get("x")),
            float(rect.get("y")),
            float(rect.get("width")),
            rect.get("fill"),
        )
        for rect in root.iter(f"{SVG}rect")
        if rect.find(f"{SVG}title") is not None
    ]


def group_of(root, name):
    """What has this class in a drawing; None if there is nothing of the kind."""
    return next((found for found in root.iter() if found.get("class") == name), None)


def numbers_of(root):
    """The numbers on the blocks, which let the pointer through to the block's story."""
    group = group_of(root, "numbers")
    assert group is None or group.get("pointer-events") == "none"
    return [] if group is None else list(group)


def test_every_event_is_a_block_that_tells_its_story():
    picture = draw_timelines({"predicted": LATE_AND_UNEVEN})
    stories = [story for story, *_ in blocks_of(ElementTree.fromstring(picture.svg))]
    assert stories == [
        "forward of micro-batch 0 on stage 0, rank 0, 0 to 1 ms; needs no message",
        "backward of micro-batch 0 on stage 0, rank 0, 7 to 9 ms; "
        "waited 6 ms for the gradient of micro-batch 0 from rank 1",
        "forward of micro-batch 0 on stage 1, rank 1, 2 to 4 ms; "
        "waited 2 ms for the activation of micro-batch 0 from rank 0, sent at 1 ms",
        "backward of micro-batch 0 on stage 1, rank 1, 4 to 7 ms; needs no message",
    ]


def test_two_timelines_share_one_scale_and_start_at_the_same_left_edge():
    short = timeline_of("0F0 5-6, 0B0 6-8", name="short")
    long = timeline_of("0F0 0-2, 0B0 2-6", name="long")
    picture = draw_timelines({"predicted": short, "performed": long})
    short_f, short_b, long_f, long_b = blocks_of(ElementTree.fromstring(picture.svg))
    assert short_f[1] == long_f[1]
    assert long_f[3] == pytest.approx(2 * short_f[3], abs=0.02)
    assert long_b[3] == pytest.approx(2 * short_b[3], abs=0.02)
    assert short_f[2] < long_f[2]  # the first of the dictionary lies above


def test_the_times_of_an_axis_do_not_touch_beside_a_timeline_that_is_six_times_as_long():
    short, long = (simulate(gpipe(2, 2), Costs(each, each)) for each in (64, 384))
    root = ElementTree.fromstring(draw_timelines({"predicted": short, "performed": long}).svg)
    texts = list(root.iter(f"{SVG}text"))
    heights = [text.get("y") for text in texts if text.text == "0 ms"]
    assert len(heights) == 2
    for height in heights:
        times = [text for text in texts if text.get("y") == height]
        assert len(times) >= 2
        for left, right in pairwise(times):
            digits = (len(left.text) + len(right.text)) / 2
            assert float(right.get("x")) - float(left.get("x")) > 8 * digits  # 8: the widest one


def test_rank_0_is_on_top_and_time_runs_to_the_right():
    timeline = simulate(gpipe(4, 2), Costs(1, 2))
    blocks = blocks_of(ElementTree.fromstring(draw_timelines({"predicted": timeline}).svg))
    for event, (_, left, top, *_) in zip(timeline.events, blocks):
        for other, (_, other_left, other_top, *_) in zip(timeline.events, blocks):
            assert (event.rank < other.rank) == (top < other_top)
            assert (event.start < other.start) == (left < other_left)


def test_the_picture_says_in_words_what_it_shows():
    timelines = {"predicted": simulate(gpipe(4, 8), Costs(1, 2)), "performed": LATE_AND_UNEVEN}
    picture = draw_timelines(timelines)
    alt = "predicted: gpipe, 4 ranks, 33 ms, 27.3% idle; performed: mine, 2 ranks, 9 ms, 55.6% idle"
    root = ElementTree.fromstring(picture.svg)
    assert picture.alt == alt
    assert root.get("role") == "img"
    assert root.get("aria-label") == alt
    assert root.find(f"{SVG}title").text == alt
    assert picture._repr_mimebundle_() == {"image/svg+xml": picture.svg, "text/plain": alt}


def test_a_caption_takes_the_place_of_the_words_and_may_hold_any_sign():
    caption = 'idle < 30% & "busy" > 70%'
    picture = draw_timelines({"a & b": LATE_AND_UNEVEN}, caption=caption)
    root = ElementTree.fromstring(picture.svg)
    assert picture.alt == root.get("aria-label") == caption
    assert any((text.text or "").startswith("a & b: mine") for text in root.iter(f"{SVG}text"))


def test_a_picture_is_saved_as_it_is(tmp_path):
    picture = draw_timelines({"predicted": LATE_AND_UNEVEN})
    picture.save(tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").read_text() == picture.svg


def test_blocks_carry_the_number_of_their_microbatch():
    timeline = simulate(gpipe(2, 3), Costs(1, 2))
    root = ElementTree.fromstring(draw_timelines({"predicted": timeline}).svg)
    numbers = numbers_of(root)
    assert [text.text for text in numbers] == [str(e.action.microbatch) for e in timeline.events]
    for number, (_, left, top, width, _) in zip(numbers, blocks_of(root)):
        assert float(number.get("x")) == pytest.approx(left + width / 2, abs=0.11)
        assert top < float(number.get("y")) < top + ROW


@pytest.mark.parametrize("microbatches", [12, 16, 20, 24, 40])
def test_a_number_of_two_digits_is_centred_in_its_block_or_left_out_where_it_is_too_narrow(
    microbatches,
):
    font = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans-Bold.ttf"
    letters = ImageFont.truetype(font, FONT)  # the widest of the fonts that a drawing names
    timeline = simulate(gpipe(4, microbatches), Costs(1, 2))
    root = ElementTree.fromstring(draw_timelines({"predicted": timeline}).svg)
    blocks = [(left + width / 2, top, width) for _, left, top, width, _ in blocks_of(root)]
    drawn = 0
    for number in numbers_of(root):
        x, y = float(number.get("x")), float(number.get("y"))
        ((_, _, width),) = [
            block for block in blocks if abs(block[0] - x) < 0.11 and 0 < y - block[1] < ROW
        ]
        assert letters.getlength(number.text) <= width, number.text
        drawn += 1
    assert drawn == sum(
        width >= 9.5 * len(str(event.action.microbatch))
        for (_, _, width), event in zip(blocks, timeline.events)
    )


def test_a_drawing_of_more_than_400_blocks_drops_the_numbers():
    def numbers(num_microbatches):
        first, *others = simulate(naive(2, num_microbatches), Costs(1, 2)).events
        # As wide as the whole drawing: room for a number is not what it lacks.
        wide = Event(first.rank, first.action, first.start, others[-1].end)
        timeline = Timeline("mine", (wide, *others))
        root = ElementTree.fromstring(draw_timelines({"predicted": timeline}).svg)
        return len(blocks_of(root)), [text.text for text in numbers_of(root)]

    assert MOST_NUMBERS == 400
    assert numbers(100) == (400, ["0"])
    assert numbers(101) == (404, [])


def corners_of(path):
    """Where the parts of an SVG path begin."""
    return [tuple(map(float, at)) for at in re.findall(r"M([\d.]+) ([\d.]+)", path.get("d"))]


def test_kinds_differ_in_more_than_their_colour():
    # Light and dark text, a dot, a hatch: one mark each, so that no colour carries meaning alone.
    timeline = timeline_of("0F0 0-9, 0B0 9-18, 1F0 18-27, 1I0 27-36, 1W0 36-45")
    root = ElementTree.fromstring(draw_timelines({"predicted": timeline}).svg)
    blocks = {str(event.action): block for event, block in zip(timeline.events, blocks_of(root))}
    ink = [text.get("fill") for text in numbers_of(root)]
    assert ink == ["#000000", "#ffffff", "#000000", "#000000", "#000000"]
    (dot,) = corners_of(group_of(root, "dots"))
    _, left, top, width, _ = blocks["1I0"]
    assert left < dot[0] < left + width and top < dot[1] < top + ROW
    hatched = [path for path in root.iter(f"{SVG}path") if path.get("fill") == "url(#hatch)"]
    assert [corners_of(path) for path in hatched] == [[blocks["1W0"][1:3]]]
    assert len({blocks[action][-1] for action in ("0F0", "0B0", "1I0", "1W0")}) == 4


def test_the_legend_stays_within_the_picture_and_explains_every_mark_that_is_there():
    timeline = simulate(from_csv("0F0,1F0,1I0,0B0,1W0", name="all"), Costs(1, 2))
    root = ElementTree.fromstring(draw_timelines({"predicted": timeline}).svg)
    _, _, width, height = map(float, root.get("viewBox").split())
    texts = [text for text in root.iter(f"{SVG}text") if text.get("text-anchor") == "start"]
    legend = [text for text in texts if "predicted" not in text.text]
    assert [text.text for text in legend] == [
        "forward of micro-batch 0",
        "backward",
        "backward for the input",
        "backward for the weights",
        "rank's 1st, 2nd stage",
        "waiting",
        "message",
    ]
    for text in legend:
        assert float(text.get("x")) + 7.2 * len(text.text) <= width
        assert float(text.get("y")) < height


def test_the_legend_speaks_of_two_stages_of_a_rank_only_if_no_rank_has_more():
    for chunks, words in ((2, "rank's 1st, 2nd stage"), (3, "rank's first to last stage")):
        timeline = simulate(interleaved_1f1b(2, 4, chunks), Costs(1, 2))
        root = ElementTree.fromstring(draw_timelines({"predicted": timeline}).svg)
        assert words in list(root.itertext())


def test_a_cursor_lies_on_its_time_and_outlines_what_is_under_way():
    timelines = {"predicted": simulate(gpipe(4, 8), Costs(10, 20))}
    (place,), height = arrange(timelines)
    root = ElementTree.fromstring(draw_cursor(timelines, 75))
    assert root.get("viewBox").split()[2:] == ["820", f"{height:.0f}"]
    (line,) = root.iter(f"{SVG}path")
    assert corners_of(line)[0][0] == pytest.approx(place.x(75), abs=0.1)
    outlined = {(float(r.get("x")), float(r.get("y"))) for r in root.iter(f"{SVG}rect")}
    wanted = {(70, 0), (70, 1), (70, 2), (70, 3)}
    assert outlined == {(round(place.x(start), 1), place.y(rank)) for start, rank in wanted}


@pytest.mark.parametrize("p, m", [(2, 3), (4, 8)])
def test_every_message_is_a_line(p, m):
    timeline = simulate(gpipe(p, m), Costs(1, 2))
    root = ElementTree.fromstring(draw_timelines({"predicted": timeline}).svg)
    assert len(corners_of(group_of(root, "messages"))) == 2 * m * (p - 1)


def test_a_message_goes_from_the_end_of_one_block_to_the_start_of_the_other():
    timeline = timeline_of("0F0 0-2, 0B0 9-11", "1F0 4-6, 1B0 6-8")
    root = ElementTree.fromstring(draw_timelines({"predicted": timeline}).svg)
    first, last, lower_first, lower_last = blocks_of(root)
    lines = re.findall(r"M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)", group_of(root, "messages").get("d"))
    ends = sorted([float(number) for number in line] for line in lines)
    down = [first[1] + first[3], first[2] + ROW, lower_first[1], lower_first[2]]
    up = [lower_last[1] + lower_last[3], lower_last[2], last[1], last[2] + ROW]
    assert sum(ends, []) == pytest.approx(down + up, abs=0.11)
