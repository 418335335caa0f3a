"""Every command that the course's pages and lessons give: those that can run here are run."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from further import further

from course import launch
from course.launch import ROOT

BIN = Path(sys.executable).parent
FIRST_WORDS = (
    r"(\.|\.ci/run|\.venv/bin/\w+|apptainer|docker|python3|touch|[A-Z_]+=\S+|bash|cd|chmod|cp|done|eval|export|find|grep|for \w+ in|git|make|mkdir"
    r"|patch|pip|python|sacctmgr|sbatch|scancel|scontrol|sed|sinfo|slurm/local_cluster\.sh|source"
    r"|squeue|srun|ssh|sudo|tail|torchrun)"
)
NO_SHELL = ("diff", "python", "text")  # what blocks of these languages hold is not a command

# What becomes of a command, by the first pattern that it matches.
RUN = "is run below"
ON_A_COPY = "is run below, on a copy"
ASKED = "make is asked what it would do"
ON_SLURM = "tests/test_slurm.py runs it on a cluster"
ELSEWHERE = "belongs to another machine, or changes this one"
KINDS = [
    (r"make run\b", RUN),
    (
        r"make (slides|site|handout)\b",
        "test_instructors.py, test_site.py and test_handout.py make them",
    ),
    (r"python source_code/convert\.py ", "test_real_models.py converts models of its own"),
    (r"python source_code/prepare_data\.py ", "test_token_files.py makes tokens of other texts"),
    (r"(torchrun .*|python )source_code/", RUN),
    (r"torchrun .* finetune\.py ", "tests/test_copy_template.py runs a copy on a model of its own"),
    (r"torchrun .* pipeline\.py 1f1b", "tests/test_own_model.py runs it in an empty folder"),
    (
        r"(torchrun .*|python )gpipe\.py",
        "tests/test_copy_template.py runs a copy on one rank and more",
    ),
    (r"grep ", RUN),
    (r"python tools/architecture\.py$", RUN),
    (r"cp( build/handout/course\.bundle /shared)?$", "test_room.py runs the pack's lines"),
    (
        r"python tools/certificates\.py$",
        "takes minutes; test_search_schedule.py compares the page with the search",
    ),
    (r"\.venv/bin/python tools/benchmark_page\.py$", "opens a browser many times, and measures"),
    (r"python tools/fit_rates\.py$", "takes a minute; test_expected_error.py compares its file"),
    (r"python tools/minutes\.py --write$", "test_minutes.py runs what it calls"),
    (r"python tools/quiet_run\.py notebooks/\w+\.ipynb$", "test_quiet_run.py runs what it calls"),
    (r"\.venv/bin/python tools/spoil_code\.py --list$", "test_spoil_code.py plants what it lists"),
    (
        r"PYTHONPATH=source_code torchrun .* build/08_mine\.py$",
        "the checks of lesson 08 run the reader's program",
    ),
    (
        r"python -m torch\.distributed\.checkpoint\.format_utils dcp_to_torch ",
        "test_checkpointing.py reads checkpoints by the function that it calls",
    ),
    (r"python( -I)?$", "is only a part of a command"),
    (r"make hosted\b", "tests/test_hosted.py makes it on a copy"),
    (
        r"python -m pip install .* && python source_code/small/pipeline\.py$",
        "installs; tests/test_other_systems.py runs the program as on Windows",
    ),
    (r"make wall\b", "tests/test_progress.py runs what it calls"),
    (r"(make measurements FROM=|python tools/accept\.py$)", "test_accept.py runs what they run"),
    (
        r"(make submission$|python tools/(make_submission|grade_submissions)\.py\b)",
        "test_submissions.py runs both",
    ),
    (r"\.venv/bin/jupytext ", ON_A_COPY),
    (
        r"make (lab|check|test|test-all|test-torch|soak|notebooks|images|benchmark|wheels|\.venv)\b",
        ASKED,
    ),
    (r"PIPELINE_RECORD=1 make notebooks\b", ASKED),
    (r"make$", ASKED),
    (r"(\. slurm/site\.env && )?([A-Z_]+=\S+ )?sbatch\b", ON_SLURM),
    (r"\. \.venv/bin/activate$", ELSEWHERE),
    (r"(\. slurm/site\.env|(srun|sinfo|source|slurm/local_cluster\.sh|eval)\b)", ON_SLURM),
    (r"for i in .*sbatch", ON_SLURM),
    (r"patch( -p0)?( < \.\./docs/own-models/.*)?$", "tests/test_own_model.py applies the changes"),
    (r"cp source_code/extensions/bundle\.py ", "tests/test_own_model.py copies it"),
    (r"torchrun .* 4 train\.py --schedule zb-v ", "tests/test_own_model.py trains changed copies"),
    (r"torchrun --nnodes 2 .* gpipe\.py", "tests/test_nodes.py starts two launchers"),
    (
        r"PYTHONPATH=/path/to/course/source_code |python /path/to/course/source_code/compare_logs",
        "tests/test_flight_log_anywhere.py records programs and compares their logs",
    ),
    (r"(sudo|scontrol|scancel|squeue|sacctmgr|ssh|git|pip|chmod|sed|export|cd|mkdir)\b", ELSEWHERE),
    (r"(for name in|find|done)\b", "test_instructors.py runs the loop over participants"),
    (r"(bash|python3|\.venv/bin/pip|\.ci/run)$", ELSEWHERE),
    (r"(apptainer|docker|python3 -m venv|touch|\.venv/bin/pip install)\b|COURSE_\w+=", ELSEWHERE),
    (r"(torchrun( --nproc-per-node [23])?|[A-Z_]+=\S+)$", "is only a part of a command"),
]


def text_of(page):
    """The page, or the prose of a notebook."""
    text = (ROOT / page).read_text()
    if not page.endswith(".ipynb"):
        return text
    cells = json.loads(text)["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def shell_lines_of(text):
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [
        re.split(r"(?:^|\s+)# ", line)[0].strip()
        for language, block in blocks
        if language not in NO_SHELL
        for line in block.splitlines()
    ]


def is_command(text):
    return re.match(rf"{FIRST_WORDS}(\s|$)", text)


def commands_of(page):
    """The commands of a page, in blocks and in lines, without their comments."""
    text = text_of(page)
    found = shell_lines_of(text)
    found += re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    return [command for command in found if is_command(command)]


def pages():
    """All pages and notebooks; build may have a notebook as text, as CONTRIBUTING says."""
    listed = ["*.md", "*/*.md", "notebooks/*.ipynb", "notebooks/solutions/*.ipynb"]
    found = (str(path.relative_to(ROOT)) for name in listed for path in ROOT.glob(name))
    return sorted(path for path in found if not path.startswith("build/"))


COMMANDS = sorted({command for page in pages() for command in commands_of(page)})


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
    assert len(COMMANDS) > 60
    assert [command for command in COMMANDS if kind_of(command) is None] == []


@pytest.mark.parametrize("page", pages())
def test_every_line_of_a_block_of_commands_is_known_as_one(page):
    lines = filter(None, shell_lines_of(text_of(page)))
    assert [line for line in lines if not is_command(line)] == []


@further
@pytest.mark.parametrize("command", [c for c in COMMANDS if kind_of(c) == RUN])
def test_it_runs(command, tmp_path):
    if "copy_template.py" in command:
        command = re.sub(r"\S+$", lambda destination: str(tmp_path / destination[0]), command)
    if re.search(r"torchrun .*pretrain_llama\.py$", command):
        command += " --steps 2"  # of a hundred
    # `make run` starts torchrun, and test_launch.py compares its output with that of warm ranks.
    found = re.fullmatch(r"torchrun --standalone --nproc-per-node (\d) source_code/(.*)", command)
    if found:
        assert launch.run(found[2], int(found[1]), warm=True, show=False, limit=90).output.strip()
        return
    if command.startswith("make"):
        # What was installed stays; the Python is that of the tests.
        command += f" BIN={BIN} --assume-old=.venv/installed"
    assert run("bash", "-c", command).strip()


@pytest.mark.further
def test_a_notebook_edited_as_text_comes_back_with_all_its_cells(tmp_path):
    commands = [command for command in commands_of("CONTRIBUTING.md") if "jupytext" in command]
    assert len(commands) == 2
    (name,) = re.findall(r"notebooks/\S+", commands[0])
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "build").mkdir()
    shutil.copy(ROOT / name, tmp_path / name)
    for command in commands:
        words = command.replace(".venv/bin", str(BIN)).split()
        subprocess.run(words, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    before, after = (json.loads((root / name).read_text())["cells"] for root in (ROOT, tmp_path))
    assert ["".join(cell["source"]) for cell in after] == ["".join(c["source"]) for c in before]


PAGES = [*ROOT.glob("*.md"), *ROOT.glob("*/*.md")]
PAGES.remove(ROOT / "docs" / "changelog.md")  # it names files as they were called then


@pytest.mark.parametrize("page", PAGES, ids=[path.name for path in PAGES])
def test_a_file_that_a_page_names_is_there(page):
    folders = "docs|images|notebooks|slurm|source_code|tests|tools"
    for file in re.findall(rf"`((?:{folders})/[\w/.-]+\.\w+)`", page.read_text()):
        assert (ROOT / file).is_file(), file


MAKE = [command for command in COMMANDS if re.match(r"(\w+=1 )?make\b", command)]


@pytest.mark.parametrize("command", MAKE)
def test_make_knows_the_target(command):
    words = shlex.split(command[command.index("make") :])
    assert run(*words, "--dry-run", "--assume-old=.venv/installed", f"BIN={BIN}")


@pytest.mark.parametrize("command", [c for c in COMMANDS if kind_of(c) == ON_SLURM])
def test_its_job_script_is_there_and_runs_in_the_tests_of_the_cluster(command):
    tests = (ROOT / "tests" / "test_slurm.py").read_text()
    for script in re.findall(r"slurm/[\w.]+", command):
        assert (ROOT / script).exists()
        name = script.removeprefix("slurm/")
        assert name == "site.env" or name in tests, script
