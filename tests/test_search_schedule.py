"""search_schedule.py finds what trying all orders finds, and says how far it may be from the best."""

import json
import random
import re
import sys
from unittest import mock

import certificates
import pytest
import search_schedule
from test_exact_search import all_orders, fits, played

from course.launch import ROOT, run
from lab.simulator import Costs, simulate
from lab.timeline import Event, Timeline, to_chrome_trace
from pipeline.schedule import Action
from pipeline.schedules.text_form import from_csv
from planning.bounded_search import Question, on_grid, search, unit_of

PAGE = (ROOT / "docs" / "certificates.md").read_text()


def tried(question):
    """The shortest makespan of all orders that fit, or None."""
    orders = all_orders(question.rank_of_stage, question.num_microbatches, question.split)
    found = [
        timeline.makespan
        for timeline in played(orders, question.costs)
        if fits(timeline, question.room, question.until_weight)
    ]
    return min(found, default=None)


@pytest.mark.parametrize(("m", "room", "split"), [
    (2, 1, False), (2, 2, False), (2, 1, True), (2, 2, True), (2, 3, True), (3, 2, False),
])  # fmt: skip
def test_a_certificate_is_what_trying_all_orders_finds(m, room, split):
    question = certificates.question_in_line(2, m, room, split)
    answer = search(question)
    assert answer.proven and answer.makespan == tried(question)


@pytest.mark.parametrize("room", [2, 3, 4])
def test_a_certificate_of_a_v_is_what_trying_all_orders_finds(room):
    question = certificates.question_in_v(2, 1, room)
    assert search(question).makespan == tried(question) == 9


@pytest.mark.parametrize("seed", range(12))
def test_with_measured_costs_the_bound_is_below_the_best_of_all_orders_and_the_answer_close(seed):
    draw = random.Random(seed)
    stages = [draw.uniform(1, 5) for _ in range(6)]
    costs = Costs(stages[:2], [4 * time for time in stages[2:4]], stages[4:], {})
    costs = Costs(costs.forward, [b + w for b, w in zip(costs.backward, stages[4:])], stages[4:],
                  {(0, 1): draw.random(), (1, 0): draw.random()})  # fmt: skip
    question = Question((0, 1), 2, costs, True, draw.choice([None, (2, 1)]))
    rounded, unit = on_grid(question)
    assert all(unit * low <= true for low, true in zip(rounded.forward, costs.forward))
    answer, best = search(question), tried(question)
    assert answer.bound <= best * (1 + 1e-9) and best <= answer.makespan * (1 + 1e-9)
    assert answer.makespan == pytest.approx(simulate(answer.schedule, costs).makespan)
    assert answer.distance < 0.06


def test_costs_of_a_common_unit_are_not_rounded():
    assert unit_of([10, 20, 30]) == 10
    assert unit_of([0.5, 1.25, 2]) == 0.25
    assert unit_of([1.0001, 3.00007]) == pytest.approx(3.00007 / 60)


@pytest.mark.parametrize("heading", re.findall(r"^## (2 ranks.*|3 ranks, whole.*)$", PAGE, re.M))
def test_the_page_of_certificates_is_what_the_search_says(heading):
    p = int(heading[0])
    split = "split" in heading
    table = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    rooms = [int(room) for room in re.findall(r"room (\d+) \|", table)]
    for m in range(1, 4):
        cells = re.search(rf"^\| {m} \|(.*)\|$", table, re.M)[1].split("|")
        if "V" in heading:
            questions = [certificates.question_in_v(p, m, room) for room in rooms]
        else:
            questions = [certificates.question_in_line(p, m, room, split) for room in rooms]
        assert certificates.row(questions, 20) == [cell.strip() for cell in cells[: len(rooms)]]


def test_the_page_has_every_pipeline_of_up_to_4_ranks_and_8_micro_batches():
    headings = re.findall(r"^## (\d) ranks, (\w+)", PAGE, re.M)
    assert [int(p) for p, _ in headings] == [2, 2, 2, 3, 3, 3, 4, 4, 4]
    assert len(re.findall(r"^\| [1-8] \|", PAGE, re.M)) == 9 * 8
    rows = PAGE.split("## 4 ranks, split")[1]
    # The paper's 27 units of ZB-H1 and ZB-H2 for 4 ranks and 8 micro-batches.
    assert re.search(r"^\| 8 \|.*\*\*27\*\*<br>ZB-H1", rows, re.M)


# The script.


def call(flags, capsys):
    """(exit status, what is printed)."""
    with mock.patch.object(sys, "argv", ["search_schedule.py", *flags.split()]):
        with mock.patch("guard.one_sentence.keep_running_unheard"):
            try:
                status = search_schedule.main()
            except SystemExit as end:
                status = end.code
    return status, capsys.readouterr()


UNEVEN = "--ranks 3 --microbatches 4 --forward 4,9,4 --backward 8,18,8 --hop 1,2=10 --seconds 5"


def test_uneven_stages_and_a_slow_hop_have_an_order_that_beats_every_name(capsys):
    _, printed = call(f"{UNEVEN} --json", capsys)
    found = json.loads(printed.out)
    assert found["proven"] and found["distance_from_bound"] == 0
    assert found["makespan"] < found["named_schedules"]["1f1b"]
    schedule = from_csv("\n".join(found["schedule"]))
    costs = Costs([4, 9, 4], [8, 18, 8], None, {(1, 2): 10, (2, 1): 10})
    assert simulate(schedule, costs).makespan == found["makespan"]


def test_in_words_it_says_what_is_proven_and_what_a_name_would_cost(capsys):
    status, printed = call(f"{UNEVEN} --room 3,2,1", capsys)
    assert status == 0
    assert "proven: no schedule is shorter" in printed.out and "1F1B, +" in printed.out


def test_a_timeline_whose_stage_is_on_two_ranks_is_rejected_in_one_sentence(capsys, tmp_path):
    file = tmp_path / "run.json"
    events = Event(0, Action(0, "F", 0), 0, 1), Event(1, Action(0, "B", 0), 1, 2)
    file.write_text(to_chrome_trace(Timeline("x", events)))
    status, printed = call(f"--timeline {file}", capsys)
    assert status == 2
    assert f"{file} is not that of one synchronous training step; name another" in printed.err


def test_a_timeline_with_too_many_micro_batches_is_named_with_their_number(capsys, tmp_path):
    file = tmp_path / "run.json"
    rows = [(Action(s, kind, k), s) for s in (0, 1) for kind in "FB" for k in range(900)]
    events = (Event(rank, action, at, at + 1) for at, (action, rank) in enumerate(rows))
    file.write_text(to_chrome_trace(Timeline("x", tuple(events))))
    status, printed = call(f"--timeline {file}", capsys)
    assert status == 2 and f"--timeline {file}: " in printed.err and " 900 " in printed.err


def test_ranks_and_their_times_may_have_blanks_around_them():
    assert search_schedule.hop("2, 1 = 10") == search_schedule.hop("1,2=10") == ((1, 2), 10.0)


@pytest.mark.processes
def test_what_is_found_trains_to_the_losses_of_one_process(capsys, tmp_path):
    file = ROOT / "build" / "test_search.csv"
    file.parent.mkdir(exist_ok=True)
    timeline = tmp_path / "run.json"
    sizes = "--layers 4 --dim 16 --heads 2 --kv-heads 1 --seq-len 8 --steps 2 --batch-size 8"
    run(
        f"train.py --schedule zb-h1 --microbatches 4 {sizes} --timeline {timeline}",
        ranks=2,
        warm=True,
        show=False,
    )
    status, _ = call(f"--timeline {timeline} --seconds 3 --csv {file}", capsys)
    assert status == 0
    trained = run(f"train.py {file} {sizes} --verify", ranks=2, warm=True, show=False)
    assert "as promised" in trained.output
    file.unlink()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--forward 1,2", "--forward has 2 values; give one, or 4"),
        ("--room 0", "--room"),
        ("--hop 0-1", "must be A,B=T with two ranks"),
        ("--hop 0,\u0661=2", "must be A,B=T with two ranks"),
        (f"--hop {'9' * 5000},1=2", "must be A,B=T with two ranks"),
        ("--hop 0,7=2", "--hop 0,7: use two of the ranks 0 to 3"),
        ("--placement v", "--placement v has two stages per rank; add --chunks 2"),
        ("--split --backward-weight 2", "--backward-weight must be less than --backward"),
        ("--backward-weight 1", "add --split"),
        ("--ranks 64 --microbatches 64", "are too many actions to search"),
        ("--ranks 100000", "are too many actions to search"),
        ("--forward 1e308 --backward 1e308", "--forward: must be 1e-15 to"),
        ("--transfer 1e308", "--transfer: must be 1e-15 to"),
        ("--hop 0,1=1e308", "--hop: must be 1e-15 to"),
        ("--timeline nowhere.json", "--timeline nowhere.json"),
        ("--ranks 2 --chunks 2 --room 1 --seconds 1", "--room leaves no schedule that can run"),
    ],
)
def test_bad_flags_are_rejected_in_one_sentence(flags, sentence, capsys):
    status, printed = call(flags, capsys)
    assert status == 2 and sentence in printed.err and printed.err.count("\n") == 1
