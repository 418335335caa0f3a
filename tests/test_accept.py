"""The acceptance on GPUs, tried on CPU ranks that stand in for them, with the smallest sizes."""

import json
import os
import subprocess
import sys

import pytest

from course.launch import ROOT

sys.path.append(str(ROOT / "tools"))

import accept  # noqa: E402
import accept_parts  # noqa: E402
import write_measurements  # noqa: E402
from accept_runs import Machine, OutOfTime  # noqa: E402

pytestmark = pytest.mark.further  # the acceptance of a machine, tool by tool

NO_TRAINING = {"plan", "plan_partition", "predict", "preflight", "prepare_data", "copy_template",
               "convert", "compare_logs", "rehearse", "search_schedule", "torch_pipelining_mlp"}  # fmt: skip


def test_an_output_that_cannot_be_written_is_named_before_the_first_part(tmp_path, monkeypatch):
    monkeypatch.setattr(accept, "PARTS", [])
    words = ["accept.py", "--device", "cpu", "--small", "--ranks", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        accept.main()
    assert ended.value.code == 2 and list(tmp_path.iterdir()) == []


def test_finetune_has_no_longer_sequences_than_the_model_that_the_run_before_it_saved():
    finetune = next(one for one, *_ in accept_parts.SCRIPTS if one.startswith("finetune"))
    saved = accept_parts.SIZES.partition("--seq-len ")[2].split()[0]
    assert finetune.partition("--seq-len ")[2].split()[0] == saved


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the whole acceptance finds here on two ranks; 20 seconds of CPU."""
    file = tmp_path_factory.mktemp("accept") / "found.json"
    words = [sys.executable, "tools/accept.py", "--device", "cpu", "--small", "--ranks", "2"]
    ended = subprocess.run(
        [*words, "--patience", "3", "--out", str(file)],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-3000:]
    return json.loads(file.read_text())


@pytest.mark.processes
def test_every_part_passes_and_leaves_its_figures(found):
    assert [part["title"] for part in found["parts"]] == [title for title, *_ in accept.PARTS]
    for part in found["parts"]:
        assert (part["status"], part["failures"]) == ("passed", [])
        assert part["rows"] and all(len(row) == len(part["columns"]) for row in part["rows"])
    machine = found["machine"]
    assert (machine["ranks"], machine["device"], machine["small"]) == (2, "cpu", True)
    assert {"torch", "nccl", "commit", "gpus_per_node", "processor"} <= machine.keys()


@pytest.mark.processes
def test_a_lost_rank_is_named_within_seconds(found):
    rows = next(part["rows"] for part in found["parts"] if part["title"] == "A rank that is lost")
    assert [row[0] for row in rows] == ["SIGKILL", "SIGSTOP"]
    for _, seconds, said in rows:
        assert seconds < 20 and "rank 1" in said
    assert "has stopped answering" in rows[1][2]


def test_every_training_script_is_in_it_and_its_minutes_are_fewer_than_thirty():
    listed = {command.split()[0] for command, *_ in accept_parts.SCRIPTS}
    scripts = {path.name for path in (ROOT / "source_code").glob("*.py")}
    training = {name for name in scripts if not name.startswith("broken_")}
    assert training - listed == {f"{name}.py" for name in NO_TRAINING}
    assert sum(minutes for *_, minutes in accept_parts.PARTS) < 28  # and the ends of parts


MACHINE = Machine(2, 1, "cpu", True)


def test_a_part_that_fails_or_runs_out_of_time_is_noted():
    def breaks(part, machine):
        """Breaks."""
        part.rows.append([1])
        raise ValueError("broken")

    def takes_long(part, machine):
        """Takes long."""
        raise OutOfTime

    broken = accept.performed("one", breaks, 60, MACHINE)
    assert (broken["status"], broken["rows"]) == ("failed", [[1]])
    assert "ValueError: broken" in broken["failures"][0]["said"]
    takes_long.__doc__ = None  # as with python -OO
    assert accept.performed("two", takes_long, 60, MACHINE)["status"] == "out of time"


def test_a_run_is_not_begun_without_time_and_one_that_fails_says_what_it_said():
    def no_time(part, machine):
        """No time."""
        part.run("gpipe.py")

    assert accept.performed("one", no_time, 0.5, MACHINE)["status"] == "out of time"


@pytest.mark.processes
def test_a_failed_run_is_noted_with_its_command_and_its_words():
    def rejected(part, machine):
        """A batch that cannot be cut."""
        assert part.run("gpipe.py --batch-size 7 --microbatches 2", ranks=1) is None

    part = accept.performed("one", rejected, 60, MACHINE)
    assert part["status"] == "failed" and part["runs"] == 1
    assert part["failures"][0]["command"] == "gpipe.py --batch-size 7 --microbatches 2"
    assert "--microbatches 2 does not divide" in part["failures"][0]["said"]


# What becomes of the file

PAGE = "docs/measurements.md"
GPUS = {
    "host": "n1", "processor": "CPU", "cores": 64, "memory_gib": 512, "nodes": 2, "ranks": 8,
    "gpus_per_node": ["NVIDIA H100 80GB HBM3"] * 4, "system": "Linux", "python": "3.12.1",
    "torch": "2.13.0", "nccl": "2.27.5", "commit": "abc", "date": "2026-01-01",
    "device": "cuda", "small": False,
}  # fmt: skip
PART = {
    "title": "Memory", "about": "What ranks hold.", "status": "failed", "runs": 3, "limit": 60,
    "columns": ["schedule", "peak"], "rows": [["gpipe", "1 2"], ["a|b", None]],
    "failures": [{"command": "gpipe.py", "said": "no"}],
}  # fmt: skip


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """A copy of the page that is written."""
    (tmp_path / "docs").mkdir()
    (tmp_path / PAGE).write_text((ROOT / PAGE).read_text())
    monkeypatch.setattr(write_measurements, "ROOT", tmp_path)
    return tmp_path


def write(folder, monkeypatch, **changes):
    file = folder / "found.json"
    file.write_text(json.dumps({"machine": GPUS | changes, "parts": [PART]}))
    monkeypatch.setattr(sys, "argv", ["write_measurements.py", str(file)])
    write_measurements.main()


def test_the_figures_replace_what_stood_between_the_marks_and_one_row_names_the_hardware(
    pages, monkeypatch
):
    for torch in ("2.13.0", "2.15.0"):
        write(pages, monkeypatch, torch=torch)
    page = (pages / PAGE).read_text()
    assert "torch 2.15.0, NCCL 2.27.5" in page and "torch 2.13.0, NCCL" not in page
    assert "| gpipe | 1 2 |\n| a\\|b |  |\n\n- failed: `gpipe.py`" in page
    rows = [line for line in page.splitlines() if line.startswith("| 2 nodes with 4 x NVIDIA H100")]
    page = page.replace(f"{rows[0]}\n", "")
    before, rest = (ROOT / PAGE).read_text().split(write_measurements.BEGIN)
    assert page.startswith(before) and page.endswith(rest.split(write_measurements.END)[1])
    assert len(rows) == 1 and "0 of 1 parts passed" in rows[0]


def test_a_page_without_its_marks_is_named_and_not_the_file(pages, monkeypatch, capsys):
    (pages / PAGE).write_text("no marks")
    with pytest.raises(SystemExit):
        write(pages, monkeypatch)
    assert capsys.readouterr().err.startswith(f"{PAGE} lacks {write_measurements.BEGIN}")


def test_a_file_that_does_not_exist_is_named_as_missing(pages, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["write_measurements.py", str(pages / "found.json")])
    with pytest.raises(SystemExit):
        write_measurements.main()
    assert "found.json cannot be read (No such file" in capsys.readouterr().err


@pytest.mark.parametrize("changes", [{"device": "cpu"}, {"small": True}])
def test_what_stood_in_for_gpus_is_no_measurement(pages, monkeypatch, changes, capsys):
    with pytest.raises(SystemExit):
        write(pages, monkeypatch, **changes)
    assert "has no measurements: CPUs stood in for GPUs" in capsys.readouterr().err
