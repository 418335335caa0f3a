"""The minutes of a lesson follow from its notebook by one rule, and the routes have all they need."""

import ast
import json
import re
from pathlib import Path

import copy_template
import minutes
import pytest

PAGE = minutes.PAGE.read_text()
ROW = r"^\| (\w+) \| \[.*?\]\(\.\./notebooks/([\w.]+)\) \| (\d+) \| (\d+) \| .* \| ([●◐]?) ?\| ([●◐]?) ?\| ([●◐]?) ?\|$"
FURTHER = r"^\| (\w+) \| \[.*?\]\(\.\./notebooks/([\w.]+)\) \| (\d+) \| (\d+) \| [^|]*()()()\|$"
COURSE = {file: (number, *rest) for number, file, *rest in re.findall(ROW, PAGE, re.MULTILINE)}
ROWS = COURSE | {file: (number, *rest) for number, file, *rest in re.findall(FURTHER, PAGE, re.M)}

every_lesson = pytest.mark.parametrize("path", minutes.LESSONS, ids=lambda path: path.stem)


@every_lesson
def test_the_head_of_a_lesson_has_the_minutes_of_the_rule_and_at_most_an_hour(path):
    stated, estimated = minutes.stated_in(path), minutes.minutes_of(path)
    assert stated, "write the head as tools/minutes.py --write does"
    assert stated == estimated, "python tools/minutes.py --write"
    assert stated.lesson + stated.exercises <= 60


@every_lesson
def test_the_list_of_lessons_has_the_minutes_of_the_head(path):
    _, lesson, exercises, *_ = ROWS[path.name]
    assert (int(lesson), int(exercises)) == minutes.stated_in(path)[:2]


@every_lesson
def test_an_exercise_takes_5_to_20_minutes(path):
    for cell in json.loads(path.read_text())["cells"]:
        for title, stated, _ in minutes.exercises_in("".join(cell["source"])):
            assert 5 <= stated <= 20, title


def test_the_hours_of_the_readme_are_those_of_the_course_with_its_exercises():
    readme = (minutes.ROOT / "README.md").read_text()
    stated = re.search(r"the course takes about (\d+) hours", readme)[1]
    spent = sum(int(lesson) + int(exercises) for _, lesson, exercises, *_ in COURSE.values())
    assert int(stated) == round(spent / 60)
    assert spent <= 600, "ten hours, exercises included; take away what is dull or said twice"


def test_the_course_has_at_most_fourteen_lessons_of_40_minutes_and_all_lessons_are_listed():
    assert len(COURSE) <= 14 and {*ROWS} == {path.name for path in minutes.LESSONS}
    assert all(int(lesson) <= 40 for _, lesson, *_ in COURSE.values())


def test_the_hours_of_further_exercises_are_those_that_the_lessons_state():
    words = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight"]
    page = (minutes.ROOT / "docs" / "lessons.md").read_text()
    stated = re.search(r"further exercises of all lessons take another (\w+) hours", page)[1]
    more = sum(minutes.stated_in(path).more for path in minutes.LESSONS)
    assert words.index(stated) == round(more / 60)


@pytest.mark.parametrize("route", range(3), ids=["90 minutes", "one day", "the course"])
def test_a_route_contains_all_that_its_lessons_build_on(route):
    taken = {file for file, row in ROWS.items() if row[3 + route]}
    for file in (file for file in taken if ROWS[file][3 + route] == "●"):
        cells = json.loads((minutes.ROOT / "notebooks" / file).read_text())["cells"]
        builds_on = re.search(r"\*\*Builds on:\*\* (.*)", "".join(cells[0]["source"]))[1]
        assert set(re.findall(r"\]\((\d\w+\.ipynb)\)", builds_on)) <= taken, file


def test_the_rule_counts_words_lines_and_cells_and_leaves_the_sources_out(tmp_path):
    prose = (
        "word " * 1505
        + "\n\n**1. A title** (10 minutes). "
        + "word " * 99
        + "\n\n**2. Another** (5 more minutes). "
    )
    shown = {"data": {"text/markdown": ["`a.py`\n", "```python\n", "one\n", "two\n", "```"]}}
    cells = [
        {"cell_type": "markdown", "source": ["<!-- slide: T -->![alt](a.svg)", prose]},
        {"cell_type": "code", "source": ["a = 1\n", "\n", "b = 2"], "outputs": [shown]},
        *[{"cell_type": "code", "source": ["c\n"] * 14, "outputs": []}] * 25,
    ]
    path = tmp_path / "99_x.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    # 1505 words are 10 minutes, 354 lines 23.6, 26 cells 5.2: in all 38.8.
    assert minutes.minutes_of(path) == (40, 10, 5)


def test_a_bare_copy_is_read_in_the_hours_that_its_page_states_and_each_in_a_day():
    page = (minutes.ROOT / "docs" / "your-own-model.md").read_text()
    sentence = re.search(r"Reading a bare copy takes (.*?)\. ", page)[1]
    stated = {
        script: int(hours) for hours, script in re.findall(r"(\d) hours? for `(.*?)`", sentence)
    }
    assert stated["gpipe.py"] == 1 and max(stated.values()) <= 8 and len(stated) == 4
    for script, hours in stated.items():
        modules = copy_template.modules_of(Path(script), copy_template.LAB + copy_template.GUARD)
        read = [minutes_to_read(module.text_without(module.left_out)) for module in modules]
        assert round(sum(read) / 60) == hours, (script, sum(read))


def minutes_to_read(text):
    """The rule of the lessons: docstrings and comments are words, the other lines are code."""
    places = (ast.Module, ast.ClassDef, ast.FunctionDef)
    documented = [node for node in ast.walk(ast.parse(text)) if isinstance(node, places)]
    prose = [node.body[0] for node in documented if ast.get_docstring(node, clean=False)]
    within = {number for node in prose for number in range(node.lineno, node.end_lineno + 1)}
    words = " ".join(node.value.value for node in prose).split()
    lines = 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip().startswith("#"):
            words += line.strip(" #").split()
        elif line.strip() and number not in within:
            lines += 1
    return lines / minutes.LINES + len(words) / minutes.WORDS
