"""One glossary serves all lessons: each term is in the lesson that it names, and not before."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROWS = re.findall(
    r"^\| (.+?) \| (.+?) \| (\d\d) \|$", (ROOT / "GLOSSARY.md").read_text(), re.MULTILINE
)


def paragraphs_of(path):
    """The prose of a lesson up to its sources, paragraph by paragraph, without code."""
    cells = json.loads(path.read_text())["cells"]
    prose = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    prose = re.sub(r"^ *```.*?^ *```", "", prose, flags=re.MULTILINE | re.DOTALL)
    return prose.split("\n## Sources")[0].split("\n\n")


LESSONS = {p.stem[:2]: paragraphs_of(p) for p in sorted((ROOT / "notebooks").glob("*.ipynb"))}


def uses(term, paragraph):
    pattern = re.escape(term).replace(r"\ ", "[ -]")
    return re.search(rf"(?<![\w-]){pattern}", paragraph, re.IGNORECASE)


def words_of(row):
    return [(term.removesuffix(" phase"), row[2]) for term in row[0].split(", ")]


TERMS = [pair for row in ROWS for pair in words_of(row)]


def test_the_terms_are_in_the_order_of_the_alphabet_and_each_is_there_once():
    names = [term for term, _, _ in ROWS]
    assert len(names) > 30
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
            assert re.search(rf"lessons? (\d\d.*)?{lesson}", first, re.IGNORECASE), (
                f"lesson {number} uses '{term}' before lesson {lesson}: {first[:200]}"
            )
