"""Pairs of a forward and a backward hide all-to-alls, in the simulator and on real ranks."""

import json
import subprocess
import sys
from pathlib import Path

import benchmark_experts
import pytest
from further import first_of
from ranks import PRELOAD, run_on_ranks

from course.launch import run
from extensions.experts.turns import Pace, Turns
from lab.simulator import Costs, simulate
from pipeline.schedule import Action, ScheduleError, message_of
from pipeline.schedules import (
    build_schedule,
    dualpipe_v,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
)
from pipeline.schedules.legal import check_legal
from pipeline.schedules.pairs import in_pairs

PRELOAD.append("experts")
ROOT = Path(__file__).resolve().parents[1]
SMALL = "--layers 8 --dim 16 --heads 2 --seq-len 8 --batch-size 8 --microbatches 8 --device cpu"


def makespan(schedule, exchange, forward=12, backward=24):
    return simulate(schedule, Costs(forward, backward, exchange=(exchange, exchange))).makespan


# Predicted


@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_dualpipe_v_in_pairs_has_deepseeks_bubble_and_half_of_it_one_after_the_other(p):
    # deepseek-ai/DualPipe: (p - 1)(F&B + B - 3W), for F = W = 1 and B = 2.
    schedule = dualpipe_v(p, 2 * p)
    alone, pairs = (simulate(each, Costs(1, 2)) for each in (schedule, in_pairs(schedule)))
    assert pairs.makespan - pairs.ideal == (p - 1) * (3 + 2 - 3)
    assert 2 * (alone.makespan - alone.ideal) == (p - 1) * (3 + 2 - 3)


def test_a_pair_hides_an_exchange_that_is_shorter_than_the_other_actions_parts():
    forward, backward = Action(0, "F", 1), Action(0, "B", 0)
    # A forward of 12 is three parts of 4, a backward of 24 three of 8.
    assert Costs(12, 24).of_pair(forward, backward) == (36, 12)
    assert Costs(12, 24, exchange=(4, 4)).of_pair(forward, backward)[0] == 36
    # Dispatch and combine of 10 each: F to 4, B to 12, F from 14 to 18, B from 22 to 30, F from 30
    # to 34, B from 40 to 48.
    assert Costs(12, 24, exchange=(20, 20)).of_pair(forward, backward)[0] == 48


def test_each_layer_of_a_stage_cuts_an_action_twice_more():
    forward, backward = Action(0, "F", 1), Action(1, "B", 0)
    costs = Costs(12, 24, exchange=(20, 0), exchanges=[2, 4])
    # F to 4, B to 8.8, F from 14 to 18, B to 22.8, F from 28 to 32, the other three parts of B.
    assert costs.of_pair(forward, backward)[0] == pytest.approx(46.4)
    assert costs.of(forward) == 32 and costs.of(backward) == 24, "alone, the number does not matter"


@pytest.mark.parametrize("exchange", [0, 6, 18])
def test_without_pairs_an_exchange_makes_every_action_longer(exchange):
    for schedule in (one_f_one_b(4, 8), interleaved_1f1b(4, 8), gpipe(4, 8)):
        longer = simulate(schedule, Costs(12 + exchange, 24 + exchange))
        assert makespan(schedule, exchange) == longer.makespan


def test_the_three_schedules_of_the_lesson():
    more = interleaved_1f1b(4, 8, 2, more=1)
    found = {}
    for exchange in (5, 15):
        found[exchange] = [
            round(makespan(one_f_one_b(4, 8), 2 * exchange, 20, 40)),
            round(makespan(in_pairs(more), exchange, 10, 20)),
            round(makespan(in_pairs(dualpipe_v(4, 8)), exchange, 10, 20)),
        ]
    assert found == {5: [880, 650, 635], 15: [1320, 902, 917]}
    assert simulate(more, Costs()).peak_held_per_rank == [12, 10, 8, 6]
    assert simulate(dualpipe_v(4, 8), Costs()).peak_held_per_rank == [9, 9, 9, 9]


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("v", [2, 3])
def test_with_one_more_forward_interleaved_1f1b_is_legal_and_runs_in_pairs(p, v):
    schedule = check_legal(interleaved_1f1b(p, 4 * p, v, more=1))
    pairs = in_pairs(schedule)
    forwards = sum(len(order) for order in schedule.orders) // 2
    warm_up = sum((v - 1) * p + 2 * (p - 1 - rank) + 1 for rank in range(p))
    assert len(pairs.partners) == forwards - warm_up  # every forward of the steady phase
    assert pairs.orders == schedule.orders


def test_pairs_that_wait_for_one_another_are_a_deadlock():
    with pytest.raises(ScheduleError, match="deadlock"):
        in_pairs(interleaved_1f1b(4, 4, 2, more=1))
    with pytest.raises(ScheduleError, match="deadlock"):
        in_pairs(gpipe(2, 4))  # a rank's last forward with its first backward
    with pytest.raises(ScheduleError, match="0 or 1"):
        interleaved_1f1b(4, 8, 2, more=2)


def test_a_forward_and_its_own_backward_are_no_pair():
    last = len(one_f_one_b(4, 8).orders) - 1
    assert not any(a.stage == last for a in in_pairs(one_f_one_b(4, 8)).partners)
    assert not in_pairs(gpipe(2, 1)).partners


@pytest.mark.parametrize("name", ["dualpipe-v", "interleaved-1f1b"])
def test_the_messages_of_a_pair_have_the_place_of_its_end(name):
    options = {"more": 1} if name == "interleaved-1f1b" else {}
    schedule = in_pairs(build_schedule(name, 4, 16, **options))
    for forward, backward in schedule.partners.items():
        assert schedule.places[forward] == schedule.places[backward]
    made = {message_of(action): place for action, place in schedule.places.items()}
    for rank, action, needs in schedule.playable_order:
        elsewhere = [
            need for need in needs if schedule.rank_of(need.stage, need.microbatch) != rank
        ]
        assert all(made[need] < schedule.places[action] for need in elsewhere)


# The work of each micro-batch


def test_the_work_of_a_micro_batch_multiplies_all_its_costs():
    equal, double = one_f_one_b(3, 4), Costs(1, 2, work=[2] * 4)
    assert simulate(equal, double).makespan == 2 * simulate(equal, Costs(1, 2)).makespan
    costs = Costs(1, 4, 1, recompute=1, exchange=(3, 5), work=[1, 2])
    assert [costs.of(Action(0, kind, 1)) for kind in "FBIW"] == [8, 20, 18, 2]
    timeline = simulate(gpipe(2, 2), Costs(1, 2, work=[3, 1]))
    assert timeline.makespan == 3 + 3 + 1 + 6 + 6 + 2
    assert timeline.busy_per_rank == [12, 12]


@pytest.mark.parametrize("work", ["3,1", "1,2,3,x", "1,2,3,0"])
def test_predict_rejects_work_that_does_not_fit_in_one_sentence(work):
    command = [sys.executable, "source_code/predict.py", "1f1b", "--microbatches", "4"]
    ended = subprocess.run(
        [*command, "--work", work], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "--work" in ended.stderr


def test_predict_takes_the_work_of_each_micro_batch():
    command = [sys.executable, "source_code/predict.py", "1f1b", "--json", "--work"]
    ended = subprocess.run(
        [*command, "3,1,1,1,1,1,1,1"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert json.loads(ended.stdout)["makespan"] == 57


# Performed


def test_two_threads_change_at_fixed_points_and_errors_arrive():
    turns, seen = Turns(), []

    def parts(name, count):
        for number in range(count):
            seen.append(f"{name}{number}")
            turns.change()

    for _ in range(3):
        seen.clear()
        turns.run_both(lambda: parts("a", 2), lambda: parts("b", 4))
        assert seen == ["a0", "b0", "a1", "b1", "b2", "b3"]
    for first, second in ((lambda: 1 / 0, lambda: parts("b", 2)), (list, lambda: 1 / 0)):
        with pytest.raises(ZeroDivisionError):
            turns.run_both(first, second)
    turns.change()  # without a pair


def test_the_parts_of_an_action_and_its_all_to_alls_add_up_to_its_costs_for_any_number_of_them():
    costs = Costs(12, 24, exchange=(20, 8), exchanges=[2, 4])
    for action in (Action(0, "F", 1), Action(1, "F", 1), Action(1, "B", 0)):
        pace, number = Pace(costs), costs.exchanges_of(action)
        pace.begin(action)
        assert 1000 * pace.own.part * (number + 1) == pytest.approx(costs.computing(action))
        assert 1000 * pace.own.exchange * number == pytest.approx(costs.exchange_of(action))


class LateClock:
    """In place of the module `time`: every sleep ends late, and looking at the clock takes time."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        self.now += 1e-5
        return self.now

    def sleep(self, seconds):
        self.now += seconds + 4e-4


def test_late_sleeps_do_not_add_up_in_an_action_or_a_pair(monkeypatch):
    clock, turns = LateClock(), Turns()
    monkeypatch.setattr("extensions.experts.turns.time", clock)
    costs = Costs(12, 24, exchange=(20, 8), exchanges=[6, 6])
    forward, backward = Action(0, "F", 1), Action(1, "B", 0)
    pace = Pace(costs)

    def perform(action):
        pace.begin(action)
        for _ in range(costs.exchanges_of(action)):
            pace.end_part()
            turns.change()
            pace.arrive()
        pace.end_part()

    def lateness(wanted, *actions):
        pace.restart()
        start = pace.free
        if len(actions) == 2:
            turns.run_both(*(lambda one=one: perform(one) for one in actions))
        else:
            perform(*actions)
        return 1000 * (clock.now - start) - wanted

    whole, _ = costs.of_pair(forward, backward)
    assert 0 <= lateness(whole, forward, backward) < 0.5
    assert 0 <= lateness(costs.of(forward), forward) < 0.5


def parts_of(rank, flags):
    """[(stages' all-to-alls by the costs, parts performed, all-to-alls performed)] of each action."""
    from unittest import mock

    import experts

    seen, methods = [], (Pace.begin, Pace.end_part, Pace.arrive)

    def begin(pace, action):
        pace.own.counts = [pace.costs.exchanges_of(action), 0, 0]
        seen.append(pace.own.counts)
        methods[0](pace, action)

    def end_part(pace):
        pace.own.counts[1] += 1
        methods[1](pace)

    def arrive(pace):
        pace.own.counts[2] += 1
        methods[2](pace)

    with (
        mock.patch.multiple(Pace, begin=begin, end_part=end_part, arrive=arrive),
        mock.patch("sys.argv", f"experts.py {SMALL} {flags} --steps 1".split()),
    ):
        assert experts.main() == 0
    return seen


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        ("--schedule 1f1b", {2}),
        ("--schedule 1f1b --layers 6", {1, 2}),
        ("--schedule interleaved-1f1b --option more=1 --pairs --layers 12", {1, 2}),
    ],
)
def test_a_stage_of_n_layers_waits_2_n_times_in_each_action_as_its_costs_say(flags, layers):
    ranks = run_on_ranks(parts_of, 4, f"{flags} --pace 1 2 --exchange 1 1")
    assert {counts[0] for seen in ranks for counts in seen} == {2 * number for number in layers}
    for seen in ranks:
        assert len(seen) >= 16, "eight forwards and eight backwards"
        assert all(counts == [counts[0], counts[0] + 1, counts[0]] for counts in seen)


def all_to_alls_of(rank, flags):
    """The (kind of action, all-to-all) of this rank in the order of their starts and ends."""
    from unittest import mock

    import experts

    from extensions.experts.expert_group import ExpertGroup

    seen, start = [], ExpertGroup.start

    def noted(group, rows, sent, received, what):
        wait = start(group, rows, sent, received, what)
        if what == "counts":
            return wait
        kind = group.turns.own.number if any(group.turns.running) else None
        seen.append(("start", kind))

        def waited():
            seen.append(("end", kind))
            return wait()

        return waited

    with (
        mock.patch.object(ExpertGroup, "start", noted),
        mock.patch("sys.argv", f"experts.py {SMALL} {flags} --steps 1".split()),
    ):
        assert experts.main() == 0
    return seen


def test_in_a_pair_an_all_to_all_ends_after_the_other_action_has_started_its_own():
    flags = "--schedule dualpipe-v --pairs --pace 1 2 --exchange 1 1"
    for rank, seen in enumerate(run_on_ranks(all_to_alls_of, 4, flags, timeout=120)):
        pairs = len([a for a in in_pairs(dualpipe_v(4, 8)).partners if a.stage in (rank, 7 - rank)])
        within = [event for event in seen if event[1] is not None]
        assert len(within) == 8 * pairs  # two all-to-alls of each action, started and ended
        assert within[:8] == [
            ("start", 0), ("start", 1), ("end", 0), ("start", 0),
            ("end", 1), ("start", 1), ("end", 0), ("end", 1),
        ]  # fmt: skip
        assert within == within[:8] * pairs


PAIRED = [
    "--schedule dualpipe-v",
    "--schedule interleaved-1f1b --option more=1",
    "--schedule dualpipe-v --replicas 2 --microbatches 4 --padding --rehearse strict",
    "--schedule interleaved-1f1b --option more=1 --replicas 2 --microbatches 4 --rehearse eager",
    "--schedule interleaved-1f1b --option more=1 --replicas 2 --microbatches 4 --rehearse strict",
]


@pytest.mark.parametrize("flags", first_of(PAIRED, 1))
def test_losses_in_pairs_equal_one_process_to_1e_12(flags):
    pace = "--pace 1 2 --exchange 1 1 --pairs --steps 4 --verify"
    output = run(f"experts.py {SMALL} {flags} {pace}", 4, warm=True, show=False, limit=120).output
    assert "as promised" in output
    assert "tokens of each expert: as in one process" in output
    assert "peak memory" in output and "held for backwards" not in output  # nothing counts them


def test_the_benchmark_finds_schedules_that_are_ordered_otherwise_than_predicted():
    assert benchmark_experts.misordered({"a": (10, 20), "b": (9, 30)}) == [("a", "b")]
    assert not benchmark_experts.misordered({"a": (10, 20), "b": (9, 21)})  # too close
    assert not benchmark_experts.misordered({"a": (10, 20), "b": (15, 30)})
