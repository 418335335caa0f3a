"""The programs of one file: they need torch and nothing else, and are right by NCCL's rules."""

import io
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from unittest import mock

import pytest
from ranks import run_on_ranks

from course.launch import ROOT
from lab import rehearsal

pytestmark = pytest.mark.processes

SMALL = ROOT / "source_code" / "small"
STEPS = "naive", "gpipe", "1f1b", "interleaved"
EXACT = 1e-12


def train(rank, name, mode=None, replaced=()):
    """In a rank: what small/pipeline.py prints with --verify, by NCCL's rules if `mode` says so."""
    if mode:
        rehearsal.begin(mode)
    printed = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["pipeline.py", name, "--verify"]),
        redirect_stdout(printed),
    ):
        runpy.run_path(str(SMALL / "pipeline.py"), run_name="__main__")
    return printed.getvalue()


def losses_and_difference(printed):
    losses = re.findall(r"loss (\S+)", printed)
    [difference] = re.findall(r"from one process: (\S+)", printed)
    return losses, float(difference)


@pytest.fixture(scope="module")
def losses_of_one_process():
    command = [sys.executable, "-I", str(SMALL / "pipeline.py"), "naive", "--verify"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    losses, difference = losses_and_difference(ended.stdout)
    assert len(losses) == 4 and difference == 0
    return losses


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("mode", ["strict", "eager", "warmed", "lazy"])
def test_every_schedule_passes_the_rehearsal_of_nccl_and_has_the_losses_of_one_process(
    mode, ranks, losses_of_one_process
):
    for name in STEPS:
        *_, last = run_on_ranks(train, ranks, name, mode)
        losses, difference = losses_and_difference(last)
        assert losses == losses_of_one_process and difference <= EXACT, name
