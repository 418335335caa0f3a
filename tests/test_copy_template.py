"""A copied script runs where it is, by itself, and prints the losses of the original.

Every script that trains is copied into an empty folder, as a folder and as one file, and run there
on ranks that cannot find the course. Its losses are those of the original to the last digit.
"""

import json
import os
import re
import runpy
import shlex
import sys
from pathlib import Path
from unittest import mock

import copy_template
import pytest
from ranks import run_on_ranks
from templates import changes

from pipeline.schedule import to_csv
from pipeline.schedules import one_f_one_b

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "source_code"
PAGE = ROOT / "your-own-model.md"
SCRIPTS = copy_template.training_scripts()
SMALL = "--steps 3 --batch-size 8 --dim 16 --seq-len 8 --device cpu"
FLAGS = {
    "custom_schedule": f"schedule.csv {SMALL}",
    "pipeline_with_data_parallel": f"{SMALL} --replicas 2 --microbatches 2",
    "pipedream": "--steps 4 --batch-size 4 --dim 16 --seq-len 8 --device cpu",
    "pretrain_llama": f"{SMALL} --layers 4 --dtype float64",
    "torch_pipelining_gpt2": f"{SMALL} --layers 4",
    "torch_pipelining_mlp": "--steps 3",
}
RANKS = {"torch_pipelining_mlp": 3, "pipeline_with_data_parallel": 4}  # else 2
OWN_TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind.\n" * 50


def perform(rank, script, flags, file):
    """In a rank: run a script as torchrun would; outside the course nothing of the course is found.

    What it prints goes to `file`, for the rank that has the loss.
    """
    sys.argv = [str(script), *flags]
    os.chdir(script.parent)
    if not script.is_relative_to(ROOT):
        for name in [name for name in sys.modules if name.split(".")[0] == "pipeline"]:
            del sys.modules[name]
        sys.path[:] = [path for path in sys.path if not is_of_the_course(path)]
    sys.path.insert(0, str(script.parent))
    with open(file, "a") as out, mock.patch.object(sys, "stdout", out):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            assert not end.code, f"exit status {end.code}"
    found = [getattr(sys.modules.get(name), "__file__", None) for name in sys.modules]
    if not script.is_relative_to(ROOT):
        assert not any(is_of_the_course(path) for path in found if path and "pipeline" in path)


def is_of_the_course(path):
    return Path(path or ".").resolve().is_relative_to(SOURCE)


def run(script, folder, name=None, further=""):
    """The losses that a script prints and writes on a few ranks, in full precision if it can."""
    name = name or script.stem
    (folder / "schedule.csv").write_text(to_csv(one_f_one_b(2, 4)))
    flags = f"{FLAGS.get(name, SMALL)} {further}"
    flags = shlex.split(flags.replace("schedule.csv", str(folder / "schedule.csv")))
    printed, written = folder / "printed.txt", folder / "losses.jsonl"
    printed.write_text("")
    if name != "torch_pipelining_mlp":
        flags += ["--losses", str(written)]
    run_on_ranks(perform, RANKS.get(name, 2), script, flags, str(printed))
    shown = re.findall(r"^step \d+  loss (\S+)$", printed.read_text(), re.MULTILINE)
    if not written.exists():
        return shown
    losses = [json.loads(line)["loss"] for line in written.read_text().splitlines()]
    assert shown == [f"{loss:.6f}" for loss in losses]
    return losses


def copy(script, destination):
    """Copy as from a terminal, in this process."""
    with mock.patch.object(sys, "argv", ["copy_template.py", script, str(destination)]):
        return copy_template.main()


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """The losses of each original, trained once."""
    losses = {}

    def of(script):
        if script not in losses:
            losses[script] = run(SOURCE / f"{script}.py", tmp_path_factory.mktemp(script))
            assert losses[script]
        return losses[script]

    return of


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_folder_runs_by_itself_with_the_losses_of_the_original(script, tmp_path, original):
    assert copy(script, tmp_path / "mine") == 0
    assert run(tmp_path / "mine" / f"{script}.py", tmp_path) == original(script)


@pytest.mark.parametrize("script", SCRIPTS)
def test_one_file_runs_by_itself_with_the_losses_of_the_original(script, tmp_path, original):
    if script in changes.ONLY_AS_FOLDER:
        assert copy(script, tmp_path / "mine.py") == 2
        assert not (tmp_path / "mine.py").exists()
        return
    assert copy(script, tmp_path / "mine.py") == 0
    assert run(tmp_path / "mine.py", tmp_path, name=script) == original(script)


# The page with the change to a model and a text of one's own.


def diffs_of(page):
    """{file: its diff} of the diffs that a page shows."""
    found = re.findall(r"^```diff\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return {diff.split()[1]: diff for diff in found}


def patched(text, diff):
    """`text` with a unified diff applied to it; every line that the diff shows must be there."""
    for hunk in re.split(r"^@@.*@@\n", diff, flags=re.MULTILINE)[1:]:
        lines = [(line[:1] or " ", line[1:]) for line in hunk.splitlines()]
        before = "".join(line + "\n" for sign, line in lines if sign in " -")
        after = "".join(line + "\n" for sign, line in lines if sign in " +")
        assert text.count(before) == 1, (
            f"{PAGE.name} changes lines that a fresh copy does not have (any more):\n{before}"
        )
        text = text.replace(before, after)
    return text


@pytest.mark.parametrize("file", diffs_of(PAGE))
def test_a_change_of_fewer_than_20_lines_brings_in_another_model_and_text(file, tmp_path, original):
    script = file.removesuffix(".py")
    one_file = script != "pretrain_llama"
    destination = tmp_path / (file if one_file else "mine")
    assert copy(script, destination) == 0
    copied = destination if one_file else destination / file
    diff = diffs_of(PAGE)[file]
    changed = [line for line in diff.splitlines() if re.match(r"[+-](?![+-]{2})", line)]
    assert 0 < len(changed) < 20
    copied.write_text(patched(copied.read_text(), diff))
    (copied.parent / "my_text.txt").write_text(OWN_TEXT)
    losses = run(copied, tmp_path, name=script, further="" if one_file else "--verify")
    assert losses != original(script)
    assert losses[-1] < losses[0]
    assert one_file or "as promised" in (tmp_path / "printed.txt").read_text()
