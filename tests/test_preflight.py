"""preflight.py: one table, a sentence for whatever is wrong, and nothing that stays behind.

Times and bandwidths differ from run to run; no test looks at them.
"""

import importlib.metadata
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import preflight
import psutil
import pytest
import torch

from course import launch
from lab import message_checks
from pipeline import data

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "source_code" / "preflight.py"
NODE_ROWS = ["python", "torch", "backend", "GPUs", "cores", "memory", "port", "build/", "text"]
ROWS = NODE_ROWS + preflight.NOTEBOOK_PACKAGES + ["rank 0 to 1", "rank 1 to 0"]
PATIENT = ["--timeout", "150"]  # where several tests share the cores, torch takes long to import


def run_preflight(*words, **environment):
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=200,
    )


def rows_of(output):
    """The cells of the table's rows, without the header and the sentences below rows."""
    lines = [line for line in output.splitlines() if line.count(" | ") == 2]
    assert [cell.strip() for cell in lines[0].split(" | ")] == ["check", "result", "ok/warn/FAIL"]
    return [[cell.strip() for cell in line.split(" | ")] for line in lines[1:]]


# The whole program


@pytest.mark.further
def test_with_python_the_table_has_all_rows_and_nothing_fails():
    run = run_preflight(SCRIPT, *PATIENT)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = rows_of(run.stdout)
    assert [row[0] for row in rows] == ROWS
    assert {row[2] for row in rows} <= {"ok", "warn"}
    for row in rows[-2:]:
        assert re.fullmatch(r"1 KiB \d+\.\d\d ms, 16 MiB \d+\.\d\d GB/s", row[1])


@pytest.mark.further
def test_in_a_job_of_three_ranks_one_table_is_printed_with_all_neighbours():
    # With the variables that torchrun sets.
    output = launch.run("preflight.py --timeout 150", ranks=3, warm=True, show=False).output
    names = [row[0] for row in rows_of(output)]
    assert names == ROWS + ["rank 1 to 2", "rank 2 to 1"]


def call_preflight(monkeypatch, *words):
    """The exit status of the program in this process."""
    monkeypatch.setattr(sys, "argv", ["preflight.py", *words])
    return preflight.main()


def test_each_line_as_json(monkeypatch, capsys):
    # The ranks of the first test above answer it in the same way.
    checks = [preflight.Check("rank 0 to 1", "fast"), preflight.Check("rank 1 to 0", "-", "FAIL")]
    monkeypatch.setattr(preflight, "check_two_ranks", lambda timeout: checks)
    assert call_preflight(monkeypatch, "--messages-only", "--json") == 1
    printed = capsys.readouterr().out.splitlines()
    assert [preflight.Check(**json.loads(line)) for line in printed] == checks


@pytest.mark.further
def test_a_check_that_hangs_ends_the_program_with_a_line_that_fails():
    program = (
        "import sys, time, preflight\n"
        "preflight.check_gpus = lambda: time.sleep(100)\n"
        "sys.argv = ['preflight.py', '--timeout', '0.1']\n"
        "sys.exit(preflight.main())\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT / "source_code",
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert run.returncode == 1
    assert rows_of(run.stdout)[-1] == ["(next)", "no answer within 0.1 s", "FAIL"]
    assert run.stdout.split("FAIL")[-1].strip().startswith("> look for a disk")


def test_a_rank_without_rank_0_says_that_it_gives_up_and_as_json_if_asked_to(monkeypatch, capsys):
    monkeypatch.setattr(preflight.os, "_exit", lambda status: None)
    monkeypatch.setattr(preflight.time, "sleep", lambda seconds: print(seconds))
    preflight.give_up(1.0, False, preflight.as_json)
    waited, line = capsys.readouterr().out.splitlines()
    assert float(waited) == preflight.WAIT and json.loads(line)["status"] == "FAIL"


@pytest.mark.further
def test_a_rank_that_never_comes_is_not_waited_for():
    port = str(preflight.free_port())
    alone = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    run = run_preflight(SCRIPT, "--messages-only", "--timeout", "1", **alone)
    assert run.returncode == 1
    assert rows_of(run.stdout) == [["(next)", "no answer within 1 s", "FAIL"]]


def test_ranks_that_are_not_told_where_they_meet_are_sent_to_torchrun(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert call_preflight(monkeypatch, "--messages-only") == 1
    output = capsys.readouterr().out
    assert rows_of(output)[0][0] == "messages" and "with torchrun" in output


@pytest.mark.parametrize("seconds", ["-1", "1e10"])  # no timer of Python takes the second
def test_a_bad_flag_is_refused_in_one_sentence(monkeypatch, capsys, seconds):
    with pytest.raises(SystemExit) as refused:
        call_preflight(monkeypatch, "--timeout", seconds)
    said = capsys.readouterr()
    assert refused.value.code == 2 and said.out == ""
    assert said.err.count("\n") == 1 and said.err.startswith("--timeout")


def test_a_line_of_the_table_has_at_most_80_columns_and_keeps_every_word_of_its_advice():
    advice = preflight.unseen_advice(4)
    row = preflight.as_row(preflight.Check("GPUs", "2 of 4", "warn", advice))
    _, *said = row.splitlines()
    assert len(said) > 2 and max(map(len, row.splitlines())) <= 80
    assert " ".join(said).split()[1:] == advice.split()


@pytest.mark.parametrize(
    ("statuses", "said"),
    [
        (["ok", "ok"], "Ready: all 2 checks are ok."),
        (["ok", "warn"], "Ready, with 1 warning: "),
        (["warn", "FAIL"], "Not ready: 1 of 2 checks failed; "),
    ],
)
def test_the_last_line_says_whether_the_machine_is_ready(statuses, said):
    assert preflight.verdict(statuses).startswith(said)


# The two ranks that are started on this machine


def test_ranks_that_do_not_answer_in_time_fail_and_are_ended():
    before = set(psutil.Process().children())
    [check] = preflight.check_two_ranks(timeout=0.2)
    assert_fails(check, "messages", "--timeout")
    assert set(psutil.Process().children()) <= before


@pytest.mark.further
def test_ranks_that_cannot_meet_fail_with_their_own_words(monkeypatch):
    right = message_checks.environment_of
    monkeypatch.setattr(
        message_checks,
        "environment_of",
        lambda rank, port: right(rank, port) | {"WORLD_SIZE": "two"},
    )
    [check] = preflight.check_two_ranks(timeout=90)
    assert_fails(check, "messages", "WORLD_SIZE is 'two'")


@pytest.mark.further
@pytest.mark.skipif(sys.platform == "win32", reason="a process has no parent there")
def test_ranks_end_when_the_program_is_killed():
    process = psutil.Popen(
        [sys.executable, SCRIPT, "--messages-only", *PATIENT], stdout=subprocess.DEVNULL
    )
    ranks = wait_until(lambda: len(process.children()) == 2 and process.children())
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(ranks, timeout=90)
    assert not alive


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return result


# Every check says what to do when its condition is broken


def assert_fails(check, name, advice, status="FAIL"):
    assert check.name == name
    assert check.status == status
    assert advice in check.advice


def test_an_old_python_fails():
    assert_fails(preflight.check_python("3.9.18"), "python", "3.10")
    assert preflight.check_python("3.10.0").status == "ok"


def test_a_python_without_torch_is_told_what_to_install(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('No module named torch')")
    run = subprocess.run(
        [sys.executable, SCRIPT],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 1
    assert run.stderr.count("\n") == 1 and "pip install -r requirements.txt" in run.stderr


@pytest.mark.parametrize("version", ["2.10.1", "1.13.0+cpu"])
def test_an_old_torch_fails(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    assert_fails(preflight.check_torch(), "torch", "requirements.txt")


@pytest.mark.parametrize("later", [(0, 1), (1, -preflight.NEWEST_TORCH[1])])
def test_a_torch_newer_than_the_newest_that_was_run_warns(monkeypatch, later):
    major, minor = (number + more for number, more in zip(preflight.NEWEST_TORCH, later))
    monkeypatch.setattr(torch, "__version__", f"{major}.{minor}.0+cpu")
    newest = "newer than {}.{}".format(*preflight.NEWEST_TORCH)
    assert_fails(preflight.check_torch(), "torch", newest, "warn")


@pytest.mark.parametrize("version", [preflight.OLDEST_TORCH, preflight.NEWEST_TORCH])
def test_the_oldest_and_the_newest_torch_that_were_run_are_fine(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", "{}.{}.1".format(*version))
    assert preflight.check_torch().status == "ok"


def numbers(version):
    return ".".join(map(str, version))


def test_the_supported_versions_stand_in_one_table_that_everything_else_agrees_with():
    page = (ROOT / "docs" / "machines.md").read_text()
    (pinned,) = preflight.wanted_versions("torch")
    oldest, newest = numbers(preflight.OLDEST_TORCH), numbers(preflight.NEWEST_TORCH)
    assert f"| torch | {oldest} | {pinned} | {newest} |" in page
    python = numbers(preflight.OLDEST_PYTHON)
    assert f"| Python | {python} | – | 3.13 |" in page
    assert f'requires-python = ">={python}"' in (ROOT / "pyproject.toml").read_text()
    assert f"Python {python} or newer" in (ROOT / "README.md").read_text()
    assert f"TORCH ?= {newest}." in (ROOT / "Makefile").read_text()


def test_a_torch_that_cannot_send_fails(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    assert_fails(preflight.check_backend(), "backend", "cannot send messages")


@pytest.mark.parametrize(
    "gpus, in_job, ranks, expected",
    [
        (0, False, 1, "gloo, between CPUs"),
        (2, False, 1, "NCCL up to 2 ranks per node, gloo for more"),
        (2, True, 2, "NCCL, a GPU for each rank"),
        (2, True, 4, "gloo, through host memory (ranks share GPUs)"),
    ],
)
def test_the_backend_is_the_one_that_the_scripts_take(monkeypatch, gpus, in_job, ranks, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert preflight.check_backend(in_job, ranks) == preflight.Check("backend", expected)


def test_ranks_that_slurm_gives_a_gpu_each_use_nccl_although_each_sees_only_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    assert preflight.check_backend(True, 4).result == "NCCL, a GPU for each rank"


def test_without_nccl_gpus_are_still_used_through_gloo(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert preflight.check_backend(True, 2).result.startswith("gloo, through host memory")


def test_a_gpu_that_torch_cannot_use_warns(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(preflight.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    assert_fails(preflight.check_gpus(), "GPUs", "CPU-only build", "warn")


@pytest.mark.parametrize(
    ("environment", "seen", "status"),
    [
        ({"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "2"}, 0, "warn"),
        ({"SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "0,1"}, 0, "warn"),
        ({"SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, 1, "warn"),
        ({"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "2"}, 1, "ok"),
        ({"SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0, "ok"),
        ({"SLURM_JOB_ID": "7"}, 0, "ok"),
        ({"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "a100:2"}, 0, "ok"),  # no number
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 0, "ok"),  # no job has asked for them
    ],
)
def test_gpus_that_a_job_was_given_and_torch_does_not_see_warn(
    monkeypatch, environment, seen, status
):
    for name in ("SLURM_JOB_ID", "SLURM_GPUS_ON_NODE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    gpu = SimpleNamespace(name="GPU", total_memory=2**34)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    check = preflight.check_gpus()
    assert check.status == status
    if status == "warn":
        assert "SLURM gave this process" in check.advice and f"{seen} of 2" in check.result


def test_one_core_warns(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0}, raising=False)
    assert_fails(preflight.check_cores(), "cores", "two", "warn")


def test_little_memory_warns(monkeypatch):
    memory = psutil.virtual_memory()._replace(available=2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert_fails(preflight.check_memory(), "memory", "8 ranks need 2 GiB", "warn")
    assert_fails(preflight.check_memory(num_ranks=16), "memory", "16 ranks need 4 GiB", "warn")


def test_a_taken_port_warns():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        check = preflight.check_port(taken.getsockname()[1])
    assert_fails(check, "port", "--standalone", "warn")


def test_no_free_port_fails(monkeypatch):
    def reject():
        raise PermissionError(13, "Permission denied")

    for module in (preflight, message_checks):
        monkeypatch.setattr(module, "free_port", reject)
    assert_fails(preflight.check_port(), "port", "127.0.0.1")
    assert preflight.check_two_ranks(timeout=1) == []


def test_a_folder_that_cannot_be_written_fails(tmp_path):
    (tmp_path / "file").write_text("no folder")  # refused also to an administrator
    check = preflight.check_folder(tmp_path / "file" / "build")
    assert_fails(check, "build/", str(tmp_path))


def test_a_folder_is_left_as_it_was_found(tmp_path):
    assert preflight.check_folder(tmp_path).status == "ok"
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_warns(monkeypatch, tmp_path):
    usage = preflight.shutil.disk_usage(tmp_path)._replace(free=2**20)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: usage)
    assert_fails(preflight.check_folder(tmp_path), f"{tmp_path.name}/", "room", "warn")


def test_a_changed_text_fails(monkeypatch, tmp_path):
    changed = tmp_path / "field_guide.txt"
    changed.write_bytes(data.DEFAULT_TEXT.read_bytes().replace(b"pipeline", b"Pipeline", 1))
    monkeypatch.setattr(data, "DEFAULT_TEXT", changed)
    assert_fails(preflight.check_text(), "text", "restore it")


def test_another_version_of_a_package_warns(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1")
    wanted = preflight.wanted_versions("nbval")[0]
    assert_fails(preflight.check_package("nbval"), "nbval", wanted, "warn")


@pytest.mark.parametrize("needed, status", [(True, "FAIL"), (False, "warn")])
def test_a_missing_package_fails_for_a_course_and_warns_in_a_job(monkeypatch, needed, status):
    monkeypatch.setitem(sys.modules, "nbval", None)  # import then raises ImportError
    check = preflight.check_package("nbval", needed)
    assert_fails(check, "nbval", "pip install -r requirements.txt", status)


def test_the_wanted_versions_are_those_of_the_requirements():
    for name in preflight.NOTEBOOK_PACKAGES:
        assert preflight.wanted_versions(name)
    assert len(preflight.wanted_versions("matplotlib")) == 2  # it depends on Python's


@pytest.mark.parametrize("seconds, speed", [(0.02, 1e9), (1e-4, 1e7)])
def test_slow_messages_warn(seconds, speed):
    check = message_checks.check_messages(0, 1, seconds, speed)
    assert_fails(check, "rank 0 to 1", "SOCKET_IFNAME", "warn")
