"""One bad file, or a folder that cannot be written, does not end the work of a room."""

import errno
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import answers
import benchmark
import certificates
import exercises
import grade_submissions
import living_pages
import make_handout
import make_hosted
import make_site
import make_slides
import make_submission
import minutes
import nbformat
import pytest
import quiet_run
import rehearse
import slide_figures
import spoil_code
import stored_pictures
import this_machine
import wall
import write_measurements

from course import progress
from course.launch import ROOT
from files.claims import lock_folder
from files.inputs import InputError
from lab.simulator import Costs, simulate
from lab.timeline import to_chrome_trace
from pipeline.schedules import build_schedule

NOTEBOOK = '{"nbformat": 4, "nbformat_minor": 4, "metadata": {}}'
GOOD = '{"exercise": "puzzle 1", "outcome": "right", "time": 1.0}\n'
LINE = '{"exercise": "puzzle 1", "outcome": "right", "time": %s}\n'
NO_NOTEBOOKS = {
    "Untitled.ipynb": "",
    "conflict.ipynb": '<<<<<<< HEAD\n{"cells": []}\n=======\n{}\n>>>>>>> theirs\n',
    "list.ipynb": "[1, 2]",
    "number.ipynb": "7",
    "cells.ipynb": '{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [3]}',
    "deep.ipynb": "[" * 100_000,
    "digits.ipynb": '{"nbformat": ' + "9" * 400 + "}",
    "alone.ipynb": '{"cells": [{"cell_type": "markdown", "source": "a"}]}',
    "minor.ipynb": '{"nbformat": 4, "nbformat_minor": "5", "metadata": {}, "cells": []}',
    "kind.ipynb": '{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [{"source": 1}]}',
}


def sentence_of(main, monkeypatch, *words):
    """The sentence with which a tool ends."""
    monkeypatch.setattr(sys, "argv", [f"{main.__module__}.py", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        inspect.unwrap(main)()
    assert isinstance(ended.value.code, str) and "\n" not in ended.value.code
    return ended.value.code


@pytest.fixture
def notebooks(tmp_path):
    """A folder with one notebook that has an exercise, and everything that is not a notebook."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    check = "from course.checks import lesson_12 as check\n\ncheck.puzzle(1, rows_1)"
    cells = [nbformat.v4.new_code_cell(source) for source in ("rows_1 = ...", check)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / "12_small.ipynb")
    for name, text in NO_NOTEBOOKS.items():
        (folder / name).write_text(text)
    (folder / "folder.ipynb").mkdir()
    (folder / "link.ipynb").symlink_to("x" * 300)  # nobody can look there
    (folder / "nowhere.ipynb").symlink_to("nowhere")
    (folder / "endless.ipynb").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe.ipynb")
    return folder


def test_what_is_no_notebook_is_named_and_the_others_are_read(notebooks):
    found, skipped = exercises.read_notebooks(notebooks)
    assert [path.name for path in found] == ["12_small.ipynb"]
    (exercise,) = exercises.all_exercises(notebooks)
    assert exercise.name == "puzzle 1"
    named = {sentence.split(" ")[0] for sentence in skipped}
    others = {"folder.ipynb", "link.ipynb", "nowhere.ipynb", "endless.ipynb", "pipe.ipynb"}
    assert named == {*NO_NOTEBOOKS, *others}


ODD_NAME = "02_\33[31ma\nskipped: b"


def test_control_characters_of_a_name_are_quoted_where_it_is_skipped(tmp_path):
    exercise = {**CELL, "source": "check.puzzle(1, rows_1)"}
    whole = json.dumps({**json.loads(NOTEBOOK), "cells": [exercise]})
    (tmp_path / "12.ipynb").write_text(whole)
    (tmp_path / f"{ODD_NAME}.ipynb").write_text("")
    (tmp_path / f"{ODD_NAME}, a copy.ipynb").write_text(whole)
    (tmp_path / f"{ODD_NAME}.jsonl").write_text("damaged\n")
    (tmp_path / f"{ODD_NAME}.txt").touch()
    (tmp_path / f"{ODD_NAME}.link").symlink_to("x")
    skipped = exercises.read_notebooks(tmp_path)[1] + progress.read_progress(tmp_path)[1]
    odd = [sentence for sentence in skipped if "31ma" in sentence]
    assert len(odd) == 7 and all(sentence.isprintable() for sentence in skipped)


@pytest.mark.processes
def test_a_submission_is_made_of_the_notebooks_that_can_be_read(
    notebooks, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(make_submission, "read_notebooks", lambda: found)
    found = exercises.read_notebooks(notebooks)
    monkeypatch.setattr(make_submission, "NOTEBOOKS", notebooks)
    monkeypatch.setattr(make_submission, "ROOT", tmp_path)
    monkeypatch.setenv("COURSE_NAME", "ada")
    monkeypatch.setattr(sys, "argv", ["make_submission.py"])
    assert make_submission.main() == 0
    assert "skipped: Untitled.ipynb is not a notebook" in capsys.readouterr().out
    written = grade_submissions.read(tmp_path / "build" / "submission_ada.json")
    assert [answer["exercise"] for answer in written["answers"]] == ["puzzle 1"]
    found = [], ["12_small.ipynb is not a notebook"]
    with pytest.raises(SystemExit):
        make_submission.main()
    assert "no exercise was found" in capsys.readouterr().err
    assert grade_submissions.read(tmp_path / "build" / "submission_ada.json") == written


@pytest.mark.processes
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("rows_1 = '\\x00'", "rank 0, step 0"),
        ("import os\nos.write(1, b'\\xff\\n')", "NameError"),
        ("import atexit\natexit.register(print, 5)", "NameError"),
        ("import os\nos.write(1, b'[]')\nos._exit(0)", "the checks of this notebook could not run"),
        ("\ufeffrows_1 = 1", "NameError"),
    ],
)
def test_an_answer_of_any_bytes_is_an_answer(tmp_path, answer, said):
    check = "from course.checks import lesson_12 as check\n\ncheck.puzzle(1, rows_1)"
    cells = [nbformat.v4.new_code_cell(source) for source in (answer, check)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "12_small.ipynb")
    (answer,) = make_submission.run_apart(tmp_path / "12_small.ipynb")
    assert answer["said"].startswith(f"Not yet: {said}")


def test_a_notebook_that_begins_with_a_mark_of_the_byte_order_is_one(notebooks):
    path = notebooks / "12_small.ipynb"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert [exercise.name for exercise in exercises.all_exercises(notebooks)] == ["puzzle 1"]
    assert len(exercises.notebook_of(path).cells) == 2


CELL = {"cell_type": "code", "metadata": {}, "source": [], "outputs": []}
NO_CELLS = {
    "no outputs": {key: value for key, value in CELL.items() if key != "outputs"},
    "outputs": {**CELL, "outputs": None},
    "an output": {**CELL, "outputs": [3]},
    "a printed text": {**CELL, "outputs": [{"name": "stdout", "text": 3}]},
    "kinds of an output": {**CELL, "outputs": [{"data": [1]}]},
    "a shown text": {**CELL, "outputs": [{"data": {"text/markdown": None}}]},
    "a drawing": {**CELL, "outputs": [{"data": {"image/svg+xml": "nothing"}}]},
    "metadata": {**CELL, "metadata": None},
    "tags": {**CELL, "metadata": {"tags": None}},
    "folding": {**CELL, "metadata": {"jupyter": None}},
    "a source": {**CELL, "source": 3},
    "a missing text": {**CELL, "outputs": [{"output_type": "stream", "name": "stdout"}]},
    "a count": {**CELL, "execution_count": "1"},
    "a line": {**CELL, "source": [1]},
    "a kind": {key: value for key, value in CELL.items() if key != "cell_type"},
}


@pytest.mark.parametrize("cell", NO_CELLS.values(), ids=NO_CELLS)
def test_a_notebook_with_a_cell_of_another_form_is_named_by_every_tool(tmp_path, cell):
    path = tmp_path / "zz.ipynb"
    title = {"cell_type": "markdown", "metadata": {}, "source": "# A title"}
    path.write_text(json.dumps({**json.loads(NOTEBOOK), "cells": [title, cell]}))
    for read in (exercises.notebook_of, make_slides.cells_of, minutes.minutes_of):
        with pytest.raises(InputError, match=r"zz\.ipynb is not a notebook"):
            read(path)
    path.write_text(json.dumps({**json.loads(NOTEBOOK), "cells": {}}))
    with pytest.raises(InputError, match=r"zz\.ipynb is not a notebook"):
        exercises.notebook_of(path)


def test_a_new_notebook_and_one_of_words_or_raw_cells_have_slides_minutes_and_no_first_cell(
    tmp_path,
):
    path = tmp_path / "Untitled.ipynb"
    for cell in (CELL, {**CELL, "cell_type": "raw"}, {**CELL, "cell_type": "markdown"}):
        path.write_text(json.dumps({**json.loads(NOTEBOOK), "cells": [cell]}))
        assert [slide.title for slide in make_slides.slides_of(make_slides.cells_of(path))] == [""]
        assert minutes.minutes_of(path).lesson == 0
    assert make_hosted.prepared(path.read_text(), path, None) == path.read_text()
    mark = "# T\n\n<!-- slide: x -->"  # without a sentence after it
    made = make_slides.slides_of([{**CELL, "cell_type": "markdown", "source": mark}])
    assert len(make_slides.texts_of(made, {})) == 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize("beginning", ["<!-- slide: ", "![", "![a](../images/a", "](", "["])
def test_what_begins_a_thousand_times_and_never_ends_is_read_in_a_moment(beginning, monkeypatch):
    text = beginning * 20_000
    assert re.sub(minutes.NOT_READ, "", text, flags=re.S) == text
    monkeypatch.setattr(make_slides, "enough_of", lambda text, most: text)
    assert make_slides.shortened(text) == make_slides.without_links(text) == text
    assert make_slides.picture_in(text) is None


def test_a_drawing_of_another_program_that_cannot_be_scaled_is_no_figure():
    box = '<svg xmlns="http://www.w3.org/2000/svg" viewBox='
    foreign = ["<svg/>", '<svg viewBox="0 0 x 1"/>', "<svg><", "<SVG/>", f'{box}"0 0 0 0"/>']
    foreign += [f'{box}"0 0 9 9"><text font-size="12px">a</text></svg>']
    foreign += [f'{box}"0 0 9 9"><rect x="10%" y="0" width="9"/></svg>']
    for drawing in foreign:
        assert slide_figures.picture(drawing) is None
        output = {"data": {"image/svg+xml": drawing}}
        assert slide_figures.figure_of({**CELL, "outputs": [output]}) is None


def test_a_page_of_the_course_that_is_no_text_is_one_sentence(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_bytes(b"\xe9")
    monkeypatch.setattr(minutes, "PAGE", page)
    monkeypatch.setattr(minutes, "LESSONS", [tmp_path / "zz.ipynb"])
    (tmp_path / "zz.ipynb").write_text(json.dumps({**json.loads(NOTEBOOK), "cells": [CELL]}))
    monkeypatch.setattr(make_slides, "PLANS", page)
    monkeypatch.setattr(make_slides, "SLIDES", tmp_path / "slides")
    monkeypatch.setattr(write_measurements, "PAGE", page)
    for main, word in ((minutes, "--write"), (make_slides, "00"), (write_measurements, "x")):
        said = sentence_of(main.main, monkeypatch, word)
        assert "page.md is not text in UTF-8" in said
    page.write_text("no table")
    assert "page.md does not say" in sentence_of(minutes.main, monkeypatch, "--write")


@pytest.mark.parametrize("name", [os.fsdecode(b"a\xff.md"), "a\nb.md"])
def test_a_file_whose_name_no_address_can_have_is_no_page(tmp_path, name, capsys):
    (tmp_path / name).write_text("words")
    assert not make_site.is_readable(tmp_path, Path(name))
    assert f"skipped: {name!r} cannot be" in capsys.readouterr().out


@pytest.mark.timeout(30)  # 80,000 lines in the five megabytes that a file may have took 14 s
def test_a_wall_takes_as_long_as_there_are_lines():
    record = {"exercise": "puzzle 1", "outcome": progress.TRIED, "time": 1.0}
    right = {**record, "outcome": progress.RIGHT}
    place = wall.place_of("ada", [record, right, *[record] * 400_000], now=2.0)
    assert (place.attempts, place.since, place.stuck) == (400_000, 1.0, True)


@pytest.mark.parametrize("line", [b"", b"1"])
def test_a_file_of_more_lines_than_fit_is_skipped_and_costs_the_others_nothing(tmp_path, line):
    (tmp_path / "ada.jsonl").write_text(GOOD)
    (tmp_path / "bob.jsonl").write_bytes((line + b"\n") * (progress.MOST_LINES + 1))
    people, skipped = progress.read_progress(tmp_path)
    assert [*people] == ["ada"]
    assert skipped == ["bob.jsonl has too many lines for a file of progress"]
    record = {"exercise": "", "outcome": progress.RIGHT, "time": 0}  # no line of a check is shorter
    assert len(json.dumps(record)) * progress.MOST_LINES >= progress.MOST_BYTES


def test_a_wall_shows_the_others_beside_numbers_and_texts_of_any_kind(tmp_path):
    room, shown = tmp_path / "room", tmp_path / "wall"
    room.mkdir(), shown.mkdir()
    (room / "ada.jsonl").write_text(GOOD)
    for number, moment in enumerate(["9" * 400, "-1", "1e400", "NaN", "9" * 5000, "true false"]):
        (room / f"bob{number}.jsonl").write_text(LINE % moment)
    (room / "surrogate.jsonl").write_text(GOOD.replace("puzzle 1", "\\ud800"))
    (room / "link.jsonl").symlink_to("x" * 300)
    (room / os.fsdecode(b"\xff.txt")).touch()
    wall.follow(room, shown, {}, names=True)
    people, skipped = progress.read_progress(room)
    assert sorted(people) == ["ada", "surrogate"] and len(skipped) == 8
    assert "1 of 1 lines are damaged" in (shown / "wall_data.js").read_text()


@pytest.mark.processes
def test_a_table_names_what_it_skips_and_has_the_others(tmp_path):
    answers = [
        {"lesson": "12", "exercise": "puzzle 1", "said": "Right: \ud800", "answer": "\ud800"}
    ]
    one = {"form": make_submission.FORM, "made": "now", "answers": answers}
    (tmp_path / "ada.json").write_text(json.dumps({**one, "name": "Ada \ud800"}))
    (tmp_path / "digits.json").write_text('{"form": ' + "9" * 5000 + "}")
    (tmp_path / "link.json").symlink_to("x" * 300)
    (tmp_path / os.fsdecode(b"\xff.json")).touch()
    words = [sys.executable, grade_submissions.__file__, tmp_path]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    said = ended.stdout
    assert said.count("skipped: ") == 3 and "link.json is a link, which is not followed" in said
    assert "Ada" in (tmp_path / "grades.csv").read_text()


@pytest.mark.parametrize("tool", [grade_submissions, wall, make_site])
def test_a_folder_that_cannot_be_written_is_one_sentence_with_a_fix(tmp_path, monkeypatch, tool):
    (tmp_path / "file").touch()  # no folder can be made below it, not even by root
    (tmp_path / "room").mkdir()
    words = [] if tool is make_site else [tmp_path / "room"]
    words += ["--static"] if tool is make_site else []
    said = sentence_of(tool.main, monkeypatch, *words, "--into", tmp_path / "file" / "below")
    assert said.startswith(f"{tool.__name__}.py: ") and "Not a directory" in said and "; " in said


@pytest.mark.parametrize("output", [{"output_type": "chart"}, {"output_type": "error"}])
def test_a_notebook_with_an_output_that_jupyter_does_not_know_is_no_page(tmp_path, output, capsys):
    cells = [{**CELL, "outputs": [output]}]
    (tmp_path / "03_b.ipynb").write_text(json.dumps({**json.loads(NOTEBOOK), "cells": cells}))
    assert not make_site.is_readable(tmp_path, Path("03_b.ipynb"))
    assert "skipped: 03_b.ipynb is not a notebook" in capsys.readouterr().out


MARKDOWN = {"cell_type": "markdown", "metadata": {}, "source": "# T"}
NOT_SHOWN = {
    "formula": [{**MARKDOWN, "source": "# T\n\n$$\\frac{p - 1}{$$"}],
    "deep formula": [{**MARKDOWN, "source": "$$" + 3000 * "{" + "$$"}],
    "attachment": [{**MARKDOWN, "source": "![x](attachment:x.png)"}],
    "number as id": [{**MARKDOWN, "id": 3}],
    "transient": [{**MARKDOWN, "metadata": {"transient": 3}}],
    "half a letter": [{**MARKDOWN, "source": "# T\n\n[x](\ud800)"}],
    "explorer": [{**CELL, "source": "explore('nosuch')"}],
    "puzzle": [{**CELL, "source": "%%bash"}, {**CELL, "source": "check.puzzle(1, rows)"}],
}


@pytest.mark.parametrize("cells", NOT_SHOWN.values(), ids=NOT_SHOWN)
def test_a_notebook_with_content_that_cannot_be_shown_costs_its_own_page(tmp_path, cells, capsys):
    (tmp_path / "notebooks").mkdir()
    bad, good = Path("notebooks/03_b.ipynb"), Path("notebooks/04_c.ipynb")
    for file, shown in {bad: cells, good: [MARKDOWN]}.items():
        content = {**json.loads(NOTEBOOK), "nbformat_minor": 5, "cells": shown}
        (tmp_path / file).write_text(json.dumps(content))
    course = make_site.Course(tmp_path, [bad, good], set(), {bad: "b", good: "c"}, True)
    exporter = make_site.HTMLExporter(template_name="basic")
    assert list(make_site.bodies_of(exporter, course)) == [good] == course.files
    assert list(course.titles) == [good]
    assert capsys.readouterr().out.startswith(f"skipped: {bad} ")


@pytest.mark.parametrize("lesson", [nbformat.writes(nbformat.v4.new_notebook()), ""])
def test_a_site_has_puzzles_where_their_lesson_can_be_read(tmp_path, lesson):
    file = tmp_path / make_site.site_index.PUZZLE_LESSON
    file.parent.mkdir()
    file.write_text(lesson)
    course = make_site.read_course(tmp_path, lives=True)
    assert (make_site.PUZZLES in course.titles) == bool(lesson)
    assert make_site.EXPLORER in course.titles


def test_what_is_between_cells_of_text_and_code_is_no_answer_and_is_shown(tmp_path):
    question = {**MARKDOWN, "source": "Guess first."}
    cells = [question, {"cell_type": "raw", "metadata": {}, "source": "raw"}]
    (tmp_path / "a.ipynb").write_text(json.dumps({**json.loads(NOTEBOOK), "cells": cells}))
    assert answers.answers_of(exercises.notebook_of(tmp_path / "a.ipynb")) == []
    course = make_site.Course(tmp_path, [Path("a.ipynb")], set(), {}, False)
    exporter = make_site.HTMLExporter(template_name="basic")
    assert "Guess" in make_site.bodies_of(exporter, course)[Path("a.ipynb")]


def test_a_formula_that_is_not_whole_is_named_with_its_lesson_by_the_slides(tmp_path, monkeypatch):
    (tmp_path / "03_b.ipynb").write_text(
        json.dumps({**json.loads(NOTEBOOK), "cells": [
            {**MARKDOWN, "source": "# T\n\n<!-- slide: A -->\nOne.\n\n$$\\frac{p - 1}{$$"}
        ]})
    )  # fmt: skip
    monkeypatch.setattr(make_slides, "NOTEBOOKS", tmp_path)
    monkeypatch.setattr(make_slides, "SLIDES", tmp_path / "slides")
    said = sentence_of(make_slides.main, monkeypatch)
    assert "03_b.ipynb" in said and r"$$\frac{p - 1}{$$" in said


def test_a_number_of_minutes_with_5000_digits_is_no_number_of_minutes(tmp_path):
    (tmp_path / "03_b.ipynb").write_text(
        json.dumps({**json.loads(NOTEBOOK), "cells": [
            {**MARKDOWN, "source": f"**Time:** {'9' * 5000} minutes to read and run, and 5 minutes "
            "to write your part (estimated). "},
            {**MARKDOWN, "source": f"**1. a** ({'9' * 5000} minutes)\n\n**2. b** (5 minutes)"},
        ]})
    )  # fmt: skip
    assert minutes.minutes_of(tmp_path / "03_b.ipynb").exercises == 5
    assert minutes.stated_in(tmp_path / "03_b.ipynb") is None


@pytest.mark.parametrize("link", ["[x](\ud800)", "[the course](..)"])
def test_a_link_that_names_no_removed_file_stays_in_a_handout(link):
    assert make_handout.without_links(link, Path("docs/a.md")) == link


DEEP = "-" * 100_000 + "1"  # deeper than Python reads


def test_code_that_is_too_deep_for_python_costs_its_own_answer_and_is_shown_as_it_is(tmp_path):
    namespace = {}
    make_submission.prepare(DEEP, "<cell 1>", namespace, True, tmp_path)
    assert not namespace and not living_pages.body_of(DEEP) and not living_pages.body_of("\0")


def test_a_stored_picture_that_is_damaged_is_drawn_anew():
    for damaged in ("AAAA", "A", ""):
        assert stored_pictures.drawn_from({"image/png": damaged}) is None


def test_a_dead_link_is_named_with_its_file_and_a_fix(tmp_path, capsys):
    course = make_site.Course(tmp_path, [], set(), {}, False)
    dead = '<p><a title="t" href="gone.md">x</a> <img src="gone.png" alt="y"></p>'
    left = make_site.with_links(dead + dead, Path("docs/a.md"), course)
    assert left[: len(left) // 2] == '<p><a title="t">x</a> <img alt="y"></p>', "the words stay"
    lines = capsys.readouterr().out.splitlines()
    for link, line in zip(("gone.md", "gone.png"), lines, strict=True):
        said, fix = line.split("; ", 1)
        assert said.startswith("skipped: ") and "docs/a.md" in said and link in said
        assert "correct" in fix
    abroad = '<a href="HTTPS://example.org/">x</a>'
    assert make_site.with_links(abroad, Path("docs/a.md"), course) == abroad


@pytest.mark.parametrize("tool", [grade_submissions, wall, make_site, quiet_run, rehearse])
def test_a_path_that_no_folder_can_have_is_one_sentence(monkeypatch, capsys, tool):
    words = {make_site: ["--of"], rehearse: ["strict"]}.get(tool, [])
    monkeypatch.setattr(sys, "argv", [f"{tool.__name__}.py", *words, "x" * 5000])
    with pytest.raises(SystemExit) as ended:
        tool.main()
    assert ended.value.code not in (0, None)


def test_a_site_skips_what_cannot_be_a_page_and_removes_nothing_but_a_site(
    notebooks, tmp_path, monkeypatch, capsys
):
    (notebooks / "latin.py").write_bytes(b"# \xff")
    (notebooks / "latin.svg").write_bytes(b"<svg>\xff</svg>")
    files = [path.relative_to(tmp_path) for path in notebooks.iterdir() if os.path.isfile(path)]
    shown = [file.name for file in files if make_site.is_readable(tmp_path, file)]
    assert shown == ["12_small.ipynb"]
    said = capsys.readouterr().out
    assert "skipped: notebooks/latin.py is not a text\n" in said
    assert "skipped: notebooks/latin.svg is not a picture\n" in said
    said = sentence_of(make_site.main, monkeypatch, "--of", tmp_path, "--into", notebooks)
    assert "something else than a site" in said and (notebooks / "12_small.ipynb").exists()


def test_a_site_takes_the_place_of_a_site_only_and_is_made_of_the_course_only(
    tmp_path, monkeypatch
):
    mine = tmp_path / "mine"
    (mine / make_site.SCRIPTS).mkdir(parents=True)  # also a folder of somebody's recordings
    (mine / "precious").touch()
    said = sentence_of(make_site.main, monkeypatch, "--static", "--into", mine)
    assert "something else than a site" in said and (mine / "precious").exists()
    said = sentence_of(make_site.main, monkeypatch, "--of", mine, "--into", tmp_path / "site")
    assert "mine is not a copy of the course" in said and not (tmp_path / "site").exists()
    os.mkfifo(tmp_path / "pipe")  # which a removal of folders would open
    said = sentence_of(make_site.main, monkeypatch, "--static", "--into", tmp_path / "pipe")
    assert "pipe is not a folder" in said
    address = os.fsdecode(b"https://example.org/\xff")
    assert "--address" in sentence_of(make_site.main, monkeypatch, "--address", address)


def test_an_older_site_stays_until_the_new_one_is_whole_and_is_no_page_of_it(tmp_path, monkeypatch):
    site, list_of_lessons = tmp_path / "site", tmp_path / make_site.LESSONS
    list_of_lessons.parent.mkdir()
    list_of_lessons.touch()
    (site / make_site.SCRIPTS).mkdir(parents=True)
    for name in make_site.OWN_SCRIPTS:
        (site / make_site.SCRIPTS / name).touch()
    (site / "index.html").write_text("older")
    found = []

    def write_pages(made, course):
        found.extend(course.files)
        (made / "index.html").write_text("newer")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(make_site, "write_pages", write_pages)
    words = "--static", "--of", tmp_path, "--into", site
    assert "No space left" in sentence_of(make_site.main, monkeypatch, *words)
    assert found == [make_site.LESSONS] and (site / "index.html").read_text() == "older"


@pytest.mark.processes
def test_a_site_of_a_folder_that_git_does_not_list_or_without_room_for_pyodide(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PATH", "")
    said = sentence_of(make_site.main, monkeypatch, "--static", "--into", tmp_path / "site")
    assert "git does not list" in said
    (tmp_path / "file").touch()
    monkeypatch.setattr(make_site.living_site, "DOWNLOADED", tmp_path / "file" / "npm")
    monkeypatch.setattr(make_site.living_site.shutil, "which", lambda name: name)
    assert "cannot be used (Not a directory)" in make_site.try_to_live(tmp_path)


NOTEBOOK_TOOLS = [answers, make_hosted, make_slides, minutes, stored_pictures]


@pytest.mark.parametrize("tool", NOTEBOOK_TOOLS)
@pytest.mark.parametrize("text", ["", "{}", '{"cells": [3]}', None])
def test_what_is_no_notebook_is_named_by_a_tool_that_reads_all(tmp_path, monkeypatch, tool, text):
    path = tmp_path / "notebooks" / "03_mine.ipynb"
    path.parent.mkdir()
    os.mkfifo(path) if text is None else path.write_text(text)
    for name in ("README.md", "CITATION.cff"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    monkeypatch.setattr(make_hosted, "ROOT", tmp_path)
    monkeypatch.setattr(minutes, "LESSONS", [path])
    monkeypatch.setattr(make_slides, "SLIDES", tmp_path / "slides")
    for each in (answers, make_slides, stored_pictures):
        monkeypatch.setattr(each, "NOTEBOOKS", path.parent)
    said = sentence_of(tool.main, monkeypatch)
    assert said.startswith(f"{tool.__name__}.py: ") and "03_mine.ipynb" in said


def test_a_submission_quotes_control_characters_of_a_name(tmp_path, monkeypatch, capsys):
    odd = {tmp_path / "01\33.ipynb": [], tmp_path / f"{ODD_NAME}.ipynb": []}
    read = make_submission.run_apart
    answer = {"lesson": "01", "exercise": "a", "said": "Right: yes.", "answer": "1"}
    monkeypatch.setattr(make_submission, "ROOT", tmp_path)
    monkeypatch.setattr(make_submission, "read_notebooks", lambda: (odd, []))
    monkeypatch.setattr(
        make_submission, "run_apart", lambda path: read(path) if ODD_NAME in path.name else [answer]
    )
    monkeypatch.setattr(sys, "argv", ["make_submission.py"])
    assert inspect.unwrap(make_submission.main)() == 0
    said = capsys.readouterr().out
    assert "\33" not in said and "cannot be read" in said and said.count("\n") == 3


def test_a_notebook_that_is_removed_while_others_are_checked_costs_itself(
    tmp_path, monkeypatch, capsys
):
    first, gone = tmp_path / "01_a.ipynb", tmp_path / "02_b.ipynb"
    answer = {"lesson": "01", "exercise": "a", "said": "Right: yes.", "answer": "1"}
    read = make_submission.run_apart
    monkeypatch.setattr(make_submission, "ROOT", tmp_path)
    monkeypatch.setattr(make_submission, "read_notebooks", lambda: ({first: [], gone: []}, []))
    monkeypatch.setattr(
        make_submission, "run_apart", lambda path: [answer] if path == first else read(path)
    )
    monkeypatch.setattr(sys, "argv", ["make_submission.py"])
    assert inspect.unwrap(make_submission.main)() == 0
    said = capsys.readouterr().out
    assert "skipped: " in said and "02_b.ipynb cannot be read" in said
    assert "1 of 1 exercises are right" in said


TOOLS = sorted(
    path.stem for path in (ROOT / "tools").glob("*.py") if "\nif __name__ ==" in path.read_text()
)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_that_is_asked_for_help_does_nothing_else(tool, monkeypatch, capsys):
    def started(*words, **_):
        raise AssertionError(words)

    module = importlib.import_module(tool)
    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr(sys, "argv", [f"{tool}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        inspect.unwrap(module.main)()
    assert not ended.value.code and f"usage: {tool}.py" in capsys.readouterr().out


@pytest.mark.parametrize("tool", TOOLS)
def test_a_flag_that_a_tool_lacks_is_one_line_and_status_2(tool, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{tool}.py", "--of\nmine"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(tool).main()
    line, *more = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and "--help lists the flags" in line and not more


@pytest.mark.processes
def test_a_read_only_course_and_one_without_git_are_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(make_submission, "ROOT", tmp_path / "file")
    (tmp_path / "file").touch()
    # Before the minutes that the checks take.
    monkeypatch.setattr(make_submission, "read_notebooks", lambda: pytest.fail("it has begun"))
    assert "cannot be written; use a copy" in sentence_of(make_submission.main, monkeypatch)
    monkeypatch.setattr(make_slides, "SLIDES", tmp_path / "file" / "slides")
    assert "cannot be used" in sentence_of(make_slides.main, monkeypatch, "02")
    monkeypatch.setattr(benchmark, "RESULT", tmp_path / "file" / "build" / "benchmark.md")
    assert "cannot be used" in sentence_of(benchmark.main, monkeypatch)
    monkeypatch.setattr(certificates, "PAGE", tmp_path / "file" / "certificates.md")
    monkeypatch.setattr(certificates, "part", lambda *_: pytest.fail("it has begun"))
    assert "certificates.md cannot be written" in sentence_of(certificates.main, monkeypatch)
    monkeypatch.setattr(make_handout, "ROOT", tmp_path)
    monkeypatch.setattr(make_handout, "HANDOUT", tmp_path / "handout")
    (tmp_path / "handout" / "course").mkdir(parents=True)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "git does not list" in sentence_of(make_handout.main, monkeypatch)
    monkeypatch.setattr(make_handout, "HANDOUT", tmp_path / "file")
    assert "file cannot be used (File exists); " in sentence_of(make_handout.main, monkeypatch)
    monkeypatch.setattr(make_handout, "HANDOUT", tmp_path / "handout")
    monkeypatch.setenv("PATH", "")
    assert "git does not list" in sentence_of(make_handout.main, monkeypatch)
    assert (tmp_path / "handout" / "course").is_dir(), "the older handout stays"


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A clone with one lesson and two pages, which make_handout.py takes for the course."""
    root = tmp_path / "clone"
    (root / "notebooks").mkdir(parents=True)
    nbformat.write(nbformat.v4.new_notebook(), root / "notebooks" / "02_a.ipynb")
    (root / "docs").mkdir()
    for name in ("page.md", 'a "ü" b.md', make_site.LESSONS):
        (root / name).write_text("text")
    author = "-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"
    commit = [*author, "commit", "--quiet", "--message", "The course"]
    for words in (["init", "--quiet"], ["add", "--all"], commit):
        subprocess.run(["git", *words], cwd=root, check=True, timeout=60)
    monkeypatch.setattr(make_handout, "ROOT", root)
    monkeypatch.setattr(make_handout, "HANDOUT", tmp_path / "handout")
    return root


@pytest.mark.processes
@pytest.mark.parametrize("name", ["notebooks/02_a.ipynb", "page.md"])
def test_a_file_that_cannot_be_handed_out_is_named_and_the_older_handout_stays(
    clone, tmp_path, monkeypatch, name
):
    copy = tmp_path / "handout" / "course"
    make_handout.write_course(copy)
    (copy / ".git").mkdir()
    (clone / name).write_bytes(b"<<<<<<< HEAD\n\xff")
    said = sentence_of(make_handout.main, monkeypatch)
    assert name in said and "make the handout again" in said
    assert (copy / 'a "ü" b.md').read_text() == "text", "also a name that git puts in quotes"


@pytest.mark.processes
def test_a_handout_of_something_else_than_the_course_leaves_the_older_one_as_it_is(
    clone, tmp_path, monkeypatch
):
    make_handout.write_course(tmp_path / "handout" / "course")
    (tmp_path / "handout" / "course" / ".git").mkdir()
    for words in (["init", "--quiet"], ["rm", "--quiet", "--cached", make_site.LESSONS]):
        subprocess.run(["git", *words], cwd=clone, check=True, timeout=60)
    said = sentence_of(make_handout.main, monkeypatch)
    assert f"git lists no {make_site.LESSONS}" in said and "use a clone" in said
    assert (tmp_path / "handout" / "course" / "page.md").read_text() == "text"


@pytest.mark.processes
@pytest.mark.parametrize("lists", ["handout", "site", "copies", "machine"])
def test_a_tool_in_a_hook_of_another_repository_asks_about_the_course(
    clone, tmp_path, monkeypatch, lists
):
    for tool in (make_site, spoil_code, this_machine):
        monkeypatch.setattr(tool, "ROOT", clone)
    commit = this_machine.commit()
    subprocess.run(["git", "init", "--quiet", tmp_path / "other"], check=True, timeout=60)
    (tmp_path / "other" / ".git" / "info" / "exclude").write_text("*\n")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "other" / ".git" / "index"))
    if lists == "handout":
        assert make_handout.write_course(tmp_path / "handout" / "course")[0] == 4
    elif lists == "site":
        assert Path("page.md") in make_site.files_of_the_course(clone)
    elif lists == "copies":
        spoil_code.copy_repository(tmp_path / "copy")
        assert (tmp_path / "copy" / "page.md").exists()
    else:
        assert commit == this_machine.commit() and re.fullmatch("[0-9a-f]{12}", commit)


@pytest.mark.processes
def test_a_change_that_is_not_committed_is_named_and_handed_out(clone, tmp_path, capsys):
    copy = tmp_path / "handout" / "course"
    make_handout.write_course(copy)
    assert capsys.readouterr().err == ""
    cells = [nbformat.v4.new_code_cell("my_answer = 1")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), clone / "notebooks" / "02_a.ipynb")
    (clone / 'a "ü" b.md').write_text("newer")
    subprocess.run(["git", "add", "--all"], cwd=clone, check=True, timeout=60)
    shutil.rmtree(copy)
    make_handout.write_course(copy)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and all("git stash -- " in line for line in said)
    assert 'a "ü" b.md is handed out with changes' in said[0]
    assert "notebooks/02_a.ipynb is handed out with changes" in said[1]
    assert "my_answer" in (copy / "notebooks" / "02_a.ipynb").read_text()


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.processes
def test_on_a_full_disk_the_older_handout_stays(clone, tmp_path, monkeypatch):
    handout = tmp_path / "handout"
    make_handout.write_course(handout / "course")
    make_handout.commit(handout / "course")
    (clone / "page.md").write_text("newer")
    monkeypatch.setattr(shutil, "copyfile", full)
    assert "No space left on device" in sentence_of(make_handout.main, monkeypatch)
    assert (handout / "course" / "page.md").read_text() == "text"
    assert not list(handout.glob(".*"))
    monkeypatch.undo()
    (made := tmp_path / "made").mkdir()
    make_site.replace_content(handout / "course", made, keep=[".git"])
    assert os.listdir(handout / "course") == [".git"], (
        "a page that the course no longer has is removed"
    )


@pytest.mark.parametrize("into", ["loop", "loop/below"])
def test_a_site_is_not_written_into_a_loop_of_links(tmp_path, monkeypatch, into):
    (tmp_path / "loop").symlink_to("loop")
    said = sentence_of(make_site.main, monkeypatch, "--static", "--into", tmp_path / into)
    assert str(tmp_path / into) in said


def test_two_sites_are_not_made_in_one_folder_at_once(tmp_path, monkeypatch):
    words = "--static", "--of", tmp_path, "--into", tmp_path / "site"
    said = []

    def write_pages(made, course):
        monkeypatch.setattr(make_site, "write_pages", lambda *_: None)
        said.append(sentence_of(make_site.main, monkeypatch, *words))

    (tmp_path / make_site.LESSONS).parent.mkdir()
    (tmp_path / make_site.LESSONS).touch()
    monkeypatch.setattr(make_site, "write_pages", write_pages)
    monkeypatch.setattr(sys, "argv", ["make_site.py", *map(str, words)])
    assert make_site.main() == 0 and "--into" in said[0]
    assert os.listdir(tmp_path / "site") == [make_site.SCRIPTS], "no lock is published"


def test_a_new_site_takes_the_place_of_an_older_one_without_a_copy(tmp_path, monkeypatch):
    site = tmp_path / "site"
    for name in ("gone.html", f"docs/{make_site.SCRIPTS}.html", "index.html", *(
        f"{make_site.SCRIPTS}/{own}" for own in make_site.OWN_SCRIPTS
    )):  # fmt: skip
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text("older")
    (site / ".git").mkdir()
    (site / "CNAME").write_text("of its host")

    def write_pages(made, course):
        assert (site / "index.html").read_text() == "older", "it stays until the new one is whole"
        (made / "index.html").write_text("newer")
        monkeypatch.setattr(shutil, "copyfile", full)

    course = make_site.Course(tmp_path, [], set(), {}, False)
    monkeypatch.setattr(make_site, "read_course", lambda *_: course)
    monkeypatch.setattr(make_site, "lessons_of", lambda course: [])
    monkeypatch.setattr(make_site, "write_pages", write_pages)
    monkeypatch.setattr(sys, "argv", ["make_site.py", "--static", "--into", str(site)])
    assert inspect.unwrap(make_site.main)() == 0
    assert sorted(os.listdir(site)) == [".git", "CNAME", "index.html", make_site.SCRIPTS]
    assert (site / "index.html").read_text() == "newer"


HALF = "print('\\ud800')"  # half a letter: JSON may have it, and no file in UTF-8


@pytest.mark.processes
def test_half_a_letter_in_a_notebook_stays_in_the_handout(clone, tmp_path, monkeypatch):
    lesson = Path("notebooks", "02_a.ipynb")
    text = nbformat.writes(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(HALF)]))
    (clone / lesson).write_text(text.replace(r"\\ud800", r"\ud800"))
    make_handout.write_course(tmp_path / "handout" / "course")
    (cell,) = exercises.notebook_of(tmp_path / "handout" / "course" / lesson).cells
    assert cell.source == "print('\ud800')"


def test_a_notebook_of_another_program_without_ids_is_a_page(tmp_path, monkeypatch):
    path = tmp_path / "notebooks" / "zz.ipynb"
    path.parent.mkdir()
    text = "# T\n\nGuess first."
    output = {"output_type": "stream", "name": "stdout", "text": "the answer"}
    code = {**CELL, "execution_count": 1, "outputs": [output]}
    cells = [{"cell_type": "markdown", "metadata": {}, "source": text}, code, code]
    path.write_text(json.dumps({**json.loads(NOTEBOOK), "cells": cells}))
    exporter = make_site.HTMLExporter(template_name="basic")
    course = make_site.Course(tmp_path, [], set(), {}, False)
    page = make_site.body_of(path.relative_to(tmp_path), exporter, course)
    assert page.count("Show the output") == 2
    monkeypatch.setattr(answers, "NOTEBOOKS", path.parent)
    monkeypatch.setattr(sys, "argv", ["answers.py"])
    assert answers.main() == 0
    assert exercises.notebook_of(path).cells[1].metadata.jupyter.outputs_hidden


def test_half_a_letter_in_a_notebook_costs_no_site_and_no_other_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(make_site, "index_page", lambda exporter, course: "")
    for name, text in {"docs/lessons.md": "", "CITATION.cff": "", "site/live/x": ""}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    text = nbformat.writes(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(HALF)]))
    (tmp_path / "02_a.ipynb").write_text(text.replace(r"\\ud800", r"\ud800"))
    files = [Path("02_a.ipynb"), Path("docs/lessons.md")]
    folders = {Path("."), Path("docs")}
    course = make_site.Course(tmp_path, files, folders, {f: f.name for f in files}, False)
    course.titles.update({make_site.INDEX: "course", make_site.LOST: "lost"})
    make_site.write_pages(tmp_path / "site", course)
    assert r"\ud800" in (tmp_path / "site" / "02_a.html").read_text()
    namespace = {}
    source = "%%writefile {program}\nprint('\ud800')"
    make_submission.prepare(source, "<cell 1>", namespace, True, tmp_path)
    assert namespace["program"].exists()


@pytest.mark.processes
def test_a_second_handout_at_the_same_time_is_told_to_wait(clone, tmp_path, monkeypatch):
    with lock_folder("the handout", tmp_path / "handout")[0]:
        assert "another job is saving there" in sentence_of(make_handout.main, monkeypatch)
    assert not (tmp_path / "handout" / "course").exists()


@pytest.mark.processes
@pytest.mark.parametrize("how", ["a folder", "a link"])
def test_a_handout_replaces_nothing_but_a_handout(clone, tmp_path, monkeypatch, how):
    copy, mine = tmp_path / "handout" / "course", tmp_path / "handout" / "mine"
    mine.mkdir(parents=True)
    (mine / "thesis").touch()
    mine.rename(copy) if how == "a folder" else copy.symlink_to("mine")
    assert "not an older copy" in sentence_of(make_handout.main, monkeypatch)
    assert (copy / "thesis").exists()


def test_git_s_own_files_are_no_pages_of_a_copy(tmp_path):
    (tmp_path / ".git" / "logs").mkdir(parents=True)
    for name in (".git/logs/HEAD", "page.md"):
        (tmp_path / name).touch()
    assert [file.name for file in make_site.files_of_the_course(tmp_path)] == ["page.md"]


def test_a_pipe_or_what_is_no_folder_is_one_sentence_for_a_tool(tmp_path, monkeypatch, capsys):
    os.mkfifo(tmp_path / "pipe")
    said = sentence_of(write_measurements.main, monkeypatch, tmp_path / "pipe")
    assert "is not a regular file" in said
    words = ["make_site.py", "--of", str(tmp_path / "pipe"), "--into", str(tmp_path / "site")]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit):
        make_site.main()
    assert "pipe is not a folder" in capsys.readouterr().err
    assert not (tmp_path / "site").exists()


@pytest.mark.parametrize("tool", [answers, minutes])
def test_a_notebook_stays_whole_when_the_disk_is_full(tmp_path, monkeypatch, tool):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    lesson = tmp_path / "00_start_here.ipynb"
    content = (ROOT / "notebooks" / lesson.name).read_bytes()
    lesson.write_bytes(content)
    monkeypatch.setattr(answers, "NOTEBOOKS", tmp_path)
    monkeypatch.setattr(minutes, "LESSONS", [lesson])
    monkeypatch.setattr(os, "replace", full)
    said = sentence_of(tool.main, monkeypatch, *["--write"] * (tool is minutes))
    assert said.startswith(
        f"{tool.__name__}.py: {lesson} cannot be used (No space left on device); "
    )
    assert lesson.read_bytes() == content and list(tmp_path.iterdir()) == [lesson]


@pytest.mark.parametrize("tool", [answers, minutes])
def test_a_flag_that_a_tool_lacks_is_not_left_unread(monkeypatch, tool):
    monkeypatch.setattr(answers, "NOTEBOOKS", ROOT / "nowhere")
    assert "--wirte" in sentence_of(tool.main, monkeypatch, "--wirte")


CUDA = '{"machine": {"device": "cuda", "small": false, "nodes": 1}, "parts": %s}'


@pytest.mark.parametrize("text", ["[]", '{"machine": [], "parts": 1}', CUDA % "[{}]", CUDA % 3])
def test_what_the_acceptance_does_not_write_is_put_on_no_page(tmp_path, monkeypatch, text):
    (tmp_path / "accept.json").write_text(text)
    before = (ROOT / write_measurements.PAGE).read_bytes()
    said = sentence_of(write_measurements.main, monkeypatch, tmp_path / "accept.json")
    assert "accept.json is not what tools/accept.py writes" in said
    assert (ROOT / write_measurements.PAGE).read_bytes() == before


@pytest.mark.processes
def test_a_wall_goes_on_and_a_copy_is_whole_when_nobody_reads_what_they_print(tmp_path):
    (tmp_path / "progress").mkdir()
    (tmp_path / "submissions").mkdir()
    words = ["wall.py", "progress", "--into", "wall"]
    with open("/dev/full", "w") as full:
        shown = subprocess.Popen(
            [sys.executable, ROOT / "tools" / words[0], *words[1:]],
            cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert "standard output was not written" in shown.stderr.readline()
            wait_for(tmp_path / "wall" / "wall_data.js")
            assert shown.poll() is None
        finally:
            shown.kill()
            shown.communicate(timeout=20)
        copied = subprocess.run(
            [sys.executable, ROOT / "source_code/copy_template.py", "gpipe.py", "mine"],
            cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip
        graded = subprocess.run(
            [sys.executable, ROOT / "tools/grade_submissions.py", "submissions"],
            cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip
    for ended in (copied, graded):
        assert ended.returncode == 1 and ended.stderr.count("\n") == 1
    assert (tmp_path / "submissions" / "grades.csv").exists()
    assert (tmp_path / "mine" / "requirements.txt").exists()  # the last file


@pytest.mark.processes
def test_a_sweep_is_collected_when_nobody_reads_what_is_printed_and_an_element_is_damaged(tmp_path):
    timeline = simulate(build_schedule("gpipe", 2, 4), Costs())
    (tmp_path / "4.json").write_text(to_chrome_trace(timeline))
    (tmp_path / "8.json").mkdir()
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, ROOT / "slurm/collect_sweep.py", tmp_path],
            env={**os.environ, "MPLBACKEND": "nowhere"}, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100,
        )  # fmt: skip
    assert ended.returncode == 1 and ended.stderr.count("\n") == 2, ended.stderr
    assert "standard output was not written" in ended.stderr and "skipped: " in ended.stderr
    assert "| 4 |" in (tmp_path / "sweep.md").read_text()


def test_slides_of_a_missing_lesson_are_refused_before_any_are_made(tmp_path, monkeypatch):
    monkeypatch.setattr(make_slides, "SLIDES", tmp_path / "slides")
    assert "no lesson 99;" in sentence_of(make_slides.main, monkeypatch, "02", "99")
    assert not (tmp_path / "slides").exists()


def wait_for(path):
    deadline = time.monotonic() + 30
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert path.exists()
