"""One glossary serves all lessons: each term is in the lesson that it names, and not before."""

import json
import re
from pathlib import Path

import pytest

from pipeline.schedules import SCHEDULES

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "glossary.md").read_text()
TABLE = PAGE.partition("|---|---|---|\n")[2].partition("\n\n")[0]
NAMES = PAGE.partition("## One schedule, seven names")[2]
ROWS = re.findall(r"^\| (.+?) \| (.+?) \| \[(\w+)\]\((.+?)\) \|$", TABLE, re.MULTILINE)
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def paragraphs_of(path):
    """The prose of a lesson up to its sources, paragraph by paragraph, without code."""
    cells = json.loads(path.read_text())["cells"]
    prose = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    prose = re.sub(r"^ *```.*?^ *```", "", prose, flags=re.MULTILINE | re.DOTALL)
    return prose.split("\n## Sources")[0].split("\n\n")


LESSONS = {path.stem.split("_")[0]: paragraphs_of(path) for path in NOTEBOOKS}


def uses(term, paragraph):
    pattern = re.escape(term).replace(r"\ ", "[ -]")
    return re.search(rf"(?<![\w-]){pattern}", paragraph, re.IGNORECASE)


def words_of(row):
    return [(term.removesuffix(" phase"), row[2]) for term in row[0].split(", ")]


TERMS = [pair for row in ROWS for pair in words_of(row)]


def test_the_terms_are_in_the_order_of_the_alphabet_and_each_is_there_once():
    names = [row[0] for row in ROWS]
    assert len(names) == len(TABLE.splitlines()) > 70
    assert names == sorted(names, key=lambda name: name.lower().replace("-", " "))
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("term, lesson", TERMS)
def test_a_term_is_introduced_in_its_lesson_and_an_earlier_one_first_says_which_that_is(
    term, lesson
):
    assert any(uses(term, paragraph) for paragraph in LESSONS[lesson])
    for number, paragraphs in LESSONS.items():
        first = next((paragraph for paragraph in paragraphs if uses(term, paragraph)), None)
        if number < lesson and first:
            assert re.search(rf"lessons? (\d\d.*)?{lesson}\b", first, re.IGNORECASE), (
                f"lesson {number} uses '{term}' before lesson {lesson}: {first[:200]}"
            )


def test_each_term_links_the_lesson_that_introduces_it_and_every_lesson_introduces_one():
    paths = {path.stem.split("_")[0]: f"../notebooks/{path.name}" for path in NOTEBOOKS}
    assert [link for *_, link in ROWS] == [paths[lesson] for _, _, lesson, _ in ROWS]
    assert {lesson for _, _, lesson, _ in ROWS} == set(paths)


def test_every_schedule_has_a_row_of_names_and_interleaved_1f1b_has_seven():
    rows = dict(re.findall(r"^\| `(.+?)` \| (.+?) \|", NAMES, re.MULTILINE))
    assert list(rows) == list(SCHEDULES), "docs/glossary.md has a row of names for each schedule"
    assert len(re.split(r", | or ", rows["interleaved-1f1b"])) == 6 + 1


def last_links(path):
    """(before the colon, file) of each link in a lesson's last line."""
    last = json.loads(path.read_text())["cells"][-1]["source"][-1]
    return re.findall(
        r"\[(Previous|Next|Further|Back to the course|Glossary)[^]]*\]\((.*?)\)", last
    )


def test_the_last_line_of_a_lesson_leads_along_the_course_and_to_the_glossary():
    course, further = re.split(
        "^## Further lessons", (ROOT / "docs" / "lessons.md").read_text(), flags=re.M
    )
    course, further = (
        re.findall(r"\]\(\.\./notebooks/(\d[\w.]*)\)", part) for part in (course, further)
    )
    left_to = []
    for number, name in enumerate(course):
        links = last_links(ROOT / "notebooks" / name)
        left_to += [(target, name) for word, target in links if word == "Further"]
        along = [(word, target) for word, target in links if word in ("Previous", "Next")]
        before = [("Previous", course[number - 1])] if number else []
        assert along == before + [("Next", after) for after in course[number + 1 : number + 2]]
        assert links[-1] == ("Glossary", "../docs/glossary.md")
    assert sorted(target for target, _ in left_to) == sorted(further)
    for name, home in left_to:
        back = [("Back to the course", home), ("Glossary", "../docs/glossary.md")]
        assert last_links(ROOT / "notebooks" / name) == back
