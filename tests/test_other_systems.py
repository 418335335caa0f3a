"""What holds on systems that the course has not been run on, as far as Linux can show it."""

import subprocess
import sys

import preflight
import pytest

from course import launch
from course.launch import ROOT


@pytest.mark.further
@pytest.mark.parametrize(
    ("script", "loss"), [("gpipe.py", "5.929890"), ("small/pipeline.py", "5.183731")]
)
def test_one_rank_trains_where_torch_has_no_store_in_memory(script, loss):
    program = (
        "import runpy, sys, torch.distributed as dist\n"
        "del dist.HashStore\n"
        f"sys.argv = ['{script}', '--steps', '1']\n"
        f"runpy.run_path('{script}', run_name='__main__')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT / "source_code",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert f"step 0  loss {loss}" in ended.stdout, ended.stderr
    assert ended.stderr == ""


def test_on_windows_the_first_row_of_the_preflight_says_that_torchrun_does_not_start(monkeypatch):
    first = next(preflight.checks_of_this_node())
    assert first.name == "python"
    monkeypatch.setattr(preflight.platform, "system", lambda: "Windows")
    first = next(preflight.checks_of_this_node())
    assert (first.name, first.status) == ("system", "warn")
    assert "torchrun" in first.advice and "WSL2" in first.advice


def test_where_forking_is_not_safe_warm_ranks_come_from_torchrun(monkeypatch):
    for system in ("darwin", "win32"):
        monkeypatch.setattr(launch.sys, "platform", system)
        started = []
        monkeypatch.setattr(launch, "LaunchedRanks", started.append)
        monkeypatch.setattr(launch, "follow", lambda *_: "")
        launch.run("gpipe.py", ranks=2, warm=True, show=False)
        assert started == [
            ["torchrun", "--standalone", "--nproc-per-node", "2", "source_code/gpipe.py"]
        ]


def test_lines_end_alike_also_where_git_is_told_to_end_them_otherwise(tmp_path):
    command = [
        "git",
        "-c",
        "core.autocrlf=true",
        "checkout-index",
        "--all",
        f"--prefix={tmp_path}/",
    ]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 200
    pictures = [path for path in files if path.suffix == ".png"]  # whose first bytes have them, too
    assert all(
        path.read_bytes() == (ROOT / path.relative_to(tmp_path)).read_bytes() for path in pictures
    )
    files = [path for path in files if path not in pictures]
    assert [path.name for path in files if b"\r\n" in path.read_bytes()] == []
