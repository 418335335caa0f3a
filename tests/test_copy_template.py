"""A copied script runs where it is, by itself, and prints the losses of the original.

Every script that trains is copied both ways into an empty folder and run there on two ranks, which
cannot find the course: its losses are those of the original to the last digit of float64.
"""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import copy_template
import pytest
from ranks import run_on_ranks

from templates.definitions import CannotCopy
from templates.single_file import LONGEST

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "source_code"
SCRIPTS = copy_template.training_scripts()
SMALL = "--steps 3 --batch-size 8 --dim 16 --seq-len 8 --device cpu"
FLAGS = {
    "custom_schedule": f"schedule.csv {SMALL}",
    "pipedream": "--steps 4 --batch-size 4 --dim 16 --seq-len 8 --device cpu",
    "torch_pipelining_gpt2": f"{SMALL} --layers 4",
    "torch_pipelining_mlp": "--steps 3",
}
RANKS = {"torch_pipelining_mlp": 3}


def perform(rank, script, flags, away):
    """In a rank: run a script as torchrun would; `away` from the course, nothing of it is found."""
    sys.argv = [str(script), *flags]
    os.chdir(script.parent)
    if away:
        for name in [name for name in sys.modules if name.split(".")[0] == "pipeline"]:
            del sys.modules[name]
        sys.path[:] = [path for path in sys.path if not Path(path or ".").is_relative_to(ROOT)
                       or ".venv" in path]  # fmt: skip
    sys.path.insert(0, str(script.parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        assert not end.code
    if away and "pipeline" in sys.modules:
        assert Path(sys.modules["pipeline"].__file__).parents[1] == script.parent


def losses_of(script, flags, folder, away, num_ranks=2):
    """The losses of a run, in full precision."""
    file = folder / "losses.jsonl"
    flags = [*shlex.split(flags), "--losses", str(file)]
    run_on_ranks(perform, num_ranks, script, flags, away)
    return [json.loads(line)["loss"] for line in file.read_text().splitlines()]
