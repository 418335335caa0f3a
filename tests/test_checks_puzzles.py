"""The check of lesson 12 knows a stub, a solution, and typical wrong answers of each puzzle."""

import numpy
import pytest

from course.checks import lesson_12
from course.checks.answer import NOT_ATTEMPTED
from course.checks.puzzles import PUZZLES
from lab.variables import DELAY_VARIABLE, PRETENDED_VARIABLE
from pipeline.schedule import Action, Schedule
from pipeline.schedules import (
    dualpipe_v,
    gpipe,
    interleaved_1f1b,
    looped_bfs,
    naive,
    one_f_one_b,
    zb_h1,
    zb_h2,
    zb_v,
)
from pipeline.schedules.text_form import to_csv

DEADLOCK = [
    "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3",
    "1F0,1B0,1F1,1F2,1F3,1B1,1B2,1B3",
]
ROOM_FOR_TWO = [
    "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3",
    "1F0,1F1,1B0,1B1,1F2,1F3,1B2,1B3",
    "2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3",
]


def rows_of(schedule):
    return to_csv(schedule).split()


def split_at_once(schedule):
    """Every backward as I and, right behind it, W."""
    orders = []
    for order in schedule.orders:
        split = []
        for stage, kind, microbatch in order:
            halves = "IW" if kind == "B" else "F"
            split += [Action(stage, half, microbatch) for half in halves]
        orders.append(tuple(split))
    return Schedule("split", tuple(orders))


def changed(rows, before, after):
    assert any(before in row for row in rows)
    return [row.replace(before, after) for row in rows]


def answer_to(number, capsys, answer):
    lesson_12.puzzle(number, answer)
    return capsys.readouterr().out.strip()


SOLUTIONS = {
    1: rows_of(naive(2, 2)),
    2: rows_of(gpipe(3, 4)),
    3: rows_of(one_f_one_b(2, 4)),
    4: rows_of(one_f_one_b(3, 4)),
    5: ROOM_FOR_TWO,
    6: rows_of(interleaved_1f1b(2, 4)),
    7: rows_of(split_at_once(one_f_one_b(3, 4))),
    8: lambda num_ranks, num_microbatches: rows_of(zb_h1(num_ranks, num_microbatches)),
    9: rows_of(zb_h2(2, 4)),
    10: rows_of(zb_v(2, 4)),
}


@pytest.mark.parametrize("number", PUZZLES)
@pytest.mark.parametrize("stub", [..., lambda num_ranks, num_microbatches: ...])
def test_an_untouched_stub_is_not_attempted_yet_and_not_performed(number, stub, capsys):
    assert lesson_12.puzzle(number, stub) is None
    assert lesson_12.perform(number, stub) is None
    assert capsys.readouterr().out.splitlines() == [NOT_ATTEMPTED] * 2


@pytest.mark.parametrize("number", SOLUTIONS)
def test_a_solution_is_right_and_drawn_with_its_idle_time_in_words(number, capsys):
    picture = lesson_12.puzzle(number, SOLUTIONS[number])
    assert capsys.readouterr().out.startswith("Right: legal; ")
    assert "idle: rank 0 " in picture.alt
    assert 'role="img" aria-label="Your schedule' in picture.svg


@pytest.mark.parametrize("rows", [lambda: iter(SOLUTIONS[2]), lambda: numpy.array(SOLUTIONS[2])])
def test_the_rows_of_a_function_may_be_in_an_array_or_come_from_a_generator(rows, capsys):
    assert answer_to(2, capsys, lambda num_ranks, num_microbatches: rows()).startswith("Right: ")


@pytest.mark.parametrize(
    "rows",
    [
        "\n".join(SOLUTIONS[2]),
        "\n\n".join(SOLUTIONS[2]),
        [row.split(",") for row in SOLUTIONS[2]],
        gpipe(3, 4).orders,
    ],
)
def test_the_rows_may_be_one_text_or_lists_of_actions(rows, capsys):
    assert answer_to(2, capsys, rows).startswith("Right: ")


@pytest.mark.parametrize(
    ("number", "answer", "sentence"),
    [
        # 1, One at a time
        (1, ["0F0,0B0,0F1,0B1", "1B0,1F0,1F1,1B1"], "rank 1 runs the backward of micro-batch 0 on"),
        (1, rows_of(gpipe(2, 2)), "rank 0 holds 2 micro-batches, the puzzle allows 1"),
        (1, ["0F0,0B0,0F1,0B1", "1F0,1F1,1B0,1B1"], "deadlock: rank 0 cannot take step 1 (0B0)"),
        # 2, All forwards first
        (2, rows_of(naive(3, 4)), "720 ms, the target is 360, which is provably best"),
        (2, rows_of(gpipe(3, 5)), "your rows hold 5 micro-batches, the puzzle has 4"),
        (2, rows_of(gpipe(3, 1)), "your rows hold 1 micro-batch, the puzzle has 4"),
        (2, rows_of(gpipe(1, 4)), "1 row, and the puzzle has 3 ranks, a row for each"),
        (2, rows_of(gpipe(2, 4)), "2 rows, and the puzzle has 3 ranks, a row for each"),
        # 3, A deadlock
        (3, DEADLOCK, "deadlock: rank 0 cannot take step 4 (0B1)"),
        (3, changed(DEADLOCK, "1F3,1B1", "1B1,1F3"), "400 ms, the target is 300"),
        (3, rows_of(gpipe(2, 4)), "rank 0 holds 4 micro-batches, the puzzle allows 2"),
        # 4, As fast, with less in hand
        (4, rows_of(gpipe(3, 4)), "rank 0 holds 4 micro-batches, the puzzle allows 3"),
        (4, rows_of(naive(3, 4)), "the longest wait is rank 0's, 120 ms before 0B0, for the"),
        (4, rows_of(zb_h1(3, 4)), "rank 0, step 3 (0I0): this puzzle has only F, B"),
        # 5, Room for two
        (5, rows_of(one_f_one_b(3, 4)), "in the room that the puzzle gives 420 is provably best"),
        (5, changed(ROOM_FOR_TWO, "1B0,1B1,1F2", "1B0,1F2,1B1"), "480 ms, the target is 420"),
        (
            5,
            changed(ROOM_FOR_TWO, "1F1,1B0", "1B0,1F1"),
            "ms, the target is 420, which is provably",
        ),
        # 6, Two stages per rank
        (6, rows_of(looped_bfs(2, 4)), "rank 0 holds 8 activations (one for each stage and micro-"),
        (6, rows_of(one_f_one_b(2, 4)), "your rows hold 2 stages, the puzzle has 4"),
        (6, rows_of(zb_v(2, 4)), "in this puzzle stage 3 is rank 1's"),
        # 7, Halves, in 1F1B's own room
        (7, rows_of(one_f_one_b(3, 4)), "360 ms, the target is 320, which is provably best"),
        (
            7,
            rows_of(zb_h1(3, 4)),
            "rank 1 holds 3 micro-batches until their W, the puzzle allows 2",
        ),
        (7, changed(SOLUTIONS[7], "1W0,", ""), "rank 1 never runs the backward for the weights of"),
        # 8, The bubble of ZB-H1
        (8, split_at_once(one_f_one_b(4, 8)), "600 ms, the target is 540, which is provably best"),
        (8, zb_h2(4, 8), "rank 0 holds 7 micro-batches until their W, the puzzle allows 4"),
        (8, lambda num_ranks: ["0F0"], "raised TypeError"),
        # 9, No idle time in between
        (9, rows_of(zb_h1(2, 4)), "rank 0 is idle for 20 ms between its first action and its last"),
        (9, rows_of(one_f_one_b(2, 4)), "rank 0 is idle for 60 ms"),
        (9, changed(rows_of(zb_h2(2, 4)), "0F2,0I0", "0F2,0F3,0I0"), "twice, at steps"),
        # 10, Both ends on one rank
        (10, rows_of(dualpipe_v(2, 4)), "rank 0 is idle for 10 ms between its first action and"),
        (10, rows_of(interleaved_1f1b(2, 4)), "in this puzzle stage 2 is rank 1's"),
        (10, changed(rows_of(zb_v(2, 4)), "3W0,3F1", "3F1,3W0"), "rank 0 holds 5 activations"),
        # 11, Two nodes
        (
            11,
            one_f_one_b(4, 16),
            "1860 ms, the target is 1200; 1150 is the best known, and nothing",
        ),
        (11, zb_h2(4, 16), "in the room that the puzzle gives 1150 is the best known"),
        (11, zb_h1(4, 16), "the longest wait is rank 0's"),
    ],
)
def test_a_wrong_answer_gets_its_sentence(number, answer, sentence, capsys):
    said = answer_to(number, capsys, answer)
    assert said.startswith("Not yet: ") and sentence in said


@pytest.mark.parametrize("answer", [17, ["0F0", 3], "0F0,zero", lambda p, m: 5, iter(["0F0"])])
def test_what_is_no_schedule_gets_a_sentence_and_no_traceback(answer, capsys):
    assert answer_to(1, capsys, answer).startswith("Not yet: ")


@pytest.mark.parametrize("ask", [lesson_12.puzzle, lesson_12.perform])
def test_a_puzzle_that_is_not_there_gets_a_sentence(ask, capsys):
    assert ask(12, ["0F0,0B0", "1F0,1B0"]) is None
    assert capsys.readouterr().out == "Not yet: there is no puzzle 12; they are 1 to 11\n"


def test_what_beats_the_best_known_is_told_so(capsys, monkeypatch):
    # As if less were known: the best known of the open puzzle is a little more.
    puzzle = PUZZLES[11]
    worse = type(puzzle)(**{**vars(puzzle), "target": 1700.0, "best": 1690.0})
    monkeypatch.setitem(PUZZLES, 11, worse)
    said = answer_to(11, capsys, zb_h1(4, 16))
    assert "1670 ms, which is better than the best known, 1690; nothing below 1040" in said


def test_an_illegal_schedule_is_not_performed(capsys):
    assert lesson_12.perform(3, DEADLOCK) is None
    assert capsys.readouterr().out.startswith("Not yet: deadlock: ")


@pytest.mark.parametrize("number", [3, 10, 11])
def test_a_schedule_is_performed_and_has_the_losses_of_one_process(number, capsys, monkeypatch):
    for name in (DELAY_VARIABLE, PRETENDED_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    answer = SOLUTIONS.get(number, zb_h1(4, 16))
    picture = lesson_12.perform(number, answer)
    printed = capsys.readouterr().out
    assert "largest difference from one process" in printed
    assert ", as promised" in printed
    assert "predicted" in picture.svg and "performed" in picture.svg
