"""Starting ranks from a notebook: the same output either way, and nothing is left behind."""

import os
import re
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest
from further import first_of, further
from kernels import Kernel
from test_bad_input import SCRIPTS as TRAINING_SCRIPTS
from test_bad_input import options_of

from course import followed_run, launch
from course.failed_run import RunFailed
from course.followed_run import follow
from course.launch import ROOT, LaunchedRanks, WarmRanks, launch_words, run

LONG = "gpipe.py --steps 1000 --pace 10 20"  # minutes, if nobody ends it; of two ranks here
WARM_FIRST = pytest.mark.parametrize("warm", first_of([True, False], 1), ids=["warm", "torchrun"])


# In a real kernel, as JupyterLab does it.


class Notebook:
    """A kernel in a folder that is not the repository."""

    def __init__(self, folder):
        self.manager = Kernel(kernel_name="python3")
        self.manager.start_kernel(cwd=str(folder))
        self.connect()

    def connect(self):
        """To the kernel, new or restarted, and import what a lesson imports."""
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=90)
        source = str(ROOT / "source_code")
        self.start(f"import sys; sys.path.insert(0, {source!r}); from course.launch import run")
        self.read_until("idle")

    def start(self, code):
        self.client.execute(code)

    def read_until(self, sign, limit=90):
        """Everything printed until `sign` is printed, or until the cell is done for "idle"."""
        printed = ""
        end = time.monotonic() + limit
        while time.monotonic() < end:
            message = self.client.get_iopub_msg(timeout=limit)
            content = message["content"]
            if message["msg_type"] == "stream":
                printed += content["text"]
            elif message["msg_type"] == "error":
                printed += "\n".join(content["traceback"])
            elif content.get("execution_state") == "idle" and sign == "idle":
                return printed
            if sign != "idle" and sign in printed:
                return printed
        raise AssertionError(f"no {sign!r} within {limit} s after {printed}")

    def ranks(self):
        """The processes of the run that is under way, launchers included."""
        kernel = psutil.Process(self.manager.provisioner.pid)
        started = []
        for process in kernel.children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it ends while we look
                parent = " ".join(process.parent().cmdline())
                if "forkserver" in parent or "gpipe.py" in " ".join(process.cmdline()):
                    started.append(process)
        return started

    def start_ranks(self, warm):
        """Start a long run; its processes once the ranks have trained a step."""
        self.start(f"run({LONG!r}, ranks=2, warm={warm})")
        self.read_until("step 1 ")
        ranks = self.ranks()
        assert len(ranks) == (2 if warm else 3)  # torchrun is one of them
        return ranks

    def end(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def notebook(tmp_path):
    opened = Notebook(tmp_path)
    yield opened
    opened.end()


@pytest.fixture(scope="module")
def kept_notebook(tmp_path_factory):
    opened = Notebook(tmp_path_factory.mktemp("elsewhere"))
    yield opened
    opened.end()


def assert_gone(processes, limit):
    """Nothing of a run is left after `limit` seconds."""
    end = time.monotonic() + limit
    left = processes
    while left and time.monotonic() < end:
        left = [process for process in left if runs(process)]
        time.sleep(0.02)
    assert not left, f"{len(left)} of {len(processes)} processes are left after {limit} s"


def runs(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@WARM_FIRST
def test_interrupting_a_cell_ends_all_ranks(kept_notebook, warm):
    ranks = kept_notebook.start_ranks(warm)
    kept_notebook.manager.interrupt_kernel()
    assert_gone(ranks, 20)
    assert "KeyboardInterrupt" in kept_notebook.read_until("idle")
    assert kept_notebook.ranks() == []


def test_a_cell_can_be_run_again_after_an_interrupt_and_twice(kept_notebook):
    for _ in range(2):
        kept_notebook.start("print(run('gpipe.py --steps 2', warm=True, show=False).losses)")
        assert kept_notebook.read_until("idle") == "[5.92989, 5.242678]\n"
    assert kept_notebook.ranks() == []


def test_an_interrupt_while_the_fork_server_imports_torch_leaves_nothing(notebook):
    notebook.start(f"run({LONG!r}, warm=True)")
    notebook.read_until("$ torchrun")  # printed before anything is started
    notebook.manager.interrupt_kernel()
    assert "KeyboardInterrupt" in notebook.read_until("idle")
    assert_gone(notebook.ranks(), 20)
    notebook.start("print(run('gpipe.py --steps 1', warm=True, show=False).losses)")
    assert notebook.read_until("idle") == "[5.92989]\n"


@pytest.mark.further
def test_a_killed_kernel_leaves_no_rank(notebook):
    ranks = notebook.start_ranks(warm=False)  # the kernel of the next test has warm ones
    os.kill(notebook.manager.provisioner.pid, 9)
    assert_gone(ranks, 30)


@further  # a killed kernel shows the same
def test_a_restarted_kernel_leaves_no_rank_and_runs_again(notebook):
    ranks = notebook.start_ranks(warm=True)
    notebook.client.stop_channels()
    notebook.manager.restart_kernel(now=True)  # which kills it
    assert_gone(ranks, 30)
    notebook.connect()
    notebook.start("print(run('gpipe.py --steps 1', warm=True, show=False).losses)")
    assert notebook.read_until("idle") == "[5.92989]\n"


# In this process.


@further
def test_warm_ranks_and_torchrun_print_the_same():
    command = "gpipe.py --steps 1 --verify"
    warm, cold = (run(command, ranks=2, warm=warm) for warm in (True, False))
    assert warm.losses == cold.losses == [5.92989]

    def without_times(output):
        return [line for line in output.splitlines() if " ms (predicted " not in line]

    assert without_times(warm.output) == without_times(cold.output)
    assert len(without_times(warm.output)) == len(warm.output.splitlines()) - 1


def test_a_run_shows_its_command_and_its_output(capsys):
    output = run("gpipe.py --steps 1", ranks=2, warm=True).output
    command = "$ torchrun --standalone --nproc-per-node 2 source_code/gpipe.py --steps 1\n"
    assert capsys.readouterr().out == command + output


def test_a_run_finds_its_files_from_any_folder_and_loads_the_timeline(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = "build/tests/timeline.json"  # in the repository, in a folder that is made for it
    (ROOT / file).unlink(missing_ok=True)
    ended = run(f"gpipe.py --steps 1 --microbatches 4 --timeline {file}", ranks=2, warm=True)
    assert len(ended.timeline.events) == 2 * 4 * 2
    ended = run(f"gpipe.py --steps 1 --microbatches 2 --timeline={file}", ranks=2, warm=True)
    assert len(ended.timeline.events) == 2 * 2 * 2, "as with a space"
    assert (ROOT / file).exists() and list(tmp_path.iterdir()) == []


@WARM_FIRST
def test_a_run_that_fails_raises_the_script_s_own_sentence(warm):
    with pytest.raises(RunFailed) as failed:
        run("gpipe.py --layers 1", ranks=2, warm=warm)
    assert str(failed.value) == (
        "--layers 1 is too few for 2 stages; use at least one layer per stage, or fewer "
        "stages\n(rank 0 ended with exit status 2)"
    )


def test_a_notebook_shows_that_sentence_and_no_traceback(kept_notebook):
    kept_notebook.start("run('gpipe.py --layers 1', ranks=2, warm=True)")
    assert kept_notebook.read_until("idle") == (
        "$ torchrun --standalone --nproc-per-node 2 source_code/gpipe.py --layers 1\n"
        "RunFailed: --layers 1 is too few for 2 stages; use at least one layer per stage, or fewer "
        "stages\n(rank 0 ended with exit status 2)"
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"command": ""}, "no script ''"),
        ({"command": "gpip.py --steps 1"}, "no script 'gpip.py'"),
        ({"command": "gpipe.py '--steps"}, "gpipe.py '--steps is not a command"),
        *(({"ranks": odd}, "ranks is") for odd in (0, -1, 2.0, "many", [2], float("nan"))),
        *(({"limit": odd}, "limit is") for odd in (-1, "many", None, float("nan"))),
    ],
)
def test_what_starts_no_rank_is_one_sentence_of_a_run_that_failed(capsys, arguments, named):
    with pytest.raises(RunFailed, match=named):
        run(**{"command": "gpipe.py --layers 1", "ranks": 2, "limit": 60} | arguments)
    assert capsys.readouterr().out == ""  # not even the command


def test_a_run_that_takes_too_long_is_ended():
    # Of its own accord it would end well after 16 s: (8 + 3) x (500 + 1000) ms.
    with pytest.raises(RunFailed, match="the run took longer than 2 s"):
        run("gpipe.py --steps 1 --pace 500 1000", warm=True, limit=2)


@WARM_FIRST
def test_one_process_runs_as_with_plain_python(capsys, warm):
    command = "naive_model_parallelism.py --single-process 4 --steps 1"
    ended = run(command, ranks=None, warm=warm)
    assert ended.losses == [5.92989]
    assert capsys.readouterr().out.startswith("$ python source_code/naive_model_parallelism.py ")


def test_output_that_is_no_text_does_not_stop_a_run_of_one_thread(tmp_path, monkeypatch):
    script = tmp_path / "noise.py"
    script.write_text(
        "import os\nimport torch\nos.write(1, bytes([255, 10]))\n"
        "print(f'step 0  loss {torch.get_num_threads()}.5')\n"  # one, as torchrun's ranks have
    )
    monkeypatch.setattr(launch, "SCRIPTS", tmp_path)
    assert run("noise.py", ranks=1, warm=True, limit=60).losses == [1.5]


def test_of_a_run_that_prints_without_end_the_last_lines_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(followed_run, "MOST_LINES", 10)
    (tmp_path / "flood.py").write_text(
        "import sys\nfor line in range(1000):\n    print('line', line)\n"
        "    print('said', line, file=sys.stderr)\nsys.exit(1)\n"
    )
    monkeypatch.setattr(launch, "SCRIPTS", tmp_path)
    with pytest.raises(RunFailed) as ended:
        run("flood.py", ranks=None, warm=True, show=False, limit=60)
    assert ended.value.output.splitlines() == [f"line {line}" for line in range(990, 1000)]
    assert re.findall(r"^said (\d+)$", str(ended.value), re.M) == list(map(str, range(990, 1000)))


def said_by(started):
    try:
        return follow(started, show=False, limit=60).split()
    finally:
        started.end()


@pytest.mark.parametrize(("own", "said"), [(None, "timeout:1"), ("timeout:3", "timeout:3")])
def test_a_lost_answer_of_a_name_server_costs_a_second_and_not_five(
    tmp_path, monkeypatch, own, said
):
    """torch asks for the name of each address that it connects to, of 127.0.0.1 as well."""
    script = tmp_path / "options.py"
    script.write_text("import os\nprint(os.environ['RES_OPTIONS'])\n")
    monkeypatch.delenv("RES_OPTIONS", raising=False)
    if own:
        monkeypatch.setenv("RES_OPTIONS", own)
    assert said_by(WarmRanks(script, [], 2)) == [said, said]
    assert said_by(LaunchedRanks(["python", str(script)])) == [said]


def test_a_forked_rank_searches_no_object_of_its_server_for_garbage(tmp_path):
    """Python marks what it searches, and so copies the memory that the two processes share."""
    script = tmp_path / "objects.py"
    script.write_text("import gc\nprint(gc.get_freeze_count(), len(gc.get_objects()))\n")
    left_out, searched = map(int, said_by(WarmRanks(script, [], 1)))
    assert left_out > 100_000 > 10 * searched


def test_inside_a_slurm_allocation_torchrun_is_started_by_srun(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    words = ["torchrun", "--standalone", "--nproc-per-node", "2", "source_code/gpipe.py"]
    assert launch_words("gpipe.py", ["--verify"], 2) == [*words, "--verify"]
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "4")
    srun = ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--cpus-per-task=4"]
    assert launch_words("gpipe.py", ["--verify"], 2) == [*srun, *words, "--verify"]


def test_importing_launch_does_not_import_torch():
    program = "import sys, course.launch; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT / "source_code",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.stdout, ended.stderr) == ("[]\n", "")


IMPORTS = """
import importlib
import sys

import psutil

launch = importlib.import_module(sys.argv[1])

def torch_is_there():
    servers = psutil.Process().children()
    return any("libtorch" in each.path for server in servers for each in server.memory_maps())

launch.warm_up()
print(torch_is_there())
launch._wait_for_fork_server()
print(torch_is_there())
"""


@pytest.mark.skipif(not launch.can_fork(), reason="forking is not safe here")
def test_warming_up_does_not_wait_until_torch_is_imported():
    ended = subprocess.run(
        [sys.executable, "-c", IMPORTS, launch.__name__],
        cwd=ROOT / "source_code",
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert (ended.stdout.split(), ended.stderr) == (["False", "True"], "")


WARM_RUN = """
import importlib
import sys

launch = importlib.import_module("course.launch")
launch.PRELOAD += sys.argv[1:]
start = launch.LaunchedRanks
launch.LaunchedRanks = lambda words: print("torchrun") or start(words)
print(launch.run("gpipe.py --steps 1", ranks=2, warm=True, show=False).losses)
"""
STUB = "import torch\n\ntorch.cuda.{} = lambda: True\n"


@pytest.mark.further
@pytest.mark.skipif(not launch.can_fork(), reason="forking is not safe here")
@pytest.mark.parametrize("sign", first_of(["is_initialized", "_is_in_bad_fork", None], 1))
def test_no_rank_is_forked_where_cuda_was_initialised(tmp_path, sign):
    (tmp_path / "uses_cuda.py").write_text(STUB.format(sign))
    ended = subprocess.run(
        [sys.executable, "-c", WARM_RUN, *["uses_cuda"] * bool(sign)],
        cwd=ROOT / "source_code",
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.stdout == "torchrun\n" * bool(sign) + "[5.92989]\n", ended.stderr


@pytest.mark.parametrize("script", TRAINING_SCRIPTS)
def test_no_flag_is_the_beginning_of_one_of_torchrun_s(monkeypatch, script):
    # torchrun would take --log for its own --log-dir and refuse the call.
    from torch.distributed.run import get_args_parser

    ours = options_of(monkeypatch, script)
    theirs = set(get_args_parser()._option_string_actions)
    assert "--steps" in ours and "--nproc-per-node" in theirs
    assert [(a, b) for a in ours for b in theirs if b.startswith(a)] == []
