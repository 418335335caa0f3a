"""Checks note progress, no line is lost, and the wall shows where the room is while it happens."""

import json
import multiprocessing
import subprocess
import sys
import time

import pytest
import wall
from exercises import all_exercises

from course import progress
from course.building import single_messages
from course.checks import lesson_02, lesson_12
from course.checks.answer import checked
from course.launch import ROOT
from pipeline.schedules import naive
from pipeline.schedules.text_form import to_csv

NOW = 1_000_000.0


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder for the progress of somebody called Ada."""
    (tmp_path / "progress").mkdir()
    monkeypatch.setenv(progress.FOLDER_VARIABLE, str(tmp_path / "progress"))
    monkeypatch.setenv(progress.NAME_VARIABLE, "Ada")
    monkeypatch.delenv("PIPELINE_STORED_PICTURES", raising=False)
    monkeypatch.setattr(progress, "told", set())
    return tmp_path / "progress"


def noted(folder, person="Ada"):
    people, skipped = progress.read_progress(folder)
    assert skipped == []
    return [(record["exercise"], record["outcome"]) for record in people[person]]


def test_a_check_notes_the_exercise_and_its_outcome_and_says_once_how_to_switch_that_off(
    folder, capsys
):
    lesson_02.own_gpipe(...)
    lesson_02.own_gpipe(lambda p, m: ["0F0"])
    lesson_12.puzzle(1, to_csv(naive(2, 2)).split())
    assert noted(folder) == [
        ("own_gpipe", "not attempted"),
        ("own_gpipe", "not yet"),
        ("puzzle 1", "right"),
    ]
    said = capsys.readouterr()
    assert said.out.count("COURSE_PROGRESS=off") == 1 and "Ada.jsonl" in said.out
    assert said.err == ""  # a notebook colours it as an error
    names = {exercise.name for exercise in all_exercises()}
    assert {"own_gpipe", "puzzle 1", "diagnosis 2", "repair 8"} <= names


def test_an_answer_of_the_course_that_a_lesson_shows_to_a_check_is_nobody_s_attempt(folder, capsys):
    """Lesson 03 does so before the exercise, and the wall would count everybody as stuck there."""
    check = checked("fine", name="shown")(lambda function: "it waits")
    check(single_messages.one_f_one_b_step)
    assert "Not yet: it waits" in capsys.readouterr().out and list(folder.iterdir()) == []
    check(lambda: None)
    assert noted(folder) == [("shown", "not yet")]


@pytest.mark.parametrize("off", [{"COURSE_PROGRESS": "off"}, {"PIPELINE_STORED_PICTURES": "1"}])
def test_where_it_is_switched_off_nothing_is_written_or_said(folder, off, monkeypatch, capsys):
    for name, value in off.items():
        monkeypatch.setenv(name, value)
    lesson_02.own_gpipe(...)
    assert list(folder.iterdir()) == [] and capsys.readouterr().err == ""


def test_a_folder_that_cannot_be_written_costs_a_sentence_and_not_the_answer(folder, capsys):
    folder.rmdir()
    folder.write_text("a file")
    lesson_02.own_gpipe(...)
    printed = capsys.readouterr()
    assert printed.out.startswith("Not attempted yet") and "is not noted" in printed.err


def test_a_name_is_a_name_of_a_file_and_no_path(monkeypatch):
    monkeypatch.setenv(progress.NAME_VARIABLE, "../../Ada & Bob")
    assert progress.name_of_person() == "______Ada___Bob"


def test_names_that_differ_in_a_vowel_are_two_people_and_one_in_two_codings_is_one(monkeypatch):
    found = []
    for name in ("राम", "रीम", "Jose\N{COMBINING ACUTE ACCENT}", "José"):
        monkeypatch.setenv(progress.NAME_VARIABLE, name)
        found.append(progress.name_of_person())
    assert found == ["राम", "रीम", "José", "José"]


def write_many(folder, person, count):
    progress.os.environ[progress.FOLDER_VARIABLE] = str(folder)
    progress.os.environ[progress.NAME_VARIABLE] = person
    for number in range(count):
        progress.note(f"puzzle {number}", "not yet")


@pytest.mark.processes
def test_forty_people_in_two_kernels_each_write_at_once_and_no_line_is_lost(tmp_path):
    fork = multiprocessing.get_context("fork")
    writers = [
        fork.Process(target=write_many, args=(tmp_path, f"person-{i % 40}", 50)) for i in range(80)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(timeout=60)
        assert writer.exitcode == 0
    people, skipped = progress.read_progress(tmp_path)
    assert len(people) == 40 and skipped == []
    assert {len(records) for records in people.values()} == {100}


def test_damaged_and_foreign_files_are_named_and_skipped(tmp_path):
    good = json.dumps({"exercise": "laundry", "outcome": "right", "time": 5})
    (tmp_path / "ada.jsonl").write_text(f"{good}\nnonsense\n{good}\n{good[:20]}")
    (tmp_path / "foreign.jsonl").write_bytes(b"\xff\xfe\x00binary\n[1, 2]\n")
    (tmp_path / "deep.jsonl").write_text("[" * 100_000 + "\n")
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "folder.jsonl").mkdir()
    for wrong in ({"time": float("inf")}, {"outcome": "best"}, {"exercise": 3}, {"more": 1}):
        with open(tmp_path / "wrong.jsonl", "a") as file:
            file.write(json.dumps(json.loads(good) | wrong) + "\n")
    people, skipped = progress.read_progress(tmp_path)
    assert {person: len(records) for person, records in people.items()} == {"ada": 2}
    for name in ("ada.jsonl: 1 of 3", "foreign.jsonl: 2 of 2", "wrong.jsonl: 4 of 4", "deep.jsonl"):
        assert any(sentence.startswith(name) for sentence in skipped), name
    assert "notes.txt is not a file of progress" in skipped
    assert "folder.jsonl is not a file of progress" in skipped


def records(*steps):
    """Records from (exercise, outcome, seconds ago)."""
    return [{"exercise": e, "outcome": o, "time": NOW - ago} for e, o, ago in steps]


def test_a_person_is_stuck_after_three_wrong_answers_or_eight_minutes_and_not_once_it_is_right():
    wrong = [("laundry", "not yet", 90 - 30 * i) for i in range(3)]
    assert wall.place_of("a", records(*wrong), NOW).stuck
    assert not wall.place_of("a", records(*wrong[:2]), NOW).stuck
    assert wall.place_of("a", records(("laundry", "not yet", 9 * 60)), NOW).stuck
    assert not wall.place_of("a", records(*wrong, ("laundry", "right", 0)), NOW).stuck
    assert not wall.place_of("a", records(*wrong, ("memory_wall", "not attempted", 0)), NOW).stuck
    ahead = wall.place_of("a", records(("laundry", "not yet", -7200)), NOW)  # by that clock
    assert ahead.since == ahead.last == 0


def test_the_wall_counts_people_and_names_where_the_room_stumbles_and_nobody_by_name():
    people = {
        "ada": records(("laundry", "right", 200), ("puzzle 5", "not yet", 100)),
        "bob": records(("puzzle 5", "not yet", 90), ("puzzle 5", "not yet", 60)),
        "<eve>": records(("laundry", "not attempted", 50)),
        "left": records(("laundry", "right", 9000)),
    }
    lessons = {"laundry": "00 Laundry in one line", "puzzle 5": "12 puzzle 5"}
    page = wall.wall_of(people, ["x.txt is not a file of progress"], lessons, False, NOW)
    assert "<h1>3 at work, 0 stuck</h1>" in page
    assert "<th scope='row'>00 Laundry in one line</th>" in page
    assert "stumbles at <b>12 puzzle 5</b>: 2 have tried" in page and "1.5 attempts" in page
    assert "<td>●●○</td><td>2</td><td>0</td><td>1</td>" in page
    assert "Skipped: 1 of the folder's files" in page  # x may be somebody's name
    assert "x.txt" not in page
    assert "x.txt is" in wall.wall_of(people, ["x.txt is a link"], lessons, True, NOW)
    assert not any(name in page for name in ("ada", "bob", "eve", "left"))
    assert "&lt;eve&gt;" in wall.wall_of(people, [], lessons, True, NOW)


def test_the_wall_calls_an_exercise_by_its_title_in_the_lesson():
    titles = wall.titles_of_exercises()
    assert list(titles) == [exercise.name for exercise in all_exercises()]
    assert len(set(titles.values())) == len(titles)
    assert titles["there_and_back"] == "01 There and back"
    assert titles["diagnosis 9"] == "12b diagnosis 9"


@pytest.mark.processes
def test_the_open_wall_shows_what_is_written_into_the_folder_afterwards(tmp_path, chromium):
    playwright = pytest.importorskip("playwright.sync_api")
    shared, page_folder = tmp_path / "shared", tmp_path / "wall"
    shared.mkdir()
    command = [sys.executable, ROOT / "tools" / "wall.py", shared, "--into", page_folder, "--names"]
    follower = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert "wall.html" in follower.stdout.readline()
        with playwright.sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page()
            complaints = []
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.goto((page_folder / "wall.html").as_uri())
            page.get_by_text("0 at work").wait_for(timeout=20_000)
            record = {"exercise": "own_gpipe", "outcome": "not yet", "time": time.time()}
            (shared / "Ada.jsonl").write_text(json.dumps(record) + "\n")
            page.get_by_text("1 at work").wait_for(timeout=20_000)
            assert page.get_by_text("Ada").count() == 1
            assert "02 Write GPipe's schedule yourself" in page.locator("main").inner_text()
            browser.close()
        assert complaints == []
    finally:
        follower.terminate()
        follower.wait(timeout=10)
