"""What the course's Python answers a page: the explorer, the exercises and the puzzles, without a browser."""

import json
import re

import pytest

from course.browser.explorer_page import CHOICES, OWN, SLIDERS, START
from course.browser.page import answer
from course.browser.puzzle_board import draw_board
from course.checks.puzzles import PUZZLES
from pipeline.schedule import Action
from pipeline.schedules import gpipe, one_f_one_b, zb_h1
from pipeline.schedules.text_form import to_csv

OWN_GPIPE = """
def own_gpipe(num_ranks, num_microbatches):
    return [
        ",".join(f"{rank}{kind}{k}" for kind in "FB" for k in range(num_microbatches))
        for rank in range(num_ranks)
    ]
"""


def ask(do, **arguments):
    return json.loads(answer(json.dumps({"do": do, **arguments})))


def explored(longest_path=False, table=False, **changes):
    return ask("explore", settings=START | changes, longest_path=longest_path, table=table)


def checked(code, call="check.own_gpipe(own_gpipe)", lesson="lesson_02"):
    return ask("check", lesson=lesson, call=call, code=code)


def test_the_start_is_among_what_can_be_chosen():
    for name, choices in CHOICES.items():
        assert START[name] in choices
    for name, (_, least, most, _) in SLIDERS.items():
        assert least <= START[name] <= most
    assert START.keys() == {*CHOICES, *SLIDERS, "rows"}


def test_the_explorer_answers_with_the_picture_its_words_and_its_numbers():
    shown = explored(table=True)
    assert shown["alt"].startswith("predicted: gpipe, 4 ranks, 330 ms, 27.3% idle")
    assert shown["svg"].count("<rect") > 2 * 2 * 4 * 8
    assert "330 ms" in shown["figures"] and shown["times"][-1] == 330
    assert shown["table"].count("<tr>") == 2 * (1 + 2 * 4 * 8)
    assert shown["reasons"] == "" and shown["disabled"] == ["chunks", "weight"]


def test_a_page_can_spread_the_work_unevenly_over_the_micro_batches():
    assert explored()["times"][-1] == 330
    assert explored(work="one long, first")["times"][-1] == pytest.approx(456)


def test_the_longest_path_comes_with_the_reasons_of_both_timelines():
    shown = explored(longest_path=True)
    assert shown["svg"].count('class="longest-path"') == 2
    assert shown["reasons"].count("The longest path takes 330 ms") == 2


def test_what_a_generator_rejects_is_a_sentence_and_so_are_rows_that_are_no_schedule():
    assert "micro-batches" in explored(schedule="dualpipe-v", microbatches=1)["refusal"]
    assert "is not an action" in explored(schedule=OWN, rows="0F0,nonsense")["refusal"]
    assert "deadlock" in explored(schedule=OWN, rows="0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1")["refusal"]


def test_own_rows_are_drawn_and_need_no_sliders_for_their_size():
    shown = explored(schedule=OWN, rows=to_csv(one_f_one_b(3, 4)), compare="nothing")
    assert shown["alt"].startswith("predicted: yours, 3 ranks")
    assert {"ranks", "microbatches"} <= set(shown["disabled"])


def test_a_place_of_the_picture_tells_its_block_and_the_cursor_says_what_holds():
    first = ask("point", settings=START, x=70, y=40)
    assert first == {
        "story": ["forward of micro-batch 0 on stage 0, rank 0, 0 to 10 ms", "needs no message"],
        "time": 0,
    }
    assert ask("point", settings=START, x=300, y=40) == {
        "story": [],
        "time": pytest.approx(105.6, 0.1),
    }
    assert ask("point", settings=START, x=1, y=1) == {"story": [], "time": None}
    moment = ask("moment", settings=START, time=20)
    assert moment["now"] == "at 20 ms" and "gpipe at 20 ms" in moment["html"]
    assert moment["svg"].startswith("<svg")


def test_the_own_check_of_the_lesson_answers_and_a_right_schedule_is_drawn_and_named():
    stub = checked("def own_gpipe(num_ranks, num_microbatches):\n    rows = ...\n    return rows\n")
    assert stub == {
        "said": "Not attempted yet: replace the ... above, then check.\n",
        "right": False,
    }
    wrong = checked(OWN_GPIPE.replace("range(num_ranks)", "range(1)"))
    assert (
        wrong["said"].startswith("Not yet: 2 ranks, 2 micro-batches: 1 row,") and "svg" not in wrong
    )
    right = checked(OWN_GPIPE)
    assert right["right"] and right["name"] == "You have built GPipe."
    assert "longest-path" in right["svg"] and "0B0 waits for" in right["reasons"]


@pytest.mark.parametrize(
    ("lesson", "call", "code"),
    [
        ("lesson_02", "check.own_gpipe(own_gpipe)", f"own_gpipe = lambda p, m: {rows}")
        for rows in ("gpipe(p, m)", "to_csv(gpipe(p, m))", "gpipe(p, m).orders")
    ]
    + [
        ("lesson_09", "check.fill_the_bubble(rows)", f"rows = {rows}")
        for rows in ("zb_h1(3, 4)", "to_csv(zb_h1(3, 4))", "zb_h1(3, 4).orders")
    ],
)
def test_right_rows_are_drawn_in_any_form(lesson, call, code):
    imports = "from pipeline.schedules import gpipe, zb_h1\n"
    imports += "from pipeline.schedules.text_form import to_csv\n"
    right = checked(imports + code, call, lesson)
    assert right["right"] and "longest-path" in right["svg"]


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("x = (1\n", "Not yet: line 1: '(' was never closed"),
        ("x = 1\ny = x / 0\n", "Not yet: line 2: ZeroDivisionError: division by zero"),
        ("def another(): ...\n", "Not yet: NameError: name 'own_gpipe' is not defined"),
        ("own_gpipe = 3\n", "this exercise asks for a function"),
    ],
)
def test_code_that_does_not_run_gets_a_sentence_with_its_line(code, sentence):
    answered = checked(code)
    assert sentence in answered["said"] and not answered["right"]


def solved(number, schedule):
    return ask("solve", number=number, rows=to_csv(schedule).split())


def test_a_finished_puzzle_has_its_longest_path_its_bubbles_and_the_name_of_its_schedule():
    finished = solved(8, zb_h1(4, 8))
    assert finished["right"] and finished["said"].startswith("Right: legal; 540 ms")
    assert finished["name"] == "You have built ZB-H1."
    assert "longest-path" in finished["svg"] and "waits for" in finished["reasons"]


def test_an_order_that_no_paper_has_gets_no_name():
    rows = [
        "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3",
        "1F0,1F1,1B0,1B1,1F2,1F3,1B2,1B3",
        "2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3",
    ]
    finished = ask("solve", number=5, rows=rows)
    assert finished["right"] and finished["name"] == ""


def test_a_wrong_answer_is_drawn_without_the_longest_path():
    wrong = solved(4, gpipe(3, 4))
    assert "rank 0 holds 4" in wrong["said"] and not wrong["right"]
    assert "<svg" in wrong["svg"] and "longest-path" not in wrong["svg"]


def test_rows_that_have_only_begun_are_drawn_as_far_as_they_can_run_on_the_axis_of_the_puzzle():
    nothing = ask("solve", number=4, rows=["", "", ""])
    assert nothing["said"] == "Not attempted yet." and not nothing["right"]
    begun = ask("solve", number=4, rows=["0F0,0F1,0B0", "1F0", ""])
    waits = "rank 0 waits with 0B0 for the gradient of micro-batch 0 from stage 1"
    assert begun["said"] == f"20 actions to go; {waits}."
    assert begun["alt"] == f"yours so far: 40 of 360 ms, 3 ranks; {waits}"
    for shown in (nothing, begun):
        svg = shown["svg"]
        assert "rank 2" in svg and ">target<" in svg, "a rank without actions is there, too"
        assert ">350<" in svg, "the axis ends at the target"
    assert begun["svg"].count('stroke-dasharray="4 3"') == 1, "0B0 cannot start"


def test_a_deadlock_is_drawn_as_two_stuck_actions_with_an_arrow_to_each_other():
    rows = ["0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3", "1B0,1F0,1F1,1B1,1F2,1F3,1B2,1B3"]
    stuck = ask("solve", number=3, rows=rows)
    assert "Not yet: " in stuck["said"]
    assert stuck["svg"].count('stroke-dasharray="4 3"') == 2
    assert (
        "rank 0 waits with 0B0" in stuck["alt"]
        and "rank 1 waits with 1B0 for the activation" in stuck["alt"]
    )


def test_an_action_of_another_rank_gets_the_checks_sentence_and_not_a_count():
    answered = ask("solve", number=3, rows=["0F0,1F0", "1B0"])
    assert "to go" not in answered["said"] and not answered["right"]


@pytest.mark.parametrize("number", PUZZLES)
def test_the_axis_of_a_board_does_not_change_with_a_tap(number):
    given = PUZZLES[number]
    empty = [()] * given.num_ranks
    tapped = [(Action(0, "F", 0),), *empty[1:]]
    places = [
        re.findall(r'<line x1="([\d.]+)" y1="\d+" x2="\1"', draw_board(given, rows).svg)
        for rows in (empty, tapped)
    ]
    assert places[0] == places[1] and len(places[0]) >= 4


def test_a_puzzle_takes_python_too():
    code = "from pipeline.schedules.text_form import to_csv\nfrom pipeline.schedules import zb_h1\n"
    code += "def rows(p, m):\n    return to_csv(zb_h1(p, m)).split()\n"
    assert ask("solve", number=8, code=code)["name"] == "You have built ZB-H1."
    assert ask("solve", number=8, code="x = 1")["said"] == "Not attempted yet.\n"
    assert "line 1" in ask("solve", number=8, code="1 / 0")["said"]


@pytest.mark.parametrize("number", PUZZLES)
def test_every_puzzle_says_not_attempted_for_empty_rows(number):
    rows = [""] * PUZZLES[number].num_ranks
    answered = ask("solve", number=number, rows=rows)
    assert (answered["said"], answered["right"]) == ("Not attempted yet.", False)
