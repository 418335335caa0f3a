"""The programs of one file: they need torch and nothing else, and are right by NCCL's rules."""

import io
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from unittest import mock

import pytest
import torch
from further import first_of
from ranks import run_on_ranks

from course.launch import PRELOAD, ROOT, run
from lab import rehearsal

pytestmark = pytest.mark.processes
PRELOAD.extend(["extensions.torch_pipelining.library", "extensions.checkpointing.checkpoint"])

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


@pytest.mark.parametrize("ranks", first_of([4, 2], 1))
@pytest.mark.parametrize("mode", first_of(["strict", "eager", "warmed", "lazy"], 1))
def test_every_schedule_passes_the_rehearsal_of_nccl_and_has_the_losses_of_one_process(
    mode, ranks, losses_of_one_process
):
    for name in STEPS:
        *_, last = run_on_ranks(train, ranks, name, mode)
        losses, difference = losses_and_difference(last)
        assert losses == losses_of_one_process and difference <= EXACT, name


def printed_by_one_process(steps):
    """What small/library_training.py prints, from eight layers in one process."""
    layers = []
    for k in range(8):
        torch.manual_seed(k)
        layers += [torch.nn.Linear(16, 16, dtype=torch.float64), torch.nn.Tanh()]
    model, lines = torch.nn.Sequential(*layers), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in [*range(steps), 1000]:
        torch.manual_seed(step)
        inputs = torch.rand(16, 16, dtype=torch.float64)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.flip(1))
        lines.append(f"{f'step {step}' if step < 1000 else 'held out'}  loss {loss:.6f}")
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert norm > 0.1 or step > 0, "the first gradient has to be clipped"
        optimizer.step()
    return lines


def lines_of(folder, ranks, steps, chunks):
    done = run(f"small/library_training.py {folder} {steps} {chunks}", ranks, show=False)
    return done.output.splitlines()


def test_the_training_with_the_library_stops_goes_on_with_other_ranks_and_is_that_of_one_process(
    tmp_path,
):
    *first, held_out = lines_of(tmp_path, 2, 2, 2)
    assert [*first, held_out] == printed_by_one_process(2)
    assert [*first, *lines_of(tmp_path, 4, 4, 1)] == printed_by_one_process(4)
    before = sorted(path.name for path in tmp_path.iterdir())
    (tmp_path / "step-000004" / ".metadata").unlink()  # as if a rank had died in that save
    assert [*first, *lines_of(tmp_path, 2, 4, 2)] == printed_by_one_process(4)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    saved = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert lines_of(tmp_path, 2, 4, 1) == printed_by_one_process(4)[-1:]  # nothing left to train
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == saved


WITH_FLAGS = sorted(
    {path.name for path in SMALL.glob("*.py")} - {"library.py"}
)  # 08 shows it whole


@pytest.mark.parametrize("script", WITH_FLAGS)
def test_a_word_that_a_program_does_not_know_is_not_left_unread(monkeypatch, script):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda *_, **__: pytest.fail("it runs")
    )
    monkeypatch.setattr(sys, "argv", [script, "--stepps", "2"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SMALL / script), run_name="__main__")
    assert ended.value.code


def test_two_ranks_are_not_three(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(sys, "argv", ["two_ranks.py"])
    with pytest.raises(SystemExit, match="--nproc-per-node 2"):
        runpy.run_path(str(SMALL / "two_ranks.py"), run_name="__main__")


@pytest.mark.parametrize("script", first_of(["pipeline.py", "weight_stash.py"], 1))
def test_a_rank_that_cannot_be_does_not_wait_for_the_others(monkeypatch, script):
    for name, value in {"RANK": "-1", "WORLD_SIZE": "2", "MASTER_PORT": "9"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", [script])
    with pytest.raises(SystemExit, match="RANK is -1, and WORLD_SIZE is 2; start the ranks with"):
        runpy.run_path(str(SMALL / script), run_name="__main__")


@pytest.mark.parametrize(
    ("program", "words"),
    [("pipeline", ["naive", "--verify"]), ("weight_stash", ["--verify"])],
)
def test_losses_that_are_not_finite_do_not_pass_the_comparison_with_one_process(program, words):
    code = f"import sys, {program}; {program}.RATE = float('nan'); sys.argv[1:] = {words}; {program}.main()"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=SMALL, capture_output=True, text=True, timeout=60
    )
    assert "loss nan" in ended.stdout and ended.returncode == 1, ended
    assert ended.stderr.strip() == "the difference should be at most 1e-12"
