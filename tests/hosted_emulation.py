"""Lessons on a machine that is not ours: `make test-torch` runs this file, and nothing else does.

Each lesson is a single file in an empty folder, and its kernel's environment has what a host of
notebooks has: torch in the version of this Python, numpy and matplotlib.
"""

import subprocess
import tempfile
import venv

import pytest
import torch
from alone import ONLINE, differences, first_output, make_repository, performed, put_alone

LESSONS = [
    "00_start_here.ipynb",
    "01_naive_model_parallelism.ipynb",
    "02_gpipe.ipynb",
    "03_1f1b.ipynb",
    "05_interleaved.ipynb",
    "08_torch_pipelining.ipynb",
]
HOST = [f"torch=={torch.__version__.partition('+')[0]}", "numpy", "matplotlib", "ipykernel"]
VERSIONS = "import torch, numpy, matplotlib as m; print(torch.__version__, numpy.__version__, m.__version__)"


# Two cells of lesson 08 show the library's own error messages, and torch 2.11 has others.
OWN_WORDS = "trap(" if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13) else None


@pytest.fixture(scope="module")
def host():
    """The Python of an environment with HOST, which may take gigabytes and is removed."""
    with tempfile.TemporaryDirectory(prefix="host-") as folder:
        venv.create(folder, with_pip=True)
        python = f"{folder}/bin/python"
        install = [python, "-m", "pip", "install", *HOST]
        subprocess.run(install, env=ONLINE, check=True, timeout=1200)
        yield python


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    return make_repository(tmp_path_factory.mktemp("repository"))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_runs_alone_and_prints_what_is_stored(lesson, host, address, tmp_path, request):
    before = versions(host)
    cells = performed(put_alone(lesson, tmp_path, address), host)
    said = first_output(cells)
    assert said.startswith(f"Fetched the course from {address} into the folder fetched_course.\n")
    assert ("Installed " in said) == (lesson == LESSONS[0]), "the later ones find all packages"
    wrong, checked = differences(lesson, cells, request.session)
    assert checked and [source for source in wrong if not (OWN_WORDS and OWN_WORDS in source)] == []
    assert versions(host) == before


def versions(python):
    words = [python, "-c", VERSIONS]
    return subprocess.run(words, check=True, capture_output=True, timeout=120).stdout
