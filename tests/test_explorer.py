"""What the explorer says and shows, without a browser (test_browser.py has one)."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from course.views.explorer import NOTHING, Panel, explore
from course.views.explorer_view import WORK, View, work_of
from course.views.stepping import STORED
from lab.simulator import Costs, simulate
from lab.story import moments_at, short, stories_of, times_of, waits_of
from lab.timeline import Event, Timeline
from pipeline.schedule import KINDS, message_of
from pipeline.schedules import (
    SCHEDULES,
    build_schedule,
    gpipe,
    one_f_one_b,
    pipedream,
    pipedream_round_robin,
)
from pipeline.schedules.text_form import from_csv

SETTINGS = explore().settings
EVERY_SCHEDULE = pytest.mark.parametrize("name", SCHEDULES)


def view_of(schedule="gpipe", **changed):
    return View(replace(SETTINGS, schedule=schedule, **changed))


def story_of(timeline, action):
    """The story of one action, named as in 0F3."""
    for event, story in zip(timeline.events, stories_of(timeline)):
        if str(event.action) == action:
            return "; ".join(story)
    raise KeyError(action)


def shifted(timeline, by):
    """The same later, as a performed timeline is: its clock does not start at 0."""
    events = (
        event._replace(start=event.start + by, end=event.end + by) for event in timeline.events
    )
    return Timeline(timeline.name, tuple(events))


# Stories


def test_a_block_says_what_it_is_when_and_for_which_message_it_waited():
    timeline = simulate(gpipe(4, 8), Costs(10, 20))
    assert story_of(timeline, "1F0") == (
        "forward of micro-batch 0 on stage 1, rank 1, 10 to 20 ms; "
        "waited 10 ms for the activation of micro-batch 0 from rank 0"
    )
    assert story_of(timeline, "0B0") == (
        "backward of micro-batch 0 on stage 0, rank 0, 170 to 190 ms; "
        "waited 90 ms for the gradient of micro-batch 0 from rank 1"
    )


def test_a_block_that_did_not_wait_says_since_when_its_message_was_there():
    timeline = simulate(one_f_one_b(4, 8), Costs(10, 20))
    assert story_of(timeline, "3F1").endswith(
        "did not wait; the activation of micro-batch 1 from rank 2 was sent at 40 ms"
    )
    assert story_of(timeline, "3B1").endswith("; needs no message")
    assert story_of(timeline, "0F0").endswith("; needs no message")


def test_a_transfer_is_told_by_when_the_message_was_sent():
    timeline = simulate(gpipe(2, 2), Costs(10, 20, transfer=3))
    assert story_of(timeline, "1F0").endswith(
        "waited 13 ms for the activation of micro-batch 0 from rank 0, sent at 10 ms"
    )


def test_a_message_that_was_on_its_way_when_the_rank_became_free_was_waited_for():
    # Rank 1 is free at 13 + 8, when the message sent at 20 still has 2 of its 3 ms to go.
    timeline = simulate(gpipe(2, 2), Costs([10, 8], 20, transfer=3))
    assert story_of(timeline, "1F1").endswith(
        "waited 2 ms for the activation of micro-batch 1 from rank 0, sent at 20 ms"
    )


def test_a_rank_that_takes_its_time_is_not_said_to_wait_for_a_message_that_is_there():
    events = [("0F0", 0, 10), ("0F1", 10, 20), ("1F0", 11, 31), ("1F1", 33, 53)]
    timeline = Timeline(
        "performed",
        tuple(
            Event(action.stage, action, start, end)
            for text, start, end in events
            for action in from_csv(text).orders[0]
        ),
    )
    assert story_of(timeline, "1F1").endswith(
        "began 2 ms after rank 1 was free; "
        "the activation of micro-batch 1 from rank 0 was sent at 20 ms"
    )
    assert [wait.for_message for wait in waits_of(timeline)] == [False, False, True, False]


@EVERY_SCHEDULE
@pytest.mark.parametrize("transfer", [0, 0.7])
def test_in_a_prediction_every_gap_is_explained_by_the_message_that_ends_it(name, transfer):
    schedule = build_schedule(name, 4, 8)
    timeline = simulate(schedule, Costs(10, 20, transfer=transfer))
    waits = waits_of(timeline)
    assert [wait.event for wait in waits] == list(timeline.events)
    for wait in waits:
        assert wait.for_message == (wait.gap > 1e-6)
        if wait.for_message:
            assert wait.event.start == pytest.approx(wait.source.end + transfer, abs=1e-9)
    idle = sum(timeline.idle_per_rank)
    after_the_last = sum(
        timeline.start + timeline.makespan - events[-1].end for events in timeline.by_rank
    )
    assert sum(wait.gap for wait in waits) + after_the_last == pytest.approx(idle)
    senders = sum(wait.source is not None for wait in waits)
    assert senders == len(schedule.messages)


@EVERY_SCHEDULE
@pytest.mark.parametrize("transfer", [0, 0.7])
def test_in_a_prediction_with_narrow_links_every_gap_ends_when_a_message_arrives(name, transfer):
    # On a performed timeline some of these messages would look as if they had long been there.
    schedule = build_schedule(name, 4, 8)
    timeline = simulate(schedule, Costs(10, 20, transfer=transfer, occupancy=25))
    for wait in waits_of(timeline):
        assert wait.for_message == (wait.gap > 1e-6)
        if wait.for_message:
            message = message_of(wait.source.action)
            assert wait.event.start == timeline.arrivals[wait.event.rank, message]


def test_a_story_is_the_same_on_a_clock_that_does_not_start_at_zero():
    timeline = simulate(one_f_one_b(4, 8), Costs(10, 20))
    assert stories_of(shifted(timeline, 12345.5)) == stories_of(timeline)


def test_an_update_that_ranks_make_together_waits_for_the_last_of_their_gradients():
    timeline = simulate(pipedream_round_robin((3, 1), 3), Costs([30, 10], [60, 20]))
    backwards = sorted(
        (event for event in timeline.events if event.action[:2] == (0, "B")),
        key=lambda event: event.end,
    )
    waits = {wait.event.rank: wait for wait in waits_of(timeline) if wait.event.action.kind == "U"}
    for rank in range(3):
        others = [event for event in backwards if event.rank != rank]
        assert waits[rank].source == others[-1]


@pytest.mark.parametrize(
    "time, said",
    [(0, "0"), (0.25, "0.25"), (342.8123, "342.8"), (10650, "10650"), (1234.5, "1234")],
)
def test_times_are_short_and_never_in_powers_of_ten(time, said):
    assert short(time) == said


# Moments


@EVERY_SCHEDULE
@pytest.mark.parametrize("until", ["BI", "BW"])
def test_the_most_that_any_moment_holds_is_the_peak_of_the_timeline(name, until):
    timeline = simulate(build_schedule(name, 4, 8), Costs(10, 20, 7, 0.3))
    peaks = [0] * timeline.num_ranks
    for time in times_of([timeline]):
        for moment in moments_at(timeline, time, until):
            peaks[moment.rank] = max(peaks[moment.rank], len(moment.held))
    expected = {
        "BI": timeline.peak_held_per_rank,
        "BW": timeline.peak_held_until_weight_per_rank,
    }
    assert peaks == expected[until]


@EVERY_SCHEDULE
def test_stepping_through_the_moments_meets_every_block_while_it_is_under_way(name):
    timeline = shifted(simulate(build_schedule(name, 4, 8), Costs(10, 20, transfer=0.1)), 3.3)
    met = set()
    for time in times_of([timeline]):
        for moment in moments_at(timeline, time):
            met |= set(moment.doing)
    assert met == set(timeline.events)


def test_at_70_ms_of_1f1b_two_ranks_work_and_two_wait():
    timeline = simulate(one_f_one_b(4, 8), Costs(10, 20))
    first, second, third, fourth = moments_at(timeline, 70)
    assert first.doing == second.doing == ()
    assert [str(moment.next.action) for moment in (first, second)] == ["0B0", "1B0"]
    assert [str(event.action) for event in (*third.doing, *fourth.doing)] == ["2B0", "3B1"]
    assert [len(moment.held) for moment in (first, second, third, fourth)] == [4, 3, 2, 1]
    assert all(moment.next is None and not moment.held for moment in moments_at(timeline, 330))


def test_the_last_of_several_times_that_differ_by_rounding_alone_is_taken():
    timeline = simulate(one_f_one_b(8, 16), Costs(0.1, 0.3))
    exact = {time for event in timeline.events for time in (event.start, event.end)}
    rounded = {round(time, 6) for time in exact}
    assert len(exact) > len(rounded)
    times = times_of([timeline])
    assert [round(time, 6) for time in times] == sorted(rounded)
    assert times[-1] == timeline.start + timeline.makespan


def test_the_table_of_a_moment_says_what_each_rank_holds_and_does():
    rows = rows_of(view_of("1f1b").moment(70))
    assert rows == [
        ["", "holds micro-batches", "does"],
        ["rank 0", "4 (0-3)", "waits for the gradient of micro-batch 0 from rank 1, until 100 ms"],
        ["rank 1", "3 (0-2)", "waits for the gradient of micro-batch 0 from rank 2, until 80 ms"],
        [
            "rank 2",
            "2 (0-1)",
            "backward of micro-batch 0 on stage 2, rank 2, 60 to 80 ms; "
            "waited 20 ms for the gradient of micro-batch 0 from rank 3",
        ],
        [
            "rank 3",
            "1 (1)",
            "backward of micro-batch 1 on stage 3, rank 3, 70 to 90 ms; needs no message",
        ],
    ]
    assert {row[2] for row in rows_of(view_of("1f1b").moment(330))[1:]} == {"has done everything"}


def test_where_a_rank_has_two_stages_the_held_micro_batches_are_named_by_stage():
    holds = [row[1] for row in rows_of(view_of("interleaved-1f1b").moment(35))[1:]]
    assert holds[0] == "8 (stage 0: 0-3; stage 4: 0-3)"


# The text equivalent


def rows_of(html):
    """The rows of every table in some HTML, as lists of text."""
    root = ElementTree.fromstring(f"<page>{html}</page>")
    return [["".join(cell.itertext()) for cell in row] for row in root.iter("tr")]


@EVERY_SCHEDULE
def test_the_table_has_every_block_of_the_picture_with_its_times_and_its_story(name):
    view = view_of(name, transfer=0.5)
    (timeline,) = view.timelines.values()
    heads, *rows = rows_of(view.table)
    assert heads == ["", "does", "stage", "micro-batch", "from, ms", "to, ms", "why then"]
    stories = dict(zip(timeline.events, stories_of(timeline)))
    assert rows == [
        [
            f"rank {event.rank}",
            KINDS[event.action.kind],
            str(event.action.stage),
            str(event.action.microbatch),
            short(event.start),
            short(event.end),
            stories[event][1],
        ]
        for events in timeline.by_rank
        for event in events
    ]
    drawn = re.findall(r'<text x="8" y="[\d.]+">(.*?)<tspan[^>]*>(.*?)</tspan>', view.picture)
    assert sorted(drawn) == sorted(stories.values())


def test_two_schedules_have_two_tables_and_two_columns_of_figures():
    view = view_of("gpipe", compare="1f1b")
    assert len(rows_of(view.table)) == 2 * (1 + 64)
    assert rows_of(view.figures) == [
        ["", "gpipe", "1f1b"],
        ["makespan", "330 ms", "330 ms"],
        ["ideal (the busiest rank's work)", "240 ms", "240 ms"],
        ["bubble over total (GPipe's)", "27.3%", "27.3%"],
        ["bubble over ideal (Megatron's)", "37.5%", "37.5%"],
        ["peak held (stage x micro-batch)", "8 8 8 8", "4 3 2 1"],
        ["messages", "48", "48"],
        ["forward and backward of a stage", "10 and 20 ms", "10 and 20 ms"],
    ]
    assert view.alt == (
        "predicted: gpipe, 4 ranks, 330 ms, 27.3% idle; "
        "to compare: 1f1b, 4 ranks, 330 ms, 27.3% idle"
    )


def test_a_split_backward_adds_the_bubble_by_span_and_what_is_held_until_w_to_the_figures():
    figures = {row[0]: row[1:] for row in rows_of(view_of("zb-h2", compare="1f1b").figures)}
    assert figures["peak held (stage x micro-batch)"] == ["7 5 3 1", "4 3 2 1"]
    assert figures["the same until W has ended"] == ["7 7 7 7", "4 3 2 1"]
    assert figures["bubble by span (zero bubble's)"] == ["0.0%", "27.3%"]


def test_the_same_model_is_compared_however_many_stages_a_rank_has():
    # Narayanan et al. 2021, 2104.04473, section 2.2.2: v stages per rank divide the bubble by v.
    view = view_of("1f1b", compare="interleaved-1f1b")
    one, two = view.timelines.values()
    assert one.busy_per_rank == two.busy_per_rank == [240] * 4
    assert two.bubble_over_ideal == pytest.approx(one.bubble_over_ideal / 2)


def test_the_picture_is_named_in_words_and_fits_both_themes():
    root = ElementTree.fromstring(view_of().picture)
    assert root.get("role") == "img"
    assert root.get("aria-label") == "predicted: gpipe, 4 ranks, 330 ms, 27.3% idle"
    cursor = ElementTree.fromstring(view_of().cursor(0))
    assert cursor.get("viewBox") == root.get("viewBox")
    assert cursor.get("aria-hidden") == "true"
    grounds = [element.get("fill") for element in root if element.tag.endswith("rect")]
    assert not {"#ffffff", "white", "#000000", "black"} & set(grounds)  # the page shows through


# Refusals


@pytest.mark.parametrize(
    "changed, sentence",
    [
        ({"schedule": "dualpipe-v", "microbatches": 7}, "dualpipe-v needs at least two"),
        ({"schedule": "looped-bfs", "chunks": 1}, "looped-bfs has at least 2 chunks per rank"),
        ({"compare": "interleaved-1f1b", "microbatches": 9}, "interleaved-1f1b takes micro-"),
        ({"schedule": "zb-h1", "weight": 20.0}, "the weights' part, 20 ms, must be less than"),
    ],
)
def test_what_a_generator_refuses_stands_in_the_pictures_place_in_its_own_words(changed, sentence):
    view = view_of(**changed)
    assert view.refusal.startswith(sentence)
    for text in (view.picture, view.table):
        alert = ElementTree.fromstring(text)
        assert alert.get("role") == "alert"
        assert "".join(alert.itertext()) == view.refusal
        assert "Error" not in view.refusal
    assert view.alt == f"No picture: {view.refusal}"
    assert view.cursor(0) == view.moment(0) == ""


def test_the_stages_of_a_rank_are_chosen_in_a_loop_and_are_two_in_a_v():
    view = view_of("looped-bfs", compare="zb-v", chunks=3)
    assert [timeline.num_stages for timeline in view.timelines.values()] == [12, 8]


def test_the_weights_part_counts_only_where_a_backward_is_split():
    assert view_of("gpipe", weight=20.0).refusal == ""


def test_an_unknown_schedule_is_refused_with_the_names_that_there_are():
    with pytest.raises(ValueError, match="no schedule is named 'gpip'; take naive, gpipe, 1f1b"):
        explore("gpip")
    with pytest.raises(ValueError, match="no schedule is named 'all'"):
        explore(compare="all")


@pytest.mark.parametrize("value", ["many", float("nan"), -1, 1e300, [4], None])
@pytest.mark.parametrize("name", ["ranks", "chunks", "forward", "backward", "transfer", "limit"])
def test_what_no_slider_can_show_is_refused_by_its_name_and_without_a_traceback(name, value):
    with pytest.raises(ValueError, match=f"^{name} is a .*number from 0") as refused:
        explore(kept=1, **{name: value})
    assert refused.value._render_traceback_() == [str(refused.value)]


@pytest.mark.parametrize("odd", [{"schedule": ["gpipe"]}, {"schedule": None}, {"compare": 0}])
def test_what_is_no_schedule_is_refused_with_the_names_that_there_are(odd):
    with pytest.raises(ValueError, match="no schedule is named .*; take naive"):
        explore(**odd)


# The panel


def test_every_control_changes_the_picture_or_is_switched_off():
    panel = Panel(replace(SETTINGS, schedule="zb-v", compare="interleaved-1f1b"))
    moved = {"ranks": 2, "microbatches": 12, "forward": 11, "backward": 19, "weight": 8}
    moved |= {"transfer": 1.5, "occupancy": 2.5, "schedule": "looped-bfs", "chunks": 3}
    moved |= {"work": "from long to short"}
    for name, value in moved.items():
        before = panel.picture.value
        panel.controls[name].value = value
        assert panel.picture.value != before, name
    panel.controls["compare"].value = NOTHING
    assert panel.controls["weight"].disabled  # looped BFS has no backward for the weights
    assert not panel.controls["chunks"].disabled
    panel.controls["schedule"].value = "gpipe"
    assert panel.controls["chunks"].disabled


def test_a_transfer_that_is_given_can_be_made_longer():
    slow = Panel(replace(SETTINGS, schedule="1f1b", transfer=20.0))
    before = slow.picture.value
    slow.controls["transfer"].value = 45
    assert slow.settings.transfer == 45 and slow.picture.value != before


def test_over_narrow_links_gpipe_and_1f1b_change_places():
    far = explore("gpipe", ranks=2, compare="1f1b", transfer=30).view.predictions
    narrow = explore("gpipe", ranks=2, compare="1f1b", occupancy=30).view.predictions
    assert [each.timeline.makespan for each in far] == [330, 510]
    assert [each.timeline.makespan for each in narrow] == [540, 510]


@pytest.mark.parametrize("name", WORK)
def test_however_the_work_is_spread_the_batch_has_the_same(name):
    for m in (1, 2, 3, 8, 64):
        work = work_of(name, m)
        assert work == () if name == "equal" else sum(work) == pytest.approx(m, rel=1e-12)
        timeline = view_of("1f1b", microbatches=m, work=name).timelines["predicted"]
        assert timeline.ideal == pytest.approx(30 * m, rel=1e-12)


def test_a_long_micro_batch_makes_others_wait_wherever_it_is():
    # Lesson 10d: 570, 550 and 570 ms where the batch has 10 units of work; here it has 8.
    lasts = {
        name: view_of("1f1b", work=name).timelines["predicted"].makespan / 0.8
        for name in ("one long, first", "one long, in the middle", "one long, last")
    }
    assert list(lasts.values()) == pytest.approx([570, 550, 570], rel=1e-12)
    assert "on average" in view_of("1f1b", work="one long, last").figures
    assert "on average" not in view_of("1f1b").figures


def test_an_unknown_spread_of_work_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match="work is one of: equal; one long, first; .* not 'odd'"):
        explore(work="odd")


def test_the_cursor_steps_from_moment_to_moment_and_stops_at_both_ends():
    panel = Panel(SETTINGS)
    assert panel.now.value == "at 0 ms"
    panel.back.click()
    assert panel.now.value == "at 0 ms"
    panel.on.click()
    assert panel.now.value == "at 10 ms"
    assert "rank 1, 10 to 20 ms; waited 10 ms" in panel.moment.value
    panel.cursor.value = panel.cursor.max
    panel.on.click()
    assert panel.now.value == "at 330 ms"


def test_the_cursor_keeps_its_time_when_a_setting_changes():
    panel = Panel(SETTINGS)
    panel.cursor.value = 7
    assert panel.now.value == "at 70 ms"
    line = panel.line.value
    panel.controls["microbatches"].value = 16
    assert panel.now.value == "at 70 ms"
    assert panel.line.value != line
    panel.controls["forward"].value = 50.0
    assert panel.now.value == "at 50 ms"  # the moment before: at 70 ms nothing starts or ends
    panel.controls["microbatches"].value = 1
    assert panel.play.max == panel.cursor.max == len(panel.view.times) - 1


def test_a_refusal_leaves_the_panel_usable_and_the_cursor_where_it_was():
    panel = Panel(replace(SETTINGS, schedule="dualpipe-v"))
    panel.cursor.value = 4
    before = panel.now.value
    panel.controls["microbatches"].value = 7
    assert 'role="alert"' in panel.picture.value
    assert panel.cursor.disabled and panel.play.disabled
    for move in (panel.on.click, panel.back.click, lambda: panel.cursor.set_trait("value", 1)):
        move()
        assert panel.now.value == panel.line.value == ""
    panel.controls["microbatches"].value = 8
    assert "<svg" in panel.picture.value
    assert panel.now.value == before != "at 0 ms"
    assert not panel.cursor.disabled


def test_the_table_is_shown_in_the_pictures_place_and_follows_the_sliders():
    panel = Panel(SETTINGS)
    assert panel.table.value == ""
    panel.shown.value = "table"
    assert panel.drawing.layout.display == "none"
    assert panel.table.layout.display is None
    assert len(rows_of(panel.table.value)) == 1 + 64
    panel.controls["microbatches"].value = 9
    assert len(rows_of(panel.table.value)) == 1 + 72
    panel.shown.value = "picture"
    assert panel.drawing.layout.display is None


def test_a_schedule_of_ones_own_can_be_explored_beside_those_of_the_field():
    own = from_csv("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1", name="own")
    panel = Panel(explore(own, compare=pipedream(2, 4)).settings)
    assert panel.controls["ranks"].disabled and panel.controls["microbatches"].disabled
    assert panel.view.alt.startswith("predicted: own, 2 ranks, 120 ms")
    panel.controls["compare"].value = "gpipe"
    assert not panel.controls["ranks"].disabled
    panel.controls["schedule"].value = "1f1b"
    panel.controls["schedule"].value = "own"
    assert panel.view.predictions[0].schedule is own


def test_two_schedules_of_ones_own_may_have_the_same_name():
    one = from_csv("0F0,0B0,0F1,0B1", name="own")
    other = from_csv("0F0,0F1,0B0,0B1", name="own")
    panel = Panel(explore(one, compare=other).settings)
    panel.controls["forward"].value = 30.0
    assert [each.schedule for each in panel.view.predictions] == [one, other]


@EVERY_SCHEDULE
def test_wherever_the_sliders_stand_there_is_a_picture_or_a_sentence(name):
    for ranks, microbatches, chunks in [(1, 1, 2), (1, 8, 4), (2, 3, 2), (5, 7, 3), (8, 64, 2)]:
        view = view_of(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
        if view.refusal:
            assert view.refusal.startswith(name) and "Error" not in view.refusal
            continue
        ElementTree.fromstring(view.picture)
        at_the_end = rows_of(view.moment(view.times[-1]))[1][-1]
        assert re.match("has done everything|update of micro-batch", at_the_end)


# Stored


def test_a_cell_shows_the_panel_and_a_page_without_a_kernel_the_picture(monkeypatch):
    monkeypatch.delenv(STORED, raising=False)
    bundle = explore("1f1b")._repr_mimebundle_()
    widget = "application/vnd.jupyter.widget-view+json"
    assert set(bundle) == {widget, "image/svg+xml", "text/plain"}
    assert bundle["text/plain"] == "predicted: 1f1b, 4 ranks, 330 ms, 27.3% idle"
    assert 'role="img" aria-label=' in bundle["image/svg+xml"]
    assert bundle[widget]["model_id"]
    monkeypatch.setenv(STORED, "1")
    assert set(explore("1f1b")._repr_mimebundle_()) == {"image/svg+xml", "text/plain"}
