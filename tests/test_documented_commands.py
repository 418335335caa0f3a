"""Every command that the course's pages give: those that can run here are run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.launch import ROOT

BIN = Path(sys.executable).parent
FIRST_WORDS = r"(make|torchrun|python|srun|sbatch|slurm/local_cluster\.sh|source|git|pip|eval|scontrol|sinfo|ssh|sed|sudo|chmod|for i in)"  # fmt: skip

# What becomes of a command, by the first pattern that it matches.
RUN = "is run below"
ON_SLURM = "tests/test_slurm.py runs it on a cluster"
KINDS = [
    (r"make run\b", RUN),
    (r"make (slides|site)\b", "test_instructors.py and test_site.py make them"),
    (r"(torchrun .*|python )source_code/", RUN),
    (r"make (lab|test|notebooks|benchmark|\.venv)\b", "make is asked what it would do"),
    (r"make$", "make is asked what it would do"),
    (r"(source slurm/site\.env && )?sbatch\b", ON_SLURM),
    (r"(torchrun .*|python )gpipe\.py", "test_copy_template.py runs a copy"),
    (r"(srun|sinfo|source slurm/site\.env|slurm/local_cluster\.sh|eval)\b", ON_SLURM),
    (r"for i in .*sbatch", ON_SLURM),
    (r"(sudo|scontrol|ssh|git|pip|chmod|sed)\b", "belongs to another machine, or changes this one"),
]


def commands_of(page):
    """The commands of a page, in blocks and in lines, without their comments."""
    text = (ROOT / page).read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    commands = (re.split(r"\s+# ", line)[0].strip() for line in lines)
    return [command for command in commands if re.match(rf"{FIRST_WORDS}(\s|$)", command)]


PAGES = ("README.md", "INSTRUCTORS.md", "your-own-model.md")
COMMANDS = sorted({command for page in PAGES for command in commands_of(page)})


def kind_of(command):
    return next((kind for pattern, kind in KINDS if re.match(pattern, command)), None)


def run(*words, limit=180):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    environment["PATH"] = f"{BIN}{os.pathsep}{environment['PATH']}"
    ended = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_it_is_known_of_every_command_what_becomes_of_it():
    assert len(COMMANDS) > 30
    assert [command for command in COMMANDS if kind_of(command) is None] == []


@pytest.mark.parametrize("command", [c for c in COMMANDS if kind_of(c) == RUN])
def test_it_runs(command, tmp_path):
    if "copy_template.py" in command:
        command = re.sub(r"\S+$", lambda destination: str(tmp_path / destination[0]), command)
    if command.startswith("make"):
        # What was installed stays; the Python is that of the tests.
        command += f" BIN={BIN} --assume-old=.venv/installed"
    assert run("bash", "-c", command).strip()


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make")])
def test_make_knows_the_target(command):
    assert run(*command.split(), "--dry-run", "--assume-old=.venv/installed", f"BIN={BIN}")


@pytest.mark.parametrize("command", [c for c in COMMANDS if kind_of(c) == ON_SLURM])
def test_its_job_script_is_there_and_runs_in_the_tests_of_the_cluster(command):
    tests = (ROOT / "tests" / "test_slurm.py").read_text()
    for script in re.findall(r"slurm/[\w.]+", command):
        assert (ROOT / script).exists()
        name = script.removeprefix("slurm/")
        assert name == "site.env" or name in tests, script
