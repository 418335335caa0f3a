"""What a person hands in, and the table of a folder of it, for which nothing of it is run."""

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import tracemalloc

import grade_submissions
import make_submission
import nbformat
import pytest
from exercises import all_exercises
from further import further

from course.launch import ROOT

STUB = "rows_1 = ..."
CHECK = "from course.checks import lesson_12 as check\n\ncheck.puzzle(1, rows_1)"
RIGHT = 'rows_1 = ["0F0,0B0,0F1,0B1", "1F0,1B0,1F1,1B1"]'


def notebook(tmp_path, *sources, name="12_small.ipynb"):
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / name)
    return tmp_path / name


def test_the_solutions_are_right_in_a_submission():
    path = ROOT / "notebooks" / "solutions" / "12_your_own_schedule.ipynb"
    answers = make_submission.answers_of(path)
    assert [answer["exercise"] for answer in answers] == [f"puzzle {n}" for n in range(1, 12)]
    assert all(answer["said"].startswith("Right: ") for answer in answers)


def test_an_answer_may_use_what_its_notebook_imports_and_defines_and_no_cell_in_between_runs(
    tmp_path,
):
    path = notebook(
        tmp_path,
        "from pipeline.schedules import naive\nfrom pipeline.schedules.text_form import to_csv",
        "def rows_of(schedule):\n    return to_csv(schedule).split()",
        "raise SystemExit('this cell is neither answer nor check')",
        "rows_1 = rows_of(naive(2, 2))",
        CHECK,
    )
    (answer,) = make_submission.answers_of(path)
    assert answer["said"].startswith("Right: ")
    assert answer["answer"] == "rows_1 = rows_of(naive(2, 2))"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("lesson", "exercise"),
    [
        ("08_torch_pipelining", "training_program"),
        ("08b_silent_traps", "clipping_program"),
        ("11_from_laptop_to_cluster", "job_script"),
    ],
)
def test_an_answer_that_is_a_file_or_has_text_between_it_and_its_check_counts(
    tmp_path, lesson, exercise
):
    def cells_of(folder):
        cells = make_submission.notebook_of(ROOT / folder / f"{lesson}.ipynb").cells
        (check,) = (n for n, one in make_submission.exercises_of(cells, "") if one.name == exercise)
        answer = max(n for n in range(check) if cells[n].cell_type == "code")
        return cells[answer : check + 1]

    answer, *between_and_check = cells_of("notebooks")
    answer.source = cells_of("notebooks/solutions")[0].source
    path = tmp_path / "12_small.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[answer, *between_and_check]), path)
    (found,) = make_submission.answers_of(path)
    assert found["said"].startswith("Right: ") and found["answer"] == answer.source


def test_a_loop_without_end_costs_one_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(make_submission, "COMPUTING", 1)
    path = notebook(
        tmp_path,
        "from course.checks import lesson_02 as check",
        "def needed(ranks, bubble):\n    while True:\n        pass",
        "check.enough_microbatches(needed)",
        "while True:\n    pass",
        "check.own_gpipe(rows)",
        "needed = ...",
        "check.enough_microbatches(needed)",
    )
    said = [answer["said"] for answer in make_submission.answers_of(path)]
    assert "does this loop end?" in said[0] and "name 'rows' is not defined" in said[1]
    assert said[2].startswith("Not attempted yet")


@pytest.mark.parametrize("source", ["exit()", "raise SystemExit", "raise KeyboardInterrupt"])
def test_an_answer_that_ends_its_program_costs_one_answer(tmp_path, source):
    path = notebook(tmp_path, source, "check.own_gpipe(rows)", f"{RIGHT}\n{source}", CHECK)
    first, second = make_submission.answers_of(path)
    assert first["said"].startswith("Not yet: ") and second["said"].startswith("Right: ")


@pytest.mark.processes
@pytest.mark.parametrize(
    "source",
    [
        "import json\njson.dumps = None", "import builtins\nbuiltins.len = None",
        "import os\nos.chdir('/')", "import sys\nsys.setrecursionlimit(30)",
        "import signal\nsignal.alarm(1)", "import signal\nsignal.signal = None",
    ],
)  # fmt: skip
def test_what_an_answer_changes_for_its_whole_process_costs_no_other_answer(tmp_path, source):
    cells = "while time.monotonic() < begun + 1.2:\n    pass\n" if "alarm" in source else ""
    path = notebook(
        tmp_path, f"import time\n{source}\nbegun = time.monotonic()", "check.own_gpipe(rows)",
        f"{cells}{RIGHT}\nimport os\nrows_1 = rows_1 if os.getcwd() != '/' else ...", CHECK,
    )  # fmt: skip
    _, answer = make_submission.run_apart(path)
    assert answer["said"].startswith("Right: ")


def test_of_what_an_answer_prints_only_the_start_is_kept(tmp_path):
    source = f"for _ in range(200):\n    print('x' * 1000000)\n{RIGHT}"
    tracemalloc.start()
    (answer,) = make_submission.answers_of(notebook(tmp_path, source, CHECK))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert answer["said"].startswith("Right: ") and most < 50_000_000


def test_a_cell_that_checks_two_answers_has_two_exercises_each_with_what_its_own_check_said(
    tmp_path,
):
    path = notebook(
        tmp_path,
        "from course.checks import lesson_12 as check",
        f"{RIGHT}\nrows_2 = ...",
        "check.puzzle(1, rows_1)\ncheck.puzzle(2, rows_2)",
    )
    first, second = make_submission.answers_of(path)
    assert [first["exercise"], second["exercise"]] == ["puzzle 1", "puzzle 2"]
    assert first["said"].startswith("Right: ") and second["said"].startswith("Not attempted yet")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (STUB, "Not attempted yet"),
        ("rows_1 = ['0F0']", "Not yet: 1 row,"),
        ("rows_1 = 1 / 0", "Not yet: NameError: name 'rows_1' is not defined"),
        ("rows_1 = [", "Not yet: NameError"),
    ],
)
def test_what_is_not_right_says_why(tmp_path, source, said):
    (answer,) = make_submission.answers_of(notebook(tmp_path, source, CHECK))
    assert answer["said"].startswith(said)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("source", "limit", "said"),
    [
        ("while True: pass", 4, "did not end within 4 s"),
        ("import os\nos._exit(3)", 60, "could not run"),
    ],
)
def test_an_answer_that_never_ends_or_ends_everything_costs_its_notebook_only(
    tmp_path, monkeypatch, source, limit, said
):
    monkeypatch.setattr(make_submission, "LIMIT", limit)
    (answer,) = make_submission.run_apart(notebook(tmp_path, source, CHECK))
    assert said in answer["said"] and answer["exercise"] == "puzzle 1"


@pytest.mark.processes
def test_what_a_program_of_an_answer_prints_is_not_read_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(make_submission, "MOST_PRINTED", 2**16)
    source = f"import os\nfor _ in range(64): os.write(1, b'y\\n' * 2**19)\n{RIGHT}"
    tracemalloc.start()
    try:
        (answer,) = make_submission.run_apart(notebook(tmp_path, source, CHECK))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert answer["said"].startswith("Right: ") and most < 2**25


@pytest.mark.processes
def test_a_program_of_an_answer_that_prints_without_end_is_ended_and_costs_no_answer(tmp_path):
    ended = "import subprocess\nended = subprocess.run(['yes'], timeout=50).returncode\n"
    path = notebook(tmp_path, f"{ended}{RIGHT} if ended == -{signal.SIGXFSZ} else ...", CHECK)
    (answer,) = make_submission.run_apart(path)
    assert answer["said"].startswith("Right: ")


@pytest.mark.processes
def test_an_answer_may_leave_a_process_and_a_thread_and_ask_for_input(tmp_path, monkeypatch):
    monkeypatch.setattr(make_submission, "LIMIT", 100)
    thread = "import threading, time\nthreading.Thread(target=time.sleep, args=(120,)).start()\n"
    source = f"{thread}import subprocess\nsubprocess.Popen(['sleep', '120'])\n{RIGHT}\ninput()"
    kept, (asked, silent) = os.dup(0), os.pipe()
    os.dup2(asked, 0)  # a terminal at which nobody types
    try:
        (answer,) = make_submission.run_apart(notebook(tmp_path, source, CHECK))
    finally:
        os.dup2(kept, 0)
        for number in (kept, asked, silent):
            os.close(number)
    assert answer["said"].startswith("Right: ")


@pytest.mark.processes
def test_the_command_writes_a_file_that_the_table_takes(tmp_path):
    environment = os.environ | {"COURSE_NAME": "test of a submission"}
    command = [sys.executable, ROOT / "tools" / "make_submission.py", "00"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    file = ROOT / "build" / "submission_test_of_a_submission.json"
    try:
        assert "0 of 2 exercises are right" in done.stdout
        content = grade_submissions.read(file)
        assert {answer["lesson"] for answer in content["answers"]} == {"00"}
    finally:
        file.unlink()


def submission(name, right=3, answer="x = 1", **changes):
    exercises = all_exercises()
    answers = [
        {
            "lesson": exercise.lesson,
            "exercise": exercise.name,
            "said": "Right: yes." if number < right else "Not attempted yet: replace the ...",
            "answer": answer,
        }
        for number, exercise in enumerate(exercises)
    ]
    return {
        "form": make_submission.FORM,
        "name": name,
        "made": "2026-01-01 10:00",
        "answers": answers,
    } | changes


@pytest.mark.processes
def test_the_pack_s_line_hands_in_the_newest_file_also_of_who_has_two_names(tmp_path):
    (tmp_path / "build").mkdir()
    (tmp_path / "handed-in").mkdir()
    for age, name in enumerate(("a b", "ada")):
        file = tmp_path / "build" / f"submission_{name}.json"
        file.write_text(name)
        os.utime(file, (1000 - age, 1000 - age))
    pack = (ROOT / "docs" / "instructors.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"`(install -m 644 [^`]*)`", pack)
    line = line.replace("/shared/", f"{tmp_path}/")
    subprocess.run(["bash", "-ec", line], cwd=tmp_path, check=True, timeout=20)
    (handed_in,) = (tmp_path / "handed-in").iterdir()
    assert handed_in.read_text() == "a b"


def graded(folder):
    command = [sys.executable, ROOT / "tools" / "grade_submissions.py", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for file in folder.glob("grades.*"):
        assert not file.stat().st_mode & 0o077, "participants may open it, whose folder it is, too"
    with open(folder / "grades.csv", newline="") as file:
        return done.stdout, list(csv.DictReader(file)), (folder / "grades.html").read_text()


@further
@pytest.mark.processes
def test_forty_submissions_are_a_table(tmp_path):
    for number in range(40):
        file = tmp_path / f"submission_{number:02}.json"
        file.write_text(json.dumps(submission(f"person {number}", right=number)))
    said, rows, page = graded(tmp_path)
    assert [int(row["right"]) for row in rows] == list(range(40))
    assert "40 submissions" in said and page.count("<details") == 40
    assert rows[1]["00 laundry"] == "right" and rows[0]["00 laundry"] == ""
    again, rows, _ = graded(tmp_path)  # beside the table of the first time
    assert len(rows) == 40 and "skipped" not in again


def test_tables_of_an_earlier_time_are_no_submissions(tmp_path):
    for name in ("grades.csv", "grades.html"):
        (tmp_path / name).write_text("")
    assert grade_submissions.read_all(tmp_path) == ({}, [])


@pytest.mark.processes
def test_nothing_of_a_submission_is_run_and_its_text_is_text(tmp_path):
    marker = tmp_path / "it ran"
    code = f"open({str(marker)!r}, 'w')"
    bad = submission("=cmd()|' /C calc'!A0", answer=f"{code}\n<script>alert(1)</script>")
    bad["answers"][0]["said"] = f"Right: <img src=x onerror=alert(1)> {{{code}}}"
    (tmp_path / "a.json").write_text(json.dumps(bad))
    _, rows, page = graded(tmp_path)
    assert not marker.exists()
    assert rows[0]["name"].startswith("'=")
    assert "<script" not in page and "<img" not in page and "&lt;script&gt;" in page
    assert "default-src 'none'" in page


@pytest.mark.parametrize("sign", "=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")
def test_no_name_in_a_table_is_a_formula(sign):
    text = grade_submissions.csv_of({"a.json": submission(f"{sign}1")}, [])
    assert [*csv.reader(io.StringIO(text))][1][0] == f"'{sign}1"


def test_no_part_of_a_name_is_a_formula_where_other_signs_separate_cells():
    text = grade_submissions.csv_of({"a.json": submission("Ada;=1+1")}, [])
    cells = [*csv.reader(io.StringIO(text), delimiter=";")][1]
    assert not any(cell.startswith("=") for cell in cells)


@pytest.mark.processes
def test_damaged_and_foreign_files_are_named_and_skipped(tmp_path):
    good = submission("Ada")
    (tmp_path / "ada.json").write_text(json.dumps(good))
    damaged = {
        "cut.json": json.dumps(good)[:500],
        "deep.json": "[" * 100_000,
        "list.json": "[1, 2]",
        "other.json": json.dumps({"form": "another"}),
        "nameless.json": json.dumps(submission(3)),
        "answers.json": json.dumps(submission("Bob", answers="all right")),
        "long.json": json.dumps(submission("Bob", answer="x" * 30_000)),
        "notes.txt": "hello",
    }
    for name, text in damaged.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "binary.json").write_bytes(bytes(range(256)))
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "a\n\33[2Jskipped: ada.json").write_text("")
    said, rows, page = graded(tmp_path)
    assert [row["name"] for row in rows] == ["Ada"]
    assert "\33" not in said + page and "\nskipped: ada.json" not in said
    for name in [*damaged, "binary.json", "pipe.json"]:
        assert f"skipped: {name} " in said and f"<li>{name} " in page
