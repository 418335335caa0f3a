"""Lessons in hosted notebooks: the first cell, what it fetches and installs, the links to hosts."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import parse_qs, urlparse

import architecture
import make_hosted
import preflight
import pytest
import site_index
import torch
from alone import differences, first_output, make_repository, performed, put_alone, with_address
from further import further
from test_machines import brought_along, pinned

from course import hosted, launch
from course.launch import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SHOWN = "someone/their-course"


def code_of(path):
    cells = json.loads(path.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


# What is written, and from where.


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_lesson_begins_with_the_same_folded_cell_and_no_other_cell_finds_the_course(path):
    first, *others = code_of(path)
    address = make_hosted.address_of(ROOT)
    text = make_hosted.first_cell(address)
    assert "".join(first["source"]) == text, "make hosted"
    assert first["metadata"] == make_hosted.FOLDED and first["outputs"] == []
    assert not any("sys.path" in "".join(cell["source"]) for cell in others)
    prepared = make_hosted.prepared(path.read_text(), path.relative_to(ROOT), address)
    assert prepared == path.read_text(), "make hosted"


@pytest.fixture
def copy(tmp_path):
    """A copy of what make_hosted.py reads and writes."""
    for name in (
        "tools",
        "notebooks",
        "source_code/files",
        "source_code/guard",
        "source_code/pipeline",
    ):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "CITATION.cff", "Makefile", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def make(copy, *words):
    command = ["make", "hosted", f"PYTHON={sys.executable}", *words]
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    return subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, timeout=60
    )


def links_in(text):
    """{name: address} of the row of links in a page; {} without one."""
    rows = re.findall(make_hosted.ROW, text, re.M)
    assert len(rows) <= 1
    return dict(re.findall(r"\[([^]]+)\]\(([^)]+)\)", rows[0])) if rows else {}


def assert_links(text, notebook):
    """Each host's form of a link, as its documentation gives it."""
    links = {name: urlparse(link) for name, link in links_in(text).items()}
    assert set(links) == {"Colab", "Kaggle", "Binder", "a dev container"}
    assert all(link.scheme == "https" for link in links.values())
    file = f"{SHOWN}/blob/main/{notebook}"
    assert links["Colab"][1:3] == ("colab.research.google.com", f"/github/{file}")
    assert links["Kaggle"][1:3] == ("www.kaggle.com", "/kernels/welcome")
    assert parse_qs(links["Kaggle"].query) == {"src": [f"https://github.com/{file}"]}
    assert links["Binder"][1:3] == ("mybinder.org", f"/v2/gh/{SHOWN}/main")
    assert parse_qs(links["Binder"].query) == {"urlpath": [f"lab/tree/{notebook}"]}
    assert links["a dev container"][1:3] == ("codespaces.new", f"/{SHOWN}")


def test_make_hosted_writes_an_address_everywhere_and_another_one_in_its_place(copy):
    for given in ("somebody/else", SHOWN, None):  # None: that of CITATION.cff
        ended = make(copy, *[f"ADDRESS={given}"] * bool(given))
        assert ended.returncode == 0, ended.stderr
    assert make_hosted.address_of(copy) == SHOWN
    assert f'url: "https://github.com/{SHOWN}"\n' in (copy / "CITATION.cff").read_text()
    readme = (copy / "README.md").read_text()
    assert f"git clone https://github.com/{SHOWN} pipeline-course" in readme
    assert_links(readme, "notebooks/00_start_here.ipynb")
    written = [path for path in copy.rglob("*") if path.is_file()]
    assert not any("somebody/else" in path.read_text(errors="replace") for path in written)
    for path in sorted((copy / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        assert_links("".join(cells[0]["source"]), f"notebooks/{path.name}")
        (first,) = filter(make_hosted.is_first, cells)
        assert f'ADDRESS = "https://github.com/{SHOWN}"  #' in "".join(first["source"])
    site = site_index.index_of(False, "", False, False, make_hosted.row_of(SHOWN))
    assert_links(site, "notebooks/00_start_here.ipynb")


def test_without_an_address_there_is_no_link_and_nothing_changes(copy):
    citation = copy / "CITATION.cff"
    citation.write_text(re.sub(make_hosted.URL, "", citation.read_text(), flags=re.M))
    assert make(copy).returncode == 0
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.is_file()}
    assert "no address is known" in make(copy).stdout
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert links_in((copy / "README.md").read_text()) == {}
    for path in (copy / "notebooks").glob("*.ipynb"):
        assert links_in("".join(json.loads(path.read_text())["cells"][0]["source"])) == {}
    site = site_index.index_of(False, "", False, False, make_hosted.row_of(None))
    assert links_in(site) == {}


@pytest.mark.parametrize("address", ["someone", "https://github.com/a/b", "a/b/c", 'a/b"'])
def test_an_address_of_another_form_is_rejected_in_a_sentence(copy, address):
    ended = make(copy, f"ADDRESS='{address}'")
    assert ended.returncode != 0 and "Traceback" not in ended.stderr
    assert f"ADDRESS={address} is not of the form owner/name" in ended.stderr


# What the first cell does.


def run_first_cell(folder, address, **environment):
    """What a notebook in `folder` shows when its first cell runs."""
    text = with_address(make_hosted.FIRST_CELL.read_text(), address)
    command = [sys.executable, "-m", "IPython", "--colors=NoColor", "-c", text]
    ended = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "IPYTHONDIR": str(folder / ".ipython"), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return (ended.stdout + ended.stderr).strip()


@pytest.mark.parametrize(
    ("address", "environment", "reason"),
    [
        ("", {}, "neither beside nor above it"),
        ("https://nowhere.invalid/owner/name", {}, "nowhere.invalid"),
        ("file:///nowhere", {"PATH": ""}, "No such file or directory: 'git'"),
    ],
    ids=["no address", "no network", "no git"],
)
def test_a_course_that_cannot_be_fetched_is_one_sentence(tmp_path, address, environment, reason):
    said = run_first_cell(tmp_path, address, **environment)
    assert reason in said and said.count("\n") == 0 and said.endswith(".")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".ipython"]


def test_in_a_copy_of_the_course_nothing_is_fetched_installed_or_printed():
    for folder in (ROOT, ROOT / "notebooks", ROOT / "notebooks" / "solutions"):
        code = "import subprocess\nsubprocess.run = None\n" + make_hosted.FIRST_CELL.read_text()
        command = [sys.executable, "-c", code + "\nimport course.launch"]
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def found_by(folder):
    """What the first cell, run in a notebook's `folder`, puts into sys.path, and what it says."""
    text = make_hosted.FIRST_CELL.read_text()
    code = f"import sys\nbefore = list(sys.path)\nexec({text!r})\n"
    code += "print([name for name in sys.path if name not in before])"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=60
    )
    return ended.stdout.strip(), ended.stderr


@pytest.fixture
def everybodys():
    """A folder in which everybody may make files, such as /tmp, and a lesson's folder in it."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(os.path.realpath(folder))
        folder.chmod(0o1777)
        (folder / "course" / "notebooks").mkdir(parents=True)
        yield folder


def put_course(code):
    (code / "course").mkdir(parents=True)
    (code / "course" / "hosted.py").write_text("def prepare():\n    pass\n")
    return code


def test_nothing_but_the_course_is_found_for_an_import(everybodys):
    course = put_course(everybodys / "course" / "source_code")
    put_course(everybodys / "source_code")
    for folder in (everybodys / "course", everybodys / "course" / "notebooks"):
        assert found_by(folder) == (str([str(course)]), "")


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root gives away")
@pytest.mark.parametrize(
    ("made", "code", "folder"),
    [
        ("source_code", "source_code", "course"),
        ("source_code", "source_code", "course/notebooks"),
        ("fetched_course", "fetched_course/source_code", "."),
    ],
)
def test_a_course_that_another_user_has_put_into_a_common_folder_is_not_run(
    everybodys, made, code, folder
):
    code = put_course(everybodys / code)
    assert found_by(everybodys / folder) == (str([str(code)]), "")
    os.chown(everybodys / made, 12345, 12345)
    printed, said = found_by(everybodys / folder)
    assert printed == "" and "neither beside nor above it, or is another user's" in said
    everybodys.chmod(0o755)  # where nobody else makes files
    assert found_by(everybodys / folder) == (str([str(code)]), "")


@further
def test_a_lesson_runs_alone_and_a_second_one_beside_it_fetches_nothing(tmp_path, request):
    address = make_repository(tmp_path / "repository")
    folder = tmp_path / "empty"
    cells = performed(put_alone("02_gpipe.ipynb", folder, address), sys.executable)
    said = f"Fetched the course from {address} into the folder fetched_course.\n"
    assert first_output(cells) == said  # all packages are here
    wrong, checked = differences("02_gpipe.ipynb", cells, request.session)
    assert checked and wrong == []
    assert sorted(path.name for path in folder.iterdir()) == ["02_gpipe.ipynb", "fetched_course"]
    assert run_first_cell(folder, "file:///nowhere") == ""


GPUS = (ROOT / "docs" / "two-free-gpus.md").read_text()


@further
def test_the_cells_of_the_page_on_two_gpus_run_one_after_the_other(capfd):
    """On CPU ranks, and the acceptance with its smallest sizes."""
    cells = re.findall(r"^```python\n(.*?)^```", GPUS, re.M | re.S)
    assert "tools/accept.py" in cells[-1]
    flags = "--device cpu --small --ranks 2 --only preflight --out build/two_gpus_accept.json"
    words = '", "'.join(["tools/accept.py", *flags.split()])
    cells[-1] = cells[-1].replace("tools/accept.py", words)
    cells[-1] = cells[-1].replace('"accept.json"', '"two_gpus_accept.json"')
    names = {"run": launch.run}
    for cell in cells:
        exec(cell, names)
    printed = capfd.readouterr().out
    assert names["gpus"] == torch.cuda.device_count()
    assert "gpipe: 2 ranks on " in printed and "the same losses: True" in printed
    assert names["two"].losses[0] == 5.92989
    assert json.loads(printed.strip().splitlines()[-1])["parts"][0]["title"] == "Preflight"


# What it installs.


def third_party(names):
    ours = {path.stem for path in (ROOT / "source_code").iterdir()}
    first = {name.partition(".")[0] for name in names}
    return first - ours - set(sys.stdlib_module_names)


def test_no_lesson_and_no_rank_imports_anything_that_the_first_cell_does_not_bring():
    imported = set()
    for path in [*NOTEBOOKS, *(ROOT / "notebooks" / "solutions").glob("*.ipynb")]:
        for cell in code_of(path):
            text = "".join(line for line in cell["source"] if line[0] not in "%!")
            imported |= third_party(architecture.imported_names(text))
    for path in (ROOT / "source_code").rglob("*.py"):
        imported |= third_party(architecture.imported_names(path.read_text()))
    brings = {"torch", *hosted.NEEDED}
    assert {"torch", "psutil", "transformers"} <= imported
    assert {name.replace("_", "-").lower() for name in imported} <= brought_along(
        brings
    ) | OF_A_KERNEL
    assert set(brings) <= set(pinned("requirements.txt"))


OF_A_KERNEL = {"ipython"} | {"datasets"}  # datasets only with pretrain_llama.py --dataset


def test_the_tested_versions_of_torch_are_those_of_preflight_and_the_pins_are_tested():
    bounds = (preflight.OLDEST_TORCH, preflight.NEWEST_TORCH)
    assert hosted.TESTED["torch"] == tuple(".".join(map(str, bound)) for bound in bounds)
    for name in hosted.TESTED:
        assert hosted.was_tested(name, pinned("requirements.txt")[name])


@pytest.mark.parametrize(
    ("version", "tested"),
    [("2.10.1", False), ("2.11.0+cu128", True), ("2.15.9", True), ("2.16.0a0", False)],
)
def test_a_version_is_compared_as_far_as_the_bounds_go(version, tested):
    assert hosted.was_tested("torch", version) is tested


@pytest.fixture
def fetched(tmp_path, monkeypatch):
    """The module `hosted` in a fetched course with one package that no machine has."""
    root = tmp_path / hosted.FETCHED
    root.mkdir()
    (root / "requirements.txt").write_text("torch==2.13.0\nno-such-thing==1.2  # why\n")
    monkeypatch.setattr(hosted, "ROOT", root)
    monkeypatch.setattr(hosted, "NEEDED", ["psutil", "no-such-thing"])
    return hosted


def test_pip_gets_only_what_is_missing_and_keeps_what_the_host_has(fetched, monkeypatch, capsys):
    given = []

    def pip(command, **options):
        given.extend(open(command[command.index(flag) + 1]).read() for flag in FLAGS)

    FLAGS = ("--requirement", "--constraint")
    monkeypatch.setattr(subprocess, "run", pip)
    fetched.prepare()
    versions = {name: fetched.version_of(name) for name in fetched.KEPT}
    kept = [f"{name}=={version}" for name, version in versions.items()]
    assert given == ["no-such-thing==1.2", "\n".join(kept)]
    assert "Installed no-such-thing in 0 s; torch==" in capsys.readouterr().out


@pytest.mark.processes
def test_what_pip_cannot_install_is_one_sentence(fetched, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a kernel
    with pytest.raises(fetched.NotReady) as failed:
        fetched.prepare()
    (said,) = failed.value._render_traceback_()
    assert "pip could not install no-such-thing (ERROR: No matching distribution" in said
    assert said.count("\n") == 0 and "\x1b" not in said


def test_a_version_outside_the_tested_ones_and_a_missing_torch_get_a_sentence_each(
    fetched, monkeypatch, capsys
):
    monkeypatch.setattr(fetched, "NEEDED", [])
    monkeypatch.setattr(fetched, "version_of", {**fetched_versions(), "torch": "2.9.1"}.get)
    fetched.prepare()
    said = "torch 2.9.1 is here; the course was tested with torch 2.11 to 2.15.\n"
    assert capsys.readouterr().out == said
    monkeypatch.setattr(fetched, "version_of", {}.get)
    with pytest.raises(fetched.NotReady, match="run %pip install torch==2.13.0, and then"):
        fetched.prepare()


def fetched_versions():
    return {name: newest for name, (_, newest) in hosted.TESTED.items()}
