"""The handout: a course that runs, without solutions, and without the number below a question to guess it."""

import json
import re
import subprocess
import sys

import answers
import make_handout
import nbformat
import pytest

from course.launch import ROOT

pytestmark = pytest.mark.further  # a whole copy


@pytest.fixture(scope="module")
def handout(tmp_path_factory):
    """The folder of the copied course."""
    folder = tmp_path_factory.mktemp("handout") / "course"
    copied, hidden = make_handout.write_course(folder)
    assert copied > 200 and hidden > 30
    return folder


def notebooks_of(folder):
    return {
        p.name: nbformat.read(p, as_version=4) for p in sorted(folder.glob("notebooks/*.ipynb"))
    }


@pytest.mark.processes
def test_no_solution_and_no_page_for_instructors_is_in_it(handout):
    names = [path.relative_to(handout).as_posix() for path in handout.rglob("*")]
    assert not [name for name in names if re.search(r"solutions|instructors|^tests/", name)]
    assert {"README.md", "Makefile", "source_code/gpipe.py", "notebooks/02_gpipe.ipynb"} <= {*names}
    for notebook in notebooks_of(handout).values():
        assert '"Right: ' not in json.dumps(notebook)


@pytest.mark.processes
def test_below_a_question_to_guess_there_is_no_output_and_elsewhere_there_is_what_was(handout):
    there, here = notebooks_of(handout), notebooks_of(ROOT)
    hidden = 0
    for name, notebook in there.items():
        for left, whole in zip(notebook.cells, here[name].cells, strict=True):
            if left.cell_type == "code":
                assert left.source == whole.source
                assert left.outputs in ([], whole.outputs)
                hidden += left.outputs != whole.outputs
    assert hidden > 30
    cells = there["12_your_own_schedule.ipynb"].cells
    asked = next(
        i
        for i, cell in enumerate(cells)
        if "`ahead`" in cell.source and "milliseconds" in cell.source
    )
    assert "for ahead in" in cells[asked + 1].source and cells[asked + 1].outputs == []


@pytest.mark.processes
def test_no_link_leads_to_what_is_left_out(handout):
    for path in [*handout.rglob("*.md"), *handout.rglob("*.ipynb")]:
        for link in re.findall(r"\]\((?![a-z]+:)([^)#\s]+)", path.read_text()):
            target = (path.parent / link).resolve()
            if target.is_relative_to(handout):
                assert not make_handout.is_left_out(target.relative_to(handout)), f"{path}: {link}"


@pytest.mark.processes
def test_the_website_of_the_handout_has_every_lesson_and_no_solution(handout, tmp_path):
    command = [sys.executable, ROOT / "tools" / "make_site.py", "--static"]
    command += ["--of", handout, "--into", tmp_path / "site"]
    subprocess.run(command, check=True, capture_output=True, timeout=180)
    pages = {path.relative_to(tmp_path / "site").as_posix() for path in tmp_path.rglob("*.html")}
    assert {f"notebooks/{name[:-6]}.html" for name in notebooks_of(ROOT)} <= pages
    assert not [page for page in pages if "solutions" in page or "instructors" in page]
    index = (tmp_path / "site" / "live" / "search_index.js").read_text()
    assert "Right: legal;" not in index


@pytest.mark.parametrize(
    ("prose", "asks"),
    [
        ("Some text.\n\nHow long does a step take?", True),
        ("Before you run the next cell, write down a number.", True),
        ("Why? Because it waits.", False),
        ("A question?\n\nAnd its answer, with the cell that shows it.", False),
    ],
)
def test_a_question_at_the_end_asks_for_a_guess(prose, asks):
    assert answers.asks_for_a_guess(prose) is asks


def test_a_link_to_a_solution_becomes_its_words():
    text = "See [the solution](solutions/02_gpipe.ipynb#x) and [lesson 03](03_1f1b.ipynb).\n"
    lesson = make_handout.Path("notebooks/02_gpipe.ipynb")
    assert make_handout.without_links(text, lesson) == (
        "See the solution and [lesson 03](03_1f1b.ipynb).\n"
    )
    line = "Solutions are in [solutions/02_gpipe.ipynb](solutions/02_gpipe.ipynb).\n"
    assert make_handout.without_links(line, lesson) == ""
