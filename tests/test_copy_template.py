"""A copied script runs where it is, by itself, and prints the losses of the original.

Every script that trains is copied into an empty folder, as a folder and as one file, and run there
on ranks that cannot find the course. Its losses are those of the original to the last digit.
"""

import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import architecture
import copy_template
import pytest
import torch
from cluster import MISSING, Cluster, free_ports, losses_of
from ranks import PRELOAD, run_on_ranks
from templates import changes, single_file
from templates.leave_out import leave_out

from pipeline.schedule import to_csv
from pipeline.schedules import one_f_one_b
from pipeline.training import build_optimizer

PRELOAD.extend(["torch.distributed.pipelining", "transformers"])
ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "source_code"
PAGE = ROOT / "docs" / "your-own-model.md"
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
END_OF_PART = "else x\n"
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
    if not script.is_relative_to(ROOT) and "pipeline" in sys.modules:
        assert Path(sys.modules["pipeline"].__file__).parents[1] == script.parent


def is_of_the_course(path):
    return Path(path or ".").resolve().is_relative_to(SOURCE)


def run(script, folder, name=None, further="", num_ranks=None):
    """The losses that a script prints and writes on a few ranks, in full precision if it can."""
    name = name or script.stem
    (folder / "schedule.csv").write_text(to_csv(one_f_one_b(2, 4)))
    flags = f"{FLAGS.get(name, SMALL)} {further}"
    flags = shlex.split(flags.replace("schedule.csv", str(folder / "schedule.csv")))
    printed, written = folder / "printed.txt", folder / "losses.jsonl"
    printed.write_text("")
    if name != "torch_pipelining_mlp":
        flags += ["--losses", str(written)]
    run_on_ranks(perform, num_ranks or RANKS.get(name, 2), script, flags, str(printed))
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


def copied_to(destination, script):
    """The copy; where there is none, the test fails with the sentence that says why."""
    said = io.StringIO()
    with mock.patch.object(sys, "stderr", said):
        code = copy(script, destination)
    assert code == 0, said.getvalue()
    return destination


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
    copied = copied_to(tmp_path / "mine", script) / f"{script}.py"
    assert run(copied, tmp_path) == original(script)


@pytest.mark.parametrize("script", SCRIPTS)
def test_one_file_runs_by_itself_with_the_losses_of_the_original(script, tmp_path, original):
    copied = copied_to(tmp_path / "mine.py", script)
    assert run(copied, tmp_path, name=script) == original(script)
    assert len(copied.read_text().splitlines()) < 500


@pytest.fixture(scope="module")
def texts():
    """{script: its copy in one file}."""
    return {script: single_file.single_file(script, "mine.py") for script in SCRIPTS}


def test_a_file_is_formatted_and_has_nothing_that_it_does_not_use(texts, tmp_path):
    for script, text in texts.items():
        (tmp_path / f"{script}.py").write_text(text)
    for words in (["format", "--check"], ["check"]):
        ruff = [sys.executable, "-m", "ruff", *words, f"--config={ROOT / 'pyproject.toml'}"]
        checked = subprocess.run([*ruff, tmp_path], capture_output=True, text=True, timeout=60)
        assert checked.returncode == 0, checked.stdout


def test_a_copy_starts_with_torchrun_from_any_folder(tmp_path, original):
    copied_to(tmp_path / "mine.py", "gpipe")
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*words, "mine.py", *shlex.split(SMALL)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    shown = re.findall(r"^step \d+  loss (\S+)$", ended.stdout, re.MULTILINE)
    assert shown == [f"{loss:.6f}" for loss in original("gpipe")]


def test_a_copied_pretraining_continues_on_another_number_of_ranks(tmp_path):
    copied = copied_to(tmp_path / "mine.py", "pretrain_llama")

    def losses(ranks, steps, folder):
        further = f"--steps {steps} --checkpoints {tmp_path / folder}"
        return run(copied, tmp_path, "pretrain_llama", further, ranks)

    whole = losses(2, 4, "whole")
    begun = losses(2, 2, "parts")
    # What a crash leaves of a checkpoint does not count.
    (tmp_path / "parts" / ".writing").mkdir()
    continued = losses(1, 4, "parts")
    assert begun == whole[:2]
    assert continued == pytest.approx(whole[2:], rel=0, abs=1e-12)
    assert "continues after 2 steps" in (tmp_path / "printed.txt").read_text()


def test_plain_descent_is_that_of_torch_to_the_last_digit():
    # The copies take torch's, the course its own, which starts faster.
    weights = [torch.randn(33, 7, dtype=torch.float64) for _ in range(2)]
    ours, theirs = ([torch.nn.Parameter(weight.clone()) for weight in weights] for _ in range(2))
    for parameter, twin in list(zip(ours, theirs))[1:]:  # the first is not used by any loss
        parameter.grad = torch.randn(33, 7, dtype=torch.float64)
        twin.grad = parameter.grad.clone()
    build_optimizer("sgd", ours, 0.2).step()
    torch.optim.SGD(theirs, lr=0.2).step()
    assert all(torch.equal(parameter, twin) for parameter, twin in zip(ours, theirs))


# What lies in a folder.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return copied_to(tmp_path_factory.mktemp("copies") / "mine", "gpipe")


@pytest.mark.parametrize("script", ["gpipe", "pretrain_llama"])
def test_a_folder_has_exactly_the_files_that_the_script_imports(script, tmp_path):
    copied = copied_to(tmp_path / "mine", script)
    imports = architecture.module_imports(SOURCE / "pipeline")
    wanted, waiting = set(), [
        name.removeprefix("pipeline.")
        for name in architecture.imported_names((SOURCE / f"{script}.py").read_text())
        if name.startswith("pipeline.")
    ]  # fmt: skip
    while waiting:
        name = waiting.pop()
        if name in imports and name not in wanted:
            wanted |= {name, name.split(".")[0]}  # a folder's own file says what it is about
            waiting += imports[name]
    files = {
        ".".join(path.relative_to(copied / "pipeline").with_suffix("").parts)
        for path in (copied / "pipeline").rglob("*.py")
    }
    assert {name.removesuffix(".__init__") for name in files} - {"__init__"} == wanted
    assert (copied / "pipeline" / "field_guide.txt").exists()


def test_a_folder_requires_the_packages_that_are_imported_as_the_course_pins_them(folder):
    lines = (folder / "requirements.txt").read_text().splitlines()
    packages = list(dict.fromkeys(line.split("==")[0] for line in lines))
    # torch needs numpy to send objects, and does not install it.
    assert packages == ["numpy", "psutil", "torch", "tqdm"]
    pins = (ROOT / "requirements.txt").read_text().splitlines()
    assert set(lines) <= {line.split("  #")[0].rstrip() for line in pins}


def test_a_file_says_which_packages_it_needs_and_runs_without_others(tmp_path):
    copied = copied_to(tmp_path / "mine.py", "gpipe")
    needed = re.search(r"^    python -m pip install (.*)$", copied.read_text(), re.MULTILINE)[1]
    assert [package.split("==")[0] for package in needed.split()] == ["torch", "tqdm"]
    without = (
        "import runpy, sys; sys.modules.update(numpy=None, psutil=None); sys.argv = sys.argv[1:]"
    )
    words = [sys.executable, "-c", f"{without}; runpy.run_path('mine.py', run_name='__main__')"]
    words += ["mine.py", *shlex.split(SMALL)]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert "step 2  loss" in ended.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_folder_explains_itself(script, tmp_path):
    folder = copied_to(tmp_path / "mine", script)
    readme = (folder / "README.md").read_text()
    for path in folder.rglob("*.py"):
        if path != folder / "pipeline" / "__init__.py":
            assert f"`{path.relative_to(folder)}`" in readme
    places = re.findall(r"`(\w+)` in `(\S+\.py)`", readme)
    assert len(places) >= 3  # the model, the data, the flags
    for name, file in places:
        assert re.search(rf"^(def|class) {name}\b", (folder / file).read_text(), re.MULTILINE)
    assert not re.search("SCRIPT|MODEL|DATA|FILES|START|SUBMIT", readme)


def test_the_model_of_a_folder_is_changed_where_verify_takes_it_from(folder):
    readme = (folder / "README.md").read_text()
    assert "| your model | `build_part` in `pipeline/model.py`" in readme
    assert "build_part(" in (folder / "gpipe.py").read_text()
    assert "build_model(" in (folder / "pipeline" / "reference.py").read_text()


def test_the_job_script_trains_on_two_nodes(folder, short_path, original):
    if MISSING:
        pytest.skip(f"no SLURM on this machine ({', '.join(MISSING)} missing); .ci/run installs it")
    cluster = Cluster(short_path, "--port", str(free_ports(3)))
    environment = {"PYTHON": sys.executable, "RANKS_PER_NODE": "1"}
    cluster.environment.update(environment)  # two nodes with one rank each
    try:
        cluster.start()
        words = ["sbatch", "--parsable", "--partition=gpu", f"--output={cluster.jobs}/%A.out"]
        submitted = subprocess.run(
            [*words, "job.sbatch", *shlex.split(SMALL)],
            cwd=folder,
            env=cluster.environment,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert submitted.returncode == 0, submitted.stderr
        output = cluster.wait_for_end(submitted.stdout.strip(), limit=120)
    finally:
        cluster.stop()
    shown = losses_of(output)
    assert list(shown.values()) == [f"{loss:.6f}" for loss in original("gpipe")], output


@pytest.mark.parametrize("script", ["custom_schedule", "torch_pipelining_mlp"])
def test_a_readme_starts_the_copy_with_the_ranks_and_the_file_that_it_needs(script, tmp_path):
    copied = copied_to(tmp_path / "mine", script)
    command = re.search(r"^torchrun .*", (copied / "README.md").read_text(), re.MULTILINE)[0]
    ranks, flags = re.search(rf"--nproc-per-node (\d) {script}.py (.*)", command).groups()
    printed = tmp_path / "printed.txt"
    printed.write_text("")
    run_on_ranks(perform, int(ranks), copied / f"{script}.py", shlex.split(flags), str(printed))
    assert "step 2  loss" in printed.read_text()


def test_a_copy_says_how_it_starts_itself_and_not_how_the_course_does(texts, tmp_path):
    for script, text in texts.items():
        own = (copied_to(tmp_path / script, script) / f"{script}.py").read_text()
        assert f"source_code/{script}.py" not in text + own and " build/" not in own
        install = re.search(r"^    python -m pip install (.*)$", text, re.MULTILINE)[1]
        # A shell must not find a redirection or the end of a command in it.
        assert re.fullmatch(r"([\w-]+(==[\w.]+)? ?)+", install), install


# Refusals.


def refusal(capsys, *words):
    assert copy(*words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_an_unknown_script_is_refused_with_those_that_there_are(tmp_path, capsys):
    said = refusal(capsys, "gpip.py", tmp_path / "mine")
    assert all(script in said for script in SCRIPTS)
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("script", ["predict.py", "preflight.py", "broken_stuck_rank.py"])
def test_what_does_not_train_is_no_start_of_a_program(script, tmp_path, capsys):
    assert "is no training script" in refusal(capsys, script, tmp_path / "mine")


def test_nothing_is_overwritten(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    for name in ("mine.py", "mine"):
        assert "nothing is overwritten" in refusal(capsys, "gpipe", tmp_path / name)
    assert (tmp_path / "mine.py").read_text() == "mine"
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_a_text_that_is_there_is_not_overwritten_either(tmp_path, capsys):
    (tmp_path / "field_guide.txt").write_text("mine")
    said = refusal(capsys, "gpipe", tmp_path / "mine.py")
    assert "field_guide.txt" in said and not (tmp_path / "mine.py").exists()
    # That of an earlier copy may be shared.
    copied_to(tmp_path / "two" / "first.py", "gpipe")
    copied_to(tmp_path / "two" / "second.py", "one_f_one_b")


@pytest.mark.parametrize("name", ["copy", "queue", "torch"])
def test_a_file_with_the_name_of_a_module_is_refused(name, tmp_path, capsys):
    said = refusal(capsys, "gpipe", tmp_path / f"{name}.py")
    assert f"Python would take it for the module {name}" in said
    assert not list(tmp_path.iterdir())


def test_a_script_that_outgrows_one_file_is_refused_with_its_length(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(single_file, "LONGEST", 300)
    said = refusal(capsys, "gpipe", tmp_path / "mine.py")
    assert re.search(r"gpipe takes \d+ lines in one file.*name a folder instead", said)


def test_a_script_that_says_something_else_now_is_refused_with_what_it_said(
    tmp_path, capsys, monkeypatch
):
    recipe = changes.Recipe(changes=[("no such words", "others")])
    monkeypatch.setitem(changes.RECIPES, "gpipe", recipe)
    assert "no longer says 'no such words'" in refusal(capsys, "gpipe", tmp_path / "mine.py")


# A model of one's own with a mistake in it.


@pytest.mark.parametrize(
    "script, destination", [("gpipe", "mine"), ("gpipe", "mine.py"), ("naive_model_parallelism", "mine.py"),
     ("interleaved_1f1b", "mine.py"), ("custom_schedule", "mine.py"), ("pipedream", "mine.py")],
)  # fmt: skip
@pytest.mark.parametrize(
    "instead, what", [("x[..., :8]", "8, 8) in torch.float64"), ("x.float()", "in torch.float32")]
)
def test_an_activation_that_does_not_fit_ends_the_job_with_a_sentence(
    script, destination, instead, what, tmp_path
):
    copied = copied_to(tmp_path / destination, script)
    model = copied / "pipeline" / "model.py" if copied.is_dir() else copied
    text = model.read_text()
    assert text.count(END_OF_PART) == 1
    model.write_text(text.replace(END_OF_PART, END_OF_PART.replace("else x", f"else {instead}")))
    with pytest.raises(RuntimeError) as failed:
        run(copied / f"{script}.py" if copied.is_dir() else copied, tmp_path, script)
    assert what in str(failed.value) and "has to be" in str(failed.value)


def test_every_rank_of_a_copy_refuses_a_flag_in_one_sentence(tmp_path):
    copied = copied_to(tmp_path / "mine.py", "gpipe")
    for flag, reason in {"--layers 1": "too few", "--step 3": "unrecognized"}.items():
        words = [sys.executable, str(copied), *flag.split()]
        environment = {**os.environ, "RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4"}
        ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 2
        assert ended.stderr.count("\n") == 1 and reason in ended.stderr


# How names are left out.


@pytest.mark.parametrize(
    "text, left",
    [
        ("run(job, recorder, 3)\n", "run(job, 3)\n"),
        ("run(job, recorder)\n", "run(job)\n"),
        ("run(job, by=recorder.clock)\n", "run(job)\n"),
        ("recorder.start()\nrun()\n", "run()\n"),
        ("def run(job, recorder=None, more=1):\n    return job\n",
         "def run(job, more=1):\n    return job\n"),
        ("with recorder.on():\n    run()  # why\n", "run()  # why\n"),
        ("with recorder.on(), other():\n    run()\n", "with other():\n    run()\n"),
        ("if recorder:\n    run()\nelse:\n    walk()\n", "walk()\n"),
        ("if fast:\n    recorder.stop()\nrun()\n", "run()\n"),
        ("def f():\n    a = g()\n    recorder.note(a)\n    return 1\n",
         "def f():\n    return 1\n"),
        ("class A:\n    @property\n    def recorder(self):\n        return 1\n\n    b = 2\n",
         "class A:\n\n    b = 2\n"),
        ("x = 'gᵀ'; run(recorder, 1)\n", "x = 'gᵀ'; run(1)\n"),
    ],
)  # fmt: skip
def test_leaving_a_name_out_takes_along_what_was_only_there_for_it(text, left):
    assert leave_out(text, {"recorder"}) == left


def test_a_check_is_left_out_around_what_it_checks():
    assert leave_out("x = validate(Schedule(a))\n", set(), {"validate"}) == "x = Schedule(a)\n"


# The page with the change to a model and a text of one's own.


def diffs_of(page):
    """The diffs that a page shows, each as {file: its diff}."""
    found = re.findall(r"^```diff\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    files = [re.split(r"^(?=--- )", diff, flags=re.MULTILINE)[1:] for diff in found]
    return [{diff.split()[1]: diff for diff in of_page} for of_page in files]


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


def changed_lines(diff):
    return [line for line in diff.splitlines() if re.match(r"[+-](?![+-]{2})", line)]


IN_ONE_FILE, IN_ANY_FOLDER, IN_PRETRAINING = range(3)  # the diffs of the page


@pytest.mark.parametrize(
    "script, number",
    [("gpipe", IN_ONE_FILE), ("one_f_one_b", IN_ONE_FILE), ("naive_model_parallelism", IN_ONE_FILE),
     ("pretrain_llama", IN_ONE_FILE), ("zero_bubble", IN_ANY_FOLDER),
     ("pretrain_llama", IN_PRETRAINING)],
)  # fmt: skip
def test_a_change_of_fewer_than_20_lines_brings_in_another_model_and_text(
    script, number, tmp_path, original
):
    diffs = diffs_of(PAGE)[number]
    assert 0 < sum(len(changed_lines(diff)) for diff in diffs.values()) < 20
    as_folder = number != IN_ONE_FILE
    copied = copied_to(tmp_path / ("mine" if as_folder else "gpipe.py"), script)
    folder = copied if as_folder else tmp_path
    for file, diff in diffs.items():
        (folder / file).write_text(patched((folder / file).read_text(), diff))
    copied = copied / f"{script}.py" if as_folder else copied
    (folder / "my_text.txt").write_text(OWN_TEXT)
    losses = run(copied, tmp_path, script, "--verify" if as_folder else "")
    assert losses != original(script)
    assert losses[-1] < losses[0]
    if as_folder:
        assert "as promised" in (tmp_path / "printed.txt").read_text()
    else:
        afresh = "--checkpoints alone" if script == "pretrain_llama" else ""
        alone = run(copied, tmp_path, script, afresh, num_ranks=1)
        assert alone == pytest.approx(losses, rel=0, abs=1e-12)
