"""The longest path adds up to the makespan, every bubble has a reason that is true, schedules have names."""

import re
from random import Random

import pytest

from course.views.explorer_view import View, reasons
from lab.drawing import LEFT
from lab.figures import draw_timelines
from lab.known_schedules import known_names, tell_name
from lab.longest_path import bubbles_of, longest_path, tell_bubble, tell_path
from lab.simulator import Costs, simulate
from lab.timeline import Event, Timeline
from pipeline.schedule import Action, Schedule
from pipeline.schedules import (
    SCHEDULES,
    build_schedule,
    gpipe,
    one_f_one_b,
    synchronous_schedules,
    zb_h1,
)
from pipeline.schedules.text_form import from_csv

EQUAL = Costs(10, 20, 10)
SIZES = [(1, 1), (2, 4), (3, 7), (4, 8), (8, 16)]


def random_costs(seed, queues=True):
    draw = Random(seed)
    forward, weight = draw.uniform(1, 30), draw.uniform(1, 30)
    transfer = draw.choice([0, draw.uniform(0, 20)])
    occupancy = draw.choice([0, draw.uniform(0, 20)]) if queues else 0
    return Costs(forward, weight + draw.uniform(1, 30), weight, transfer, occupancy=occupancy)


def cases():
    for name in SCHEDULES:
        for num_ranks, num_microbatches in SIZES:
            try:
                yield build_schedule(name, num_ranks, num_microbatches)
            except ValueError:
                continue  # a generator that does not allow this size


CASES = [(schedule, seed) for seed, schedule in enumerate(cases())]


def words_of(case):
    return f"{case.name}-{case.num_ranks}x{case.num_microbatches}" if hasattr(case, "name") else ""


@pytest.mark.parametrize(("schedule", "seed"), CASES, ids=words_of)
def test_the_longest_path_is_as_long_as_the_step_and_none_of_its_actions_could_start_earlier(
    schedule, seed
):
    for costs in (EQUAL, random_costs(seed)):
        timeline = simulate(schedule, costs)
        path = longest_path(timeline)
        assert path[0].before is None and path[0].event.start == timeline.start
        total = sum(step.event.end - step.event.start + step.gap for step in path)
        assert total == pytest.approx(timeline.makespan, rel=1e-12)
        assert path[-1].event.end == timeline.start + timeline.makespan
        for before, step in zip(path, path[1:]):
            assert step.before is before.event
            if not step.by_message:
                assert abs(step.gap) < 1e-9, "a rank is never idle on the path"


@pytest.mark.parametrize(("schedule", "seed"), CASES, ids=words_of)
def test_the_bubbles_of_a_rank_add_up_to_its_idle_time_and_each_has_a_reason(schedule, seed):
    timeline = simulate(schedule, random_costs(seed))
    bubbles = bubbles_of(timeline)
    for rank, idle in enumerate(timeline.idle_per_rank):
        found = sum(bubble.length for bubble in bubbles if bubble.rank == rank)
        assert found == pytest.approx(idle, abs=1e-7)
    for bubble in bubbles:
        assert tell_bubble(bubble, timeline)


@pytest.mark.parametrize("name", synchronous_schedules())
@pytest.mark.parametrize("seed", range(6))
def test_what_a_rank_could_run_in_a_bubble_makes_no_step_longer_when_it_runs_there(name, seed):
    schedule, costs = build_schedule(name, 4, 8), random_costs(seed, queues=False)
    timeline = simulate(schedule, costs)
    moves = [bubble for bubble in bubbles_of(timeline) if bubble.instead]
    for bubble in moves[:20]:
        order = list(schedule.orders[bubble.rank])
        order.remove(bubble.instead.action)
        order.insert(order.index(bubble.wait.event.action), bubble.instead.action)
        orders = [
            tuple(order) if rank == bubble.rank else other
            for rank, other in enumerate(schedule.orders)
        ]
        changed = simulate(Schedule("changed", tuple(orders)), costs)
        assert changed.makespan <= timeline.makespan + 1e-9


def test_the_longest_path_of_gpipe_goes_down_the_ranks_and_back_and_along_rank_0():
    path = longest_path(simulate(gpipe(3, 2), EQUAL))
    actions = " ".join(str(step.event.action) for step in path)
    assert actions == "0F0 1F0 2F0 2F1 2B0 1B0 0B0 0B1"
    told = tell_path(path)
    assert "120 ms" in told and "changes rank 4 times" in told


def test_a_message_on_its_way_is_a_part_of_the_path():
    path = longest_path(simulate(one_f_one_b(2, 1), Costs(10, 20, transfer=5)))
    assert [step.gap for step in path] == [0, 5, 0, 5]
    assert "10 ms of messages on their way" in tell_path(path)


def test_reasons_name_the_message_the_end_and_what_could_run_instead():
    timeline = simulate(zb_h1(3, 4), EQUAL)
    told = [tell_bubble(bubble, timeline) for bubble in bubbles_of(timeline)]
    assert "1F0 waits for the activation of micro-batch 0 from rank 0" in told[1]
    assert "could run 0F3 here, and hold one more activation" in told[0]
    end = simulate(gpipe(2, 2), EQUAL)
    assert "the step ends with 0B1 on rank 0" in tell_bubble(bubbles_of(end)[-1], end)


def test_a_performed_run_whose_rank_took_its_time_says_so():
    events = (
        Event(0, Action(0, "F", 0), 0.0, 10.0),
        Event(0, Action(0, "B", 0), 13.0, 33.0),
    )
    timeline = Timeline("slow", events)
    assert [step.gap for step in longest_path(timeline)] == [0.0, 3.0]
    assert "took its time" in tell_bubble(bubbles_of(timeline)[0], timeline)
    assert "3 ms between a rank's actions" in tell_path(longest_path(timeline))


def test_the_line_is_drawn_only_when_asked_for_and_goes_from_the_first_start_to_the_last_end():
    timelines = {"predicted": simulate(gpipe(4, 8), EQUAL)}
    assert "longest path" not in draw_timelines(timelines).svg
    svg = draw_timelines(timelines, longest_path=True).svg
    line = re.search(r'class="longest-path" d="([^"]*)"', svg)[1]
    assert line.startswith(f"M{LEFT}.0 ") and line.endswith("H806.0")
    assert len(re.findall("[ML]", line)) == len(longest_path(timelines["predicted"]))
    assert ">longest path</text>" in svg


def test_a_view_with_the_longest_path_has_its_reasons_and_one_without_has_none():
    from course.browser.explorer_page import START, view_of

    settings = view_of(START).settings
    assert View(settings).reasons == ""
    view = View(settings, longest_path=True)
    assert view.reasons == "".join(map(reasons, view.timelines.values()))
    assert view.picture.count('class="longest-path"') == 2


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("size", [(2, 4), (4, 8), (3, 9)])
def test_every_schedule_of_the_course_is_recognized_by_its_name(name, size):
    try:
        schedule = build_schedule(name, *size)
    except ValueError:
        return
    assert name in known_names(Schedule("mine", schedule.orders))


def test_gpipe_with_its_backwards_in_reverse_is_gpipe_and_another_order_has_no_name():
    reverse = "0F0,0F1,0F2,0B2,0B1,0B0\n1F0,1F1,1F2,1B2,1B1,1B0"
    assert known_names(from_csv(reverse)) == ["gpipe"]
    against = "0F0,0F1,0F2,0B2,0B1,0B0\n1F0,1F1,1F2,1B0,1B1,1B2"
    assert tell_name(from_csv(against)) == ""
    later = one_f_one_b(2, 4).orders[0], gpipe(2, 4).orders[1]
    assert known_names(Schedule("mixed", later)) == []


def test_where_two_schedules_are_the_same_both_are_named():
    told = tell_name(one_f_one_b(1, 3))
    assert told.startswith("You have built the naive schedule.") and "1F1B" in told
