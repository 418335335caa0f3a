"""What is odd costs one sentence: a name given twice, half a timeline, a long name, small limits."""

import importlib
import json
import math
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import broken_stuck_rank
import copy_template
import make_submission
import predict
import preflight
import psutil
import pytest
import rehearse
import spoil_code
import wall
from further import first_of, further
from saved_models import write_model

from files import inputs
from guard import one_sentence
from lab.simulator import Costs, simulate
from lab.timeline import Event, Timeline, to_chrome_trace
from pipeline.schedules import build_schedule
from pipeline.schedules.text_form import to_csv

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "source_code/gpipe.py"
SMALL = "--steps 1 --layers 2 --dim 16 --heads 2 --kv-heads 1 --seq-len 4 --batch-size 8"


def rejected(monkeypatch, capsys, program, *words):
    """The sentence with which a program ends, the whole of its standard error."""
    monkeypatch.setattr(sys, "argv", [f"{program}.py", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(program).main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    return said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("plan layers=2,hidden=64,vocabulary=256,layers=3", "gives layers twice"),
        ("plan layers=2,hidden=64,vocabulary=256,tied=0,tied=0", "gives tied twice"),
        ("predict v-min --option stable=1 --option stable=2", "--option gives stable twice"),
        ("train --schedule v-min --option a=1 --option a=1", "--option gives a twice"),
        ("search_schedule --hop 0,1=10 --hop 1,0=20", "--hop gives (0, 1) twice"),
    ],
)
def test_what_a_list_gives_twice_is_named(monkeypatch, capsys, words, sentence):
    assert f"{sentence}; give it once" in rejected(monkeypatch, capsys, *words.split())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("predict a.csv --ranks 3", "--ranks 3 contradicts a.csv, which has 2"),
        ("predict a.csv --microbatches 8", "--microbatches 8 contradicts a.csv, which has 3"),
        ("search_schedule --timeline a.json --ranks 4", "--ranks 4 contradicts --timeline a.json"),
        (
            "search_schedule --timeline a.json --backward-weight 1",
            "--timeline ignores --backward-weight",
        ),
        (
            "plan_partition --profile a --workers 2 --bandwidth 1 --kv-heads 4",
            "--profile ignores --kv-heads",
        ),
        ("inference --model model --layers 3", "--layers 3 contradicts --model model, which has 4"),
    ],
)
def test_a_flag_that_contradicts_a_file_is_not_ignored(
    monkeypatch, capsys, tmp_path, words, sentence
):
    monkeypatch.chdir(tmp_path)
    schedule = build_schedule("gpipe", 2, 3)
    Path("a.csv").write_text(to_csv(schedule))
    Path("a.json").write_text(to_chrome_trace(simulate(schedule, Costs(1, 2))))
    write_model("model")
    assert sentence in rejected(monkeypatch, capsys, *words.split())


def without(timeline, removed):
    return Timeline("half", tuple(e for e in timeline.events if not removed(e.action)))


@pytest.mark.parametrize(
    ("name", "removed"),
    [
        ("gpipe", lambda action: action.microbatch == 0),
        ("gpipe", lambda action: action.microbatch == 1),
        ("gpipe", lambda action: action == (1, "F", 2)),
        ("gpipe", lambda action: action == (0, "B", 2)),
        ("zb-h1", lambda action: action == (0, "W", 2)),
        ("zb-h1", lambda action: action == (1, "I", 0)),
    ],
)
def test_a_timeline_that_lacks_a_part_of_the_step_is_named(
    monkeypatch, capsys, tmp_path, name, removed
):
    whole, file = simulate(build_schedule(name, 2, 3), Costs(1, 2)), tmp_path / "run.json"
    file.write_text(to_chrome_trace(without(whole, removed)))
    said = rejected(monkeypatch, capsys, "search_schedule", "--timeline", file)
    assert f"--timeline {file}" in said and ("micro-batch" in said or "one synchronous" in said)


def test_no_drawing_is_made_of_a_timeline_that_lacks_a_micro_batch(monkeypatch, capsys, tmp_path):
    file = tmp_path / "run.json"
    whole = simulate(build_schedule("gpipe", 2, 3), Costs(1, 2))
    file.write_text(to_chrome_trace(without(whole, lambda action: action.microbatch == 0)))
    said = rejected(
        monkeypatch, capsys, "predict", "gpipe", "--performed", file, "--svg", tmp_path / "a.svg"
    )
    assert "it has micro-batch 2 and lacks one before it" in said
    assert not (tmp_path / "a.svg").exists()


def test_a_timeline_whose_rank_does_two_actions_at_once_is_named(monkeypatch, capsys, tmp_path):
    file = tmp_path / "run.json"
    whole = simulate(build_schedule("gpipe", 2, 3), Costs(1, 2))
    at_once = tuple(Event(event.rank, event.action, 0.0, 9.0) for event in whole.events)
    file.write_text(to_chrome_trace(Timeline("at once", at_once)))
    said = rejected(monkeypatch, capsys, "search_schedule", "--timeline", file)
    assert f"--timeline {file}: rank 0 has two actions at the same time" in said


@pytest.mark.parametrize("letter", "\x01\x0b\x1b\ufffe")
def test_a_drawing_of_a_file_with_an_odd_name_is_xml(monkeypatch, tmp_path, letter):
    schedule, svg = tmp_path / f"a{letter}b.csv", tmp_path / "a.svg"
    schedule.write_text("0F0,0B0\n")
    monkeypatch.setattr("sys.argv", ["predict.py", str(schedule), "--svg", str(svg)])
    assert predict.main() == 0
    assert "a?b, 1 rank" in ElementTree.parse(svg).getroot().get("aria-label")


@pytest.fixture
def shown_once(monkeypatch):
    """Ends a wall when it would wait for the next look."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(wall, "time", SimpleNamespace(time=time.time, sleep=interrupted))


@pytest.mark.parametrize("into", ["room", "room/wall", "."])
@pytest.mark.usefixtures("shown_once")
def test_a_wall_is_not_drawn_among_the_files_that_it_shows(monkeypatch, capsys, tmp_path, into):
    (tmp_path / "room").mkdir()
    said = rejected(monkeypatch, capsys, "wall", tmp_path / "room", "--into", tmp_path / into)
    assert "FOLDER" in said and [path.name for path in tmp_path.rglob("*")] == ["room"]
    assert rejected(monkeypatch, capsys, "wall", "").startswith("FOLDER is empty text")


@pytest.mark.usefixtures("shown_once")
def test_a_wall_beside_the_files_that_it_shows_is_drawn(tmp_path, monkeypatch):
    (tmp_path / "progress").mkdir()
    words = ["wall.py", str(tmp_path / "progress"), "--into", str(tmp_path / "wall")]
    monkeypatch.setattr(sys, "argv", words)
    assert wall.main() == 0
    assert json.loads((tmp_path / "wall" / "wall_data.js").read_text()[5:-3])


@pytest.mark.parametrize("text", [None, "", "{}", '{"cells": [3]}', '{"nbformat": 4}'])
def test_what_is_no_notebook_ends_the_process_of_one_notebook_with_a_sentence(
    monkeypatch, capsys, tmp_path, text
):
    monkeypatch.setenv(make_submission.FOLDER_VARIABLE, make_submission.OFF)
    file = tmp_path / "12_a.ipynb"
    if text is not None:
        file.write_text(text)
    said = rejected(monkeypatch, capsys, "make_submission", "--one", file)
    assert said.startswith(f"--one: {file} ")


def test_a_course_without_notebooks_is_told_how_to_get_them_back(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(make_submission, "NOTEBOOKS", tmp_path)
    monkeypatch.setattr(make_submission, "read_notebooks", lambda: ([], []))
    assert "git checkout notebooks" in rejected(monkeypatch, capsys, "make_submission", "02")


LONG = ["x" * 5000, "x " * 2500, "x" * 400 + " y" * 2500]
PROGRAMS = "predict", "wall", "grade_submissions", "make_submission", "write_measurements"


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("program", [*PROGRAMS, "make_site", "quiet_run", "rehearse", "accept"])
def test_a_name_of_thousands_of_letters_is_not_thrown_back(monkeypatch, capsys, program, name):
    words = {"rehearse": ["strict"], "make_site": ["--of"]}.get(program, [])
    said = rejected(monkeypatch, capsys, program, *words, name)
    assert len(said) < one_sentence.LONGEST
    if program == "quiet_run":
        assert said.endswith("give a lesson in notebooks\n")  # what to do is still there


def limited(name, most):
    """For a new process: a limit of this kind."""
    return lambda: resource.setrlimit(getattr(resource, name), (most, most))


def started(*words, limit=None, **variables):
    """How a process ends that has this limit and only these variables.

    It keeps no compiled modules: Python would cut them off at a limit of the size of files.
    """
    return subprocess.run(
        [sys.executable, "-B", *words], env=variables, preexec_fn=limit, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


OF_TORCHRUN = {
    "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "9", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
CASES = [
    ({"limit": limited("RLIMIT_NOFILE", 32)}, 2, "fewer than 64 open files here; raise the limit"),
    ({"GLOO_SOCKET_IFNAME": "nosuch0"}, 2, "GLOO_SOCKET_IFNAME is nosuch0, and this machine has"),
    ({"GLOO_SOCKET_IFNAME": "lo,"}, 2, "GLOO_SOCKET_IFNAME is lo,, and this machine has"),
    ({"limit": limited("RLIMIT_AS", 700 * 2**20)}, 2, "fewer than 1,073,741,824 bytes of memory"),
    ({"TORCH_FR_BUFFER_SIZE": "many"}, 2, "TORCH_FR_BUFFER_SIZE is many, and has to be a whole"),
    ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "x"}, 2, "TRACE_BUFFER_SIZE is x, and has to be a whole"),
    ({"PYTHONINSPECT": "1"}, 2, "PYTHONINSPECT is set"),
    ({**OF_TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "x"}, 2, "TORCHELASTIC_RESTART_COUNT is 'x'"),
]


@pytest.mark.processes
@pytest.mark.parametrize(("world", "status", "sentence"), first_of(CASES, 2))
def test_a_process_that_lacks_what_torch_needs_ends_with_one_sentence(world, status, sentence):
    ended = started(SCRIPT, *SMALL.split(), **world)
    assert (ended.returncode, ended.stdout) == (status, "")
    assert sentence in ended.stderr and ended.stderr.count("\n") == 1


@further
@pytest.mark.processes
@pytest.mark.parametrize(
    "name", first_of(["broken_stuck_rank", "broken_mutual_wait", "broken_blocking_sends"], 1)
)
def test_a_program_about_several_ranks_is_not_started_with_one(name):
    ended = started(SCRIPT.with_name(f"{name}.py"))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "--nproc-per-node" in ended.stderr and ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("program", "flags", "sentence"),
    [
        ("prepare_data", "--data TEXT --out o --characters 5", "without --dataset"),
        ("prepare_data", "--data TEXT --out o --field body", "without JSON lines"),
        ("prepare_data", "--data TEXT --out o --sample-characters 5", "a --vocabulary above 256"),
        (
            "prepare_data",
            "--data TEXT --out o --tokenizer t.json --vocabulary 300",
            "--tokenizer ignores --vocabulary",
        ),
        ("inference", "--prompt a --requests 3", "--prompt ignores --requests"),
        ("search_schedule", "--backward-weight 1", "add --split"),
    ],
)
def test_a_flag_without_effect_is_refused(tmp_path, monkeypatch, capsys, program, flags, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("hello world\n\n" * 100)
    words = flags.replace("TEXT", "a.txt").split()
    assert sentence in rejected(monkeypatch, capsys, program, *words)
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("", "start it with"),
        ("--timeout nan", "--timeout nan"),
        ("--recorder a/b", "--recorder a/b"),
    ],
)
def test_a_program_without_the_course_s_code_also_ends_with_status_2(tmp_path, flags, sentence):
    (tmp_path / "a").touch()
    script = SCRIPT.with_name("broken_skipped_sum.py")
    words = [sys.executable, script, "--recorder", "r", *flags.split()]
    environment = {**os.environ, "WORLD_SIZE": "4" if flags else "1"}
    ended = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert sentence in ended.stderr


def test_memory_that_a_machine_does_not_tell_is_unknown_and_not_negative(monkeypatch):
    def missing():
        raise FileNotFoundError(2, "No such file or directory", "/proc/meminfo")

    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": -1}  # where sysinfo() is forbidden
    monkeypatch.setattr(os, "sysconf", pages.get)
    assert inputs.memory_of_machine() == math.inf
    monkeypatch.setitem(pages, "SC_PHYS_PAGES", 3)
    assert inputs.memory_of_machine() == 12288
    monkeypatch.setattr(psutil, "virtual_memory", missing)
    found = preflight.check_memory()
    assert found.result.startswith("unknown, ") and found.status == "warn"


def test_no_rank_is_stuck_in_a_micro_batch_that_is_not_there():
    with pytest.raises(SystemExit, match="--microbatches 2 or"):
        broken_stuck_rank.check_sizes(SimpleNamespace(num_ranks=4, microbatches=1))
    broken_stuck_rank.check_sizes(SimpleNamespace(num_ranks=3, microbatches=2))


def test_what_one_process_does_is_not_started_on_two_ranks(monkeypatch, capsys, tmp_path):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    words = "--checkpoints", tmp_path, "--to-hf", tmp_path / "model"
    assert "convert.py is one process" in rejected(monkeypatch, capsys, "convert", *words)


@pytest.mark.processes
def test_a_help_that_could_not_be_written_is_no_success():
    with open("/dev/full", "w") as full:
        words = [sys.executable, SCRIPT.with_name("predict.py"), "--help"]
        ended = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert ended.returncode == 1 and "No space left on device" in ended.stderr


@further
@pytest.mark.processes
def test_a_model_that_is_larger_than_the_limit_of_memory_ends_with_one_sentence():
    sizes = "--steps 1 --dim 2048 --layers 8".split()
    ended = started(SCRIPT, *sizes, limit=limited("RLIMIT_AS", 3 * 2**29))
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("rank 0 has too little memory (can't allocate memory: you tried")


@further
@pytest.mark.processes
def test_where_no_temporary_file_can_be_made_one_sentence_asks_for_a_folder():
    words = [*SMALL.split(), "--optimizer", "adamw"]
    ended = started(SCRIPT, *words, limit=limited("RLIMIT_FSIZE", 0))
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1
    assert "rank 0 finds no folder for temporary files; set TMPDIR" in ended.stderr


@further
@pytest.mark.processes
def test_a_limit_of_the_size_of_files_costs_the_files_and_not_the_training(tmp_path):
    outputs = ["--timeline", tmp_path / "timeline.json", "--record", tmp_path / "run"]
    outputs += ["--profile", tmp_path / "profile.json"]
    ended = started(SCRIPT, *SMALL.split(), *outputs, limit=limited("RLIMIT_FSIZE", 1024))
    assert ended.returncode == 1 and "step 0  loss" in ended.stdout
    assert "was not written (File too large); nothing else is lost" in ended.stderr
    assert "--profile of rank 0 was not written (its temporary file had no room" in ended.stderr
    assert "Traceback" not in ended.stderr and not (tmp_path / "timeline.json").exists()


@further
@pytest.mark.processes
def test_python_that_may_not_look_beside_a_script_needs_pythonpath():
    """As the page of machines says."""
    ended = started(SCRIPT, PYTHONSAFEPATH="1")
    assert ended.returncode == 1 and ended.stderr.endswith("No module named 'guard'\n")
    ended = started(SCRIPT, "--help", PYTHONSAFEPATH="1", PYTHONPATH=str(SCRIPT.parent))
    assert ended.returncode == 0 and "--microbatches" in ended.stdout


@pytest.mark.processes
def test_an_installed_package_of_the_same_name_does_not_take_the_place_of_the_core(tmp_path):
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "__init__.py").touch()
    ended = started(ROOT / "source_code/predict.py", "gpipe", PYTHONPATH=str(tmp_path))
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_lack_of_memory_is_one_sentence(monkeypatch, capsys):
    def lacks(*_):
        raise MemoryError

    monkeypatch.setattr(predict, "simulate", lacks)
    assert "too little memory" in rejected(monkeypatch, capsys, "predict", "gpipe")


@pytest.mark.parametrize("content", [b"\0\1", b"def f(:", b"\xff", b"(" * 5000])
def test_what_is_no_program_is_not_rehearsed(monkeypatch, capsys, tmp_path, content):
    (tmp_path / "mine.py").write_bytes(content)
    said = rejected(monkeypatch, capsys, "rehearse", "strict", tmp_path / "mine.py")
    assert "mine.py is not a program in Python (" in said


PLAIN = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"


@further
@pytest.mark.processes
def test_a_program_that_is_rehearsed_without_ranks_is_told_to_have_some(tmp_path):
    program = tmp_path / "plain.py"
    program.write_text(PLAIN)
    ended = started(ROOT / "source_code/rehearse.py", "strict", program)
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1
    assert "RANK expected, but not set; start it with torchrun" in ended.stderr
    program.write_text("raise ValueError('of the program')\n")
    ended = started(ROOT / "source_code/rehearse.py", "strict", program)
    assert ended.stderr.startswith("Traceback") and "of the program" in ended.stderr


@pytest.mark.parametrize(
    ("variables", "program", "sentence"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, SCRIPT, "RANK is 'x'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "b"}, SCRIPT, "'b'"),
        ({}, "/proc/self/mem/x", "no program"),
    ],
)
def test_a_rehearsal_rejects_what_no_launcher_sets(
    monkeypatch, capsys, variables, program, sentence
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["rehearse.py", "strict", str(program)])
    with pytest.raises(SystemExit) as ended:
        rehearse.main()
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("local_rank", [0, 1])
def test_a_rank_that_no_launcher_ends_says_why_it_ends(monkeypatch, capsys, local_rank):
    """The others of a node leave a launcher the time to end them, so that a sentence comes once."""
    heard_before = []
    monkeypatch.setattr(
        one_sentence.time, "sleep", lambda _: heard_before.append(capsys.readouterr().err)
    )
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**variables, "LOCAL_RANK": str(local_rank)}.items():
        monkeypatch.setenv(name, value)
    one_sentence.say("no place to meet")
    assert capsys.readouterr().err == "no place to meet\n"
    assert heard_before == [""] * local_rank


def test_a_copy_that_does_not_fit_on_the_disk_names_what_is_left(monkeypatch, capsys, tmp_path):
    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(copy_template, "write_whole", full)
    monkeypatch.setattr(sys, "argv", ["copy_template.py", "gpipe.py", str(tmp_path / "mine")])
    assert copy_template.main() == 2
    said = capsys.readouterr().err
    assert "cannot be written (No space left on device); remove" in said
    assert str(tmp_path / "mine") in said and said.count("\n") == 1


@pytest.mark.parametrize("lacks", ["git", "a folder"])
def test_faults_are_planted_only_where_copies_can_be_made(monkeypatch, capsys, lacks):
    def missing(*words, **named):
        raise FileNotFoundError(2, "No such file or directory")

    owner = spoil_code.subprocess if lacks == "git" else spoil_code.tempfile
    monkeypatch.setattr(owner, "run" if lacks == "git" else "TemporaryDirectory", missing)
    if lacks == "git":
        with pytest.raises(SystemExit, match="install git"):
            spoil_code.copy_repository(Path("copy"))
    else:
        with pytest.raises(SystemExit, match="set TMPDIR"):
            spoil_code.new_folder()


@pytest.mark.processes
def test_an_interrupt_ends_a_preparation_with_one_word(tmp_path):
    (tmp_path / "datasets.py").write_text(
        "def load_dataset(*words, **named):\n    raise KeyboardInterrupt\n"
    )
    script = ROOT / "source_code/prepare_data.py"
    words = ["--dataset", "a", "--out", tmp_path / "out"]
    ended = started(script, *words, PYTHONPATH=str(tmp_path))
    assert ended.returncode and ended.stderr == "interrupted\n"
    assert not (tmp_path / "out").exists()
