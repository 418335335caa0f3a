"""The handout: a course that runs, without solutions, and without the number below a question to guess it."""

import ast
import html
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import answers
import make_handout
import nbformat
import pytest

from course.launch import ROOT
from course.source import read_source

pytestmark = pytest.mark.further  # a whole copy
CHECKS = "source_code/course/checks"


@pytest.fixture(scope="module")
def handout(tmp_path_factory):
    """The folder of the copied course."""
    folder = tmp_path_factory.mktemp("handout") / "course"
    copied, hidden = make_handout.write_course(folder)
    assert copied > 200 and hidden > 30
    return folder


@pytest.fixture(scope="module")
def site(handout):
    """The folder of the handout's website."""
    folder = handout.parent / "site"
    command = [sys.executable, ROOT / "tools" / "make_site.py", "--static"]
    words = [*command, "--of", handout, "--into", folder]
    made = subprocess.run(words, check=True, capture_output=True, text=True, timeout=180)
    assert "skipped: " not in made.stdout, "a file or a link of the handout"
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
def test_the_website_of_the_handout_has_every_lesson_and_no_solution(site):
    pages = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    assert {f"notebooks/{name[:-6]}.html" for name in notebooks_of(ROOT)} <= pages
    assert not [page for page in pages if "solutions" in page or "instructors" in page]
    index = (site / "live" / "search_index.js").read_text()
    assert "Right: legal;" not in index


# Checks that compute the right answer as an exercise asks for it.
IN_CHECKS = {
    "course/checks/lesson_03.py": ["most_microbatches"],
    "course/checks/lesson_05.py": ["best_chunks"],
    "course/checks/lesson_11c.py": ["right_times"],
}


def functions_of(text):
    """{name, or Class.name: the function} of a file of Python."""
    found = {}
    for node in ast.parse(text).body:
        for inner in node.body if isinstance(node, ast.ClassDef) else ():
            found[f"{node.name}.{getattr(inner, 'name', '')}"] = inner
        found[getattr(node, "name", "")] = node
    return found


def bodies_of_answers():
    """{name of an answer: the lines of its body, without their common indentation}."""
    bodies = {}
    for file, names in {**make_handout.ANSWERS, **IN_CHECKS}.items():
        text = (ROOT / "source_code" / file).read_text()
        functions = functions_of(text)
        for name in names:
            function = functions[name]
            described = ast.get_docstring(function)
            first = function.body[1].lineno if described else function.lineno
            lines = text.splitlines()[first - 1 : functions[name].end_lineno]
            bodies[f"{file}, {name}"] = textwrap.dedent("\n".join(lines))
    return bodies


def texts_of(folder):
    """(path, text) of all files, without tags, as a reader or a search sees them."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".py", ".md", ".ipynb", ".html", ".js", ".json", ".txt", ".diff"):
            text = path.read_text()
            if path.suffix == ".ipynb":
                cells = nbformat.read(path, as_version=4).cells
                outputs = [o for cell in cells for o in cell.get("outputs", ())]
                shown = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in outputs]
                text = "\n".join([*(cell.source for cell in cells), *shown])
            elif path.suffix == ".html":
                text = html.unescape(re.sub(r"<[^>]*>", "", text))
            elif path.suffix == ".js":
                text = text.replace("\\n", "\n").replace('\\"', '"')
            yield path, text


def spaced(text):
    """`text` with one space for all that is between two words."""
    return " ".join(text.split())


@pytest.mark.processes
def test_no_file_page_or_index_has_the_text_of_an_answer(handout, site):
    bodies = {name: spaced(body) for name, body in bodies_of_answers().items()}
    here = [spaced(text) for _, text in texts_of(ROOT / "source_code")]
    assert not [name for name, body in bodies.items() if not any(body in text for text in here)]
    for folder in (handout, site):
        for path, text in texts_of(folder):
            seen = spaced(text)
            assert not [name for name, body in bodies.items() if body in seen], path


@pytest.mark.processes
def test_what_is_packed_runs_and_lessons_find_its_text(handout):
    for name in ("split_backward.py", "pipeline.py 1f1b --verify", "weight_stash.py --verify"):
        command = [sys.executable, *f"source_code/small/{name}".split()]
        done = subprocess.run(command, cwd=handout, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and "largest difference" in done.stdout, done.stderr
    checks = [file.relative_to(ROOT / "source_code") for file in (ROOT / CHECKS).glob("*.py")]
    packed = [file for file in checks if file.name != "puzzles.py"]
    for file in [*make_handout.ANSWERS, *packed]:
        assert make_handout.is_packed(Path("source_code", file))
        text = (ROOT / "source_code" / file).read_text()
        assert read_source(handout / "source_code" / file) == text
        assert read_source(ROOT / "source_code" / file) == text
    code = "from course.building.own_file import assemble; print(assemble([]))"
    command = [sys.executable, "-c", code]
    whole = subprocess.run(command, cwd=handout / "source_code", capture_output=True, text=True)
    assert whole.stdout[:-1] == (ROOT / "source_code/small/pipeline.py").read_text()
    code = (
        "from course.building import single_messages; from course.checks import build_steps;"
        "build_steps.one_f_one_b_for_nccl(single_messages.one_f_one_b_step)"
    )
    command = [sys.executable, "-c", code]
    lesson_03 = subprocess.run(command, cwd=handout / "source_code", capture_output=True, text=True)
    assert lesson_03.stdout.startswith("Not yet: deadlock: rank 2 waits")
    code = (
        "from broken.pipelines.faults import Cured; from course.checks import lesson_03;"
        "lesson_03.most_microbatches(lambda *given: Cured.tied_gradient(1, 2))"
    )
    command = [sys.executable, "-c", code]
    options = {"cwd": handout / "source_code", "capture_output": True, "text": True, "timeout": 60}
    asked = subprocess.run(command, **options)
    assert "Not yet: gpipe, 4 ranks, room for 4, 64 available: you say 3;" in asked.stdout


def test_what_only_the_course_has_takes_no_end_of_another_line_along():
    def kept(text):
        return make_handout.without_links(text, Path("README.md"))

    only = "<!-- course only --> more\nand more<!-- end -->"
    assert kept(f"One.{only}\n\nTwo.") == "One.\n\nTwo."
    assert kept("- one<!-- course only -->\n- two<!-- end -->\n- three") == "- one\n- three"
    assert kept(f"One.\n{only}\nTwo.") == "One.\nTwo."


@pytest.mark.processes
def test_what_the_handout_advertises_is_there(handout):
    makefile = (handout / "Makefile").read_text()
    listed = subprocess.run(["make"], cwd=handout, capture_output=True, text=True, check=True)
    targets = set(re.findall(r"^make ([a-z-]+)", listed.stdout, re.M))
    assert targets == set(make_handout.TARGETS)
    used = set(re.findall(r"\$\(([A-Z_]+)\)", makefile))
    assert used - set(re.findall(r"^([A-Z_]+) \??=", makefile, re.M)) == {
        "CURDIR", "LAB_FLAGS", "MAKEFILE_LIST", "WHEELS"
    }  # fmt: skip
    for named in re.findall(r"\$\(CURDIR\)/([\w./-]+)", makefile):
        assert (handout / named).exists(), f"Makefile: {named}"
    for path in [*handout.rglob("*.md"), *handout.rglob("*.ipynb"), *handout.glob("slurm/*")]:
        if path.is_dir():
            continue
        text = path.read_text()
        assert "<!-- course only" not in text
        for named in re.findall(r"`make ([a-z-]+)|^make ([a-z-]+)", text, re.M):
            assert set(named) - {""} <= targets, f"{path}: make {named}"
        for file in re.findall(r"(?<![\w/])(?:tools|slurm|docs|tests)/[\w/-]+\.\w+", text):
            assert (handout / file).exists() or "own-models" in file, f"{path}: {file}"


@pytest.mark.processes
def test_a_bundle_has_the_handout_and_no_history_of_the_course(handout):
    def git(*words, where=handout):
        return subprocess.run(
            ["git", "-C", where, *words], capture_output=True, text=True, check=True, timeout=60
        ).stdout

    make_handout.commit(handout)
    copy = handout.parent / "cloned"
    git("clone", "--quiet", handout.with_suffix(".bundle"), copy)
    assert (copy / "notebooks/02_gpipe.ipynb").read_bytes()
    make_handout.write_course(handout)
    (handout / "slurm" / "site.env").write_text("COURSE_GPUS_PER_NODE=0\n")
    make_handout.commit(handout)
    git("pull", "--quiet", where=copy)
    assert (copy / "slurm" / "site.env").read_text() == "COURSE_GPUS_PER_NODE=0\n"
    assert git("rev-list", "--all", "--count", where=copy) == "2\n"
    assert "solutions" not in git("ls-files", where=copy)


@pytest.mark.processes
def test_a_handout_that_a_hook_of_git_makes_is_committed_in_its_own_repository(
    tmp_path, monkeypatch
):
    def commits(where):
        words = ["git", "-C", where, "rev-list", "--all", "--count"]
        return subprocess.run(words, capture_output=True, text=True, timeout=60).stdout

    course, copy = tmp_path / "course", tmp_path / "copy"
    for folder in (course, copy):
        folder.mkdir()
        (folder / "page.md").write_text("text")
    make_handout.commit(course)
    with monkeypatch.context() as hook:
        hook.setenv("GIT_DIR", str(course / ".git"))
        hook.setenv("GIT_INDEX_FILE", str(course / ".git" / "index"))
        make_handout.commit(copy)
    assert (commits(course), commits(copy)) == ("1\n", "1\n")


@pytest.mark.processes
def test_a_copy_with_a_damaged_history_is_not_committed_into_the_repository_around_it(tmp_path):
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True, timeout=60)
    (tmp_path / "copy" / ".git").mkdir(parents=True)
    (tmp_path / "copy" / "page.md").write_text("text")
    make_handout.commit(tmp_path / "copy")
    around = ["git", "-C", tmp_path, "rev-list", "--all", "--count"]
    assert subprocess.run(around, capture_output=True, timeout=60).stdout == b"0\n"
    assert make_handout.git(tmp_path / "copy", "ls-files") == "page.md\n"


@pytest.mark.processes
def test_what_someone_has_changed_in_an_older_copy_is_not_lost(tmp_path):
    page, new = tmp_path / "page.md", tmp_path / "notes.md"
    page.write_text("text")
    make_handout.commit(tmp_path)
    make_handout.check_is_copy(tmp_path)
    for file in (page, new):
        file.write_text("mine")
        with pytest.raises(SystemExit, match=f"{file.name} in .* was changed there"):
            make_handout.check_is_copy(tmp_path)
        make_handout.git(tmp_path, "add", file.name)  # and not committed
        with pytest.raises(SystemExit, match=f"{file.name} in .* was changed there"):
            make_handout.check_is_copy(tmp_path)
        make_handout.git(tmp_path, "config", "status.showUntrackedFiles", "no")
        make_handout.git(tmp_path, "commit", "--quiet", "--message", "Mine")
        make_handout.check_is_copy(tmp_path)
    (tmp_path / ".gitignore").write_text("build/\n__pycache__/\n")
    make_handout.commit(tmp_path)
    (tmp_path / "tools" / "__pycache__").mkdir(parents=True)
    (tmp_path / "tools" / "__pycache__" / "a.pyc").write_text("made anew")
    make_handout.check_is_copy(tmp_path)
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "submission_ada.json").write_text("mine")  # git ignores it
    with pytest.raises(SystemExit, match="build/ in .* was changed there"):
        make_handout.check_is_copy(tmp_path)


@pytest.mark.processes
def test_hooks_of_the_user_do_not_look_at_the_handout(tmp_path, monkeypatch):
    hook = tmp_path / "hooks" / "pre-commit"
    hook.parent.mkdir()
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    (tmp_path / "gitconfig").write_text(f"[core]\nhooksPath = {hook.parent}\n")
    (tmp_path / "copy").mkdir()
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    make_handout.commit(tmp_path / "copy")
    assert make_handout.git(tmp_path / "copy", "rev-list", "--all", "--count") == "1\n"


@pytest.mark.processes
def test_a_lock_that_git_has_left_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "course").mkdir()
    make_handout.commit(tmp_path / "course")
    (tmp_path / "course" / ".git" / "index.lock").touch()
    monkeypatch.setattr(make_handout, "HANDOUT", tmp_path)
    monkeypatch.setattr(make_handout, "write_course", lambda folder: (0, 0))
    monkeypatch.setattr("sys.argv", ["make_handout.py"])
    with pytest.raises(SystemExit):
        make_handout.main()
    assert "course/.git/index.lock'" in capsys.readouterr().err


@pytest.mark.processes
def test_an_ignore_list_of_the_user_takes_nothing_from_the_handout(tmp_path, monkeypatch):
    (tmp_path / "ignored").write_text("*.md\n")
    (tmp_path / "gitconfig").write_text(f"[core]\nexcludesFile = {tmp_path / 'ignored'}\n")
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "page.md").write_text("text")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    make_handout.commit(tmp_path / "copy")
    words = ["git", "-C", tmp_path / "copy", "ls-files"]
    assert subprocess.run(words, capture_output=True, timeout=60).stdout == b"page.md\n"


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
    assert make_handout.without_links("[a](b\0c)", lesson) == "[a](b\0c)"
    line = "Solutions are in [solutions/02_gpipe.ipynb](solutions/02_gpipe.ipynb).\n"
    assert make_handout.without_links(line, lesson) == ""


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--statik"], "unrecognized arguments: --statik"),
        (["--static", "--into", "elsewhere"], "leave out --of and --into"),
    ],
)
def test_a_flag_that_it_lacks_is_rejected_before_anything_is_written(
    tmp_path, monkeypatch, capsys, flags, sentence
):
    monkeypatch.setattr(make_handout, "HANDOUT", tmp_path / "handout")
    monkeypatch.setattr(sys, "argv", ["make_handout.py", *flags])
    with pytest.raises(SystemExit, match="2"):
        make_handout.main()
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "handout").exists()
