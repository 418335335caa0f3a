"""A copied script has the course's own lines and no others, runs by itself, and trains the same.

Every training script is copied in both forms, and run on ranks that cannot find the course.
"""

import ast
import functools
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import copy_template
import pytest
from further import first_of
from ranks import PRELOAD, run_on_ranks
from saved_models import write_model

from course.launch import run
from extensions.torch_pipelining.hugging_face import LATE_IMPORTS

PRELOAD.extend(["torch.distributed.pipelining", *LATE_IMPORTS])
ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "source_code"
SCRIPTS = copy_template.training_scripts()
ONE_FILE = ["gpipe.py", "naive_model_parallelism.py", "one_f_one_b.py", "zero_bubble.py"]
OWN = ("pipeline", "files", "guard", "extensions", "lab")
PARSED_ONCE = functools.cache(copy_template.Module)  # for all copies that these tests make
SMALL = "--steps 3 --batch-size 4 --microbatches 2 --layers 4 --dim 16 --seq-len 8 --device cpu"
NO_LOSSES = {"inference.py", "torch_pipelining_mlp.py"}  # scripts without --losses
FLAGS = {
    "finetune.py": f"{SMALL} --dtype float64",
    "inference.py": "--requests 3 --tokens 5 --layers 4 --dim 16 --seq-len 32 --device cpu",
    "pipedream.py": "--steps 4 --batch-size 4 --layers 4 --dim 16 --seq-len 8 --device cpu",
    "pipeline_with_data_parallel.py": f"{SMALL} --replicas 2",
    "pretrain_llama.py": f"{SMALL} --dtype float64",
    "torch_pipelining_mlp.py": "--steps 3",
    "vocabulary_parallel.py": f"{SMALL} --spread --tied",
}


def copy(*words):
    """Copy as from a terminal, in this process; returns the exit status."""
    with mock.patch.object(sys, "argv", ["copy_template.py", *map(str, words)]):
        return copy_template.main()


def perform(rank, script, flags, file):
    """In a rank: run a script as torchrun would; beside a copy nothing of the course is found."""
    os.chdir(script.parent)
    sys.dont_write_bytecode = True  # Python would miss an edit of equal length in the same second
    for name in [name for name in sys.modules if name.split(".")[0] in (*OWN, "course")]:
        del sys.modules[name]
    sys.path[:] = [path for path in sys.path if not Path(path or ".").is_relative_to(SOURCE)]
    sys.path.insert(0, str(script.parent))
    with open(file, "a") as out, mock.patch.multiple(sys, stdout=out, argv=[str(script), *flags]):
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(script), run_name="__main__")
    assert not end.value.code, f"exit status {end.value.code}"
    found = [Path(m.__file__) for n, m in sys.modules.items() if n.startswith("pipeline.")]
    assert all(path.is_relative_to(script.parent) for path in found)


def train(script, name, folder, more="", timeout=60):
    """The losses or texts that a script prints, or writes in full precision if it can; it verifies."""
    printed, written = folder / "printed.txt", folder / "losses.jsonl"
    flags = f"{FLAGS.get(name, SMALL)} --verify {more}".split()
    if name == "finetune.py":
        flags += ["--model", str(write_model(folder / "model"))]
    if name not in NO_LOSSES:
        flags += ["--losses", str(written)]
    ranks = 2 + (name == "torch_pipelining_mlp.py")
    run_on_ranks(perform, ranks, script, flags, str(printed), timeout=timeout)
    said = printed.read_text()
    shown = re.findall(r"^step \d+  loss (\S+)$|^request \d  (.*)$", said, re.MULTILINE)
    assert ("as promised" in said or "are those of one process" in said) and len(shown) >= 3
    rows = written.read_text().splitlines() if written.exists() else []
    return [json.loads(row)["loss"] for row in rows] or shown


class Without(ast.NodeTransformer):
    """Leaves out the imports of some packages, the calls of the lab and of the guard, and @guarded."""

    def __init__(self, *packages):
        self.packages, self.calls = packages, ("attach",)

    def visit_ImportFrom(self, node):
        package = node.module.split(".")[0]
        if package == "guard" in self.packages:
            self.calls += tuple(alias.name for alias in node.names)
        return None if package in self.packages else node

    def visit_FunctionDef(self, node):
        node.decorator_list = [n for n in node.decorator_list if not self.is_call(n)]
        return self.generic_visit(node)

    def visit_Expr(self, node):
        return None if self.is_call(node) else node

    def is_call(self, node):
        return re.match(r"\w*", ast.unparse(node))[0] in self.calls


def statements(path, *packages):
    """A file's statements without those of the lab, and without the imports of `packages`."""
    return statements_in(path.read_text(), *packages)


@functools.cache  # most files of one copy are also in the next
def statements_in(text, *packages):
    return [ast.dump(node) for node in Without(*packages).visit(ast.parse(text)).body]


@pytest.mark.further
def test_what_is_copied_speaks_of_no_folder_lesson_or_page_of_the_course(monkeypatch):
    monkeypatch.setattr(copy_template, "Module", functools.cache(copy_template.Module))
    names = [*SCRIPTS, "prepare_data.py"]
    modules = {m.path: m.text for name in names for m in copy_template.modules_of(Path(name), ())}
    assert len(modules) > 100
    words = r"source_code|[Ll]esson|git checkout|(?<!\.co/)docs/|notebooks|slurm/|tools/|images/"
    for path, text in modules.items():
        assert not re.findall(f".*(?:{words}).*", text), path


def test_every_file_of_the_course_s_code_names_its_licence_which_a_folder_copy_has(tmp_path):
    line = copy_template.LICENCE_LINE
    for path in SOURCE.rglob("*.py"):
        assert path.read_text().startswith(line + "\n"), path
    assert copy("gpipe.py", tmp_path / "mine") == copy("gpipe.py", tmp_path / "mine.py") == 0
    assert (tmp_path / "mine.py").read_text().count(line) == 1
    assert (tmp_path / "mine/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    readme = (tmp_path / "mine/README.md").read_text()
    assert "Apache License" in readme and "CC BY 4.0" in readme
    listed = re.findall(r"^- `(.+)`: ", readme, re.M)
    inside = (tmp_path / "mine").glob("*/**/*.py")
    assert {*listed} == {str(path.relative_to(tmp_path / "mine")) for path in inside}
    added = {path.name for path in (tmp_path / "mine").iterdir() if path.is_file()}
    assert added == {"gpipe.py", "LICENSE", "README.md", "job.sbatch", "requirements.txt"}


@pytest.mark.further
@pytest.mark.processes
@pytest.mark.parametrize("more", [[], ["--bare"]])
def test_a_copy_that_reads_tokens_can_make_them(more, tmp_path):
    assert copy("finetune.py", tmp_path / "mine", *more) == 0
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog.\n\n" * 50)
    words = f"prepare_data.py --data {tmp_path / 'text.txt'} --vocabulary 300 --out tokens".split()
    command = [sys.executable, *words]
    ended = subprocess.run(command, cwd=tmp_path / "mine", capture_output=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "mine" / "tokens" / "tokens.json").is_file()
    assert (tmp_path / "mine" / "guard").is_dir() == (not more)
    assert copy("gpipe.py", tmp_path / "other") == 0
    assert not (tmp_path / "other" / "prepare_data.py").exists()


def test_a_copy_without_the_lab_says_where_it_runs(tmp_path):
    assert copy("gpipe.py", tmp_path / "mine") == 0
    train(tmp_path / "mine/gpipe.py", "gpipe.py", tmp_path)
    assert "2 ranks on cpu, gloo messages, float64\n" in (tmp_path / "printed.txt").read_text()


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """A function: a script's copies in a folder, in a bare one, and in one file if it is short."""

    @functools.cache
    def copies_of(script):
        where = tmp_path_factory.mktemp(Path(script).stem)
        with mock.patch.object(copy_template, "Module", PARSED_ONCE):
            assert copy(script, where / "mine") == copy(script, where / "bare", "--bare") == 0
            assert copy(script, where / "mine.py") == (0 if script in ONE_FILE else 2)
        return where / "mine", where / "bare", where / "mine.py"

    return copies_of


@pytest.mark.parametrize("script", first_of(SCRIPTS, 4))
def test_a_copy_has_no_line_that_is_not_the_course_s_own_and_lacks_none(script, copied):
    folder, bare, _ = copied(script)
    for copy_of, without in ((folder, ["lab"]), (bare, ["lab", "guard"])):
        files = [path for path in copy_of.rglob("*") if path.is_file()]
        others = {path.name for path in files if path.suffix != ".py"}
        assert others == {
            "LICENSE", "README.md", "field_guide.txt", "requirements.txt", "job.sbatch"
        }  # fmt: skip
        readme = (copy_of / "README.md").read_text()
        for name, path in re.findall(r"`(\w+)` in (\S+\.py)", readme):  # what to change, and where
            assert re.search(rf"^(def|class) {name}\b", (copy_of / path).read_text(), re.M), name
        for path in (path.relative_to(copy_of) for path in files if path.suffix == ".py"):
            assert path.parts[0] not in without
            mine, theirs = copy_of / path, SOURCE / path
            lines = iter(theirs.read_text().splitlines())
            assert all(line in lines for line in mine.read_text().splitlines()), path  # in order
            assert statements(mine) == statements(theirs, *without), path
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", folder.parent]
    subprocess.run(ruff, check=True, timeout=60)


@pytest.mark.parametrize("script", first_of(SCRIPTS, 4))
def test_the_readme_lists_files_by_folder_each_after_those_that_it_imports(script, copied):
    listed = re.findall(r"^- `(.+)`: ", (copied(script)[0] / "README.md").read_text(), re.M)
    folders = [path.partition("/")[0] for path in listed]
    assert sum(map(str.__ne__, folders, ["", *folders])) == len({*folders})
    for number, path in enumerate(listed):
        own = PARSED_ONCE(Path(path), copy_template.LAB).own
        needed = {str(file) for node in own for file in copy_template.files_of(node)}
        assert {*listed[number:]}.isdisjoint(f for f in needed if "__init__" not in f), path


@pytest.mark.further
@pytest.mark.parametrize("script", ["finetune.py", "torch_pipelining_mlp.py"])  # not as the others
def test_the_readme_starts_a_copy_with_ranks_and_flags_that_it_takes(script, copied, tmp_path):
    readme = (copied(script)[0] / "README.md").read_text()
    [(ranks, flags)] = re.findall(rf"^    torchrun .* (\d) {script} (.*)$", readme, re.M)
    assert re.findall(r"^    sbatch .*job\.sbatch (.*)", readme, re.M) == [f"{script} {flags}"]
    flags = flags.replace("DIR", str(write_model(tmp_path / "model")))
    flags = f"{flags} {FLAGS[script]}".replace("FILE", str(SOURCE / "pipeline/field_guide.txt"))
    run_on_ranks(perform, int(ranks), copied(script)[0] / script, flags.split(), tmp_path / "out")


@pytest.mark.parametrize("script", first_of(ONE_FILE, 1))
def test_one_file_has_the_statements_of_the_folder_s_files(script, copied):
    folder, _, file = copied(script)
    sources = [path.relative_to(folder) for path in folder.rglob("*.py")]
    course = {line for path in sources for line in (SOURCE / path).read_text().splitlines()}
    assert set(file.read_text().splitlines()) <= course
    in_one = [s for s in statements(file) if not re.match("Import|Expr", s)]
    with mock.patch.object(copy_template, "Module", PARSED_ONCE):
        modules = copy_template.modules_of(Path(script), copy_template.LAB + copy_template.GUARD)
    known = [s for m in modules for s in statements(SOURCE / m.path, *OWN)]
    assert in_one == [s for s in known if not re.match("Import|Expr", s)]


@pytest.mark.further
def test_a_copy_with_one_schedule_has_no_line_of_the_others_and_the_losses_bit_for_bit(tmp_path):
    assert copy("train.py", tmp_path / "mine", "--schedules", "zb-h1") == 0
    files = [*(tmp_path / "mine").rglob("*.py")]
    text = "\n".join(path.read_text() for path in files)
    assert "def zb_h1(" in text and "Generator(zb_h2" not in text
    for other in ("gpipe", "one_f_one_b", "interleaved_1f1b", "zb_v", "v_min", "dualpipe_v"):
        assert not re.search(
            rf"^def {other}\(|Generator\({other}[,)]|import .*\b{other}\b", text, re.M
        )
    course = {line for path in SOURCE.rglob("*.py") for line in path.read_text().splitlines()}
    assert set(text.splitlines()) <= course
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", tmp_path / "mine"]
    subprocess.run(ruff, check=True, timeout=60)
    losses = []
    for number, script in enumerate([SOURCE / "train.py", tmp_path / "mine" / "train.py"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        losses.append(train(script, "train.py", folder, "--schedule zb-h1"))
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("train.py NEW --schedules zb-h3", "--schedules 'zb-h3': use some of naive, gpipe"),
        ("train.py NEW --schedules 1f1b --with-lab", "the lab predicts every schedule"),
        ("gpipe.py NEW --schedules 1f1b", "gpipe.py has no other schedule"),
        ("gpipe.py NEW --schedules '1f1b, zb-h1'", "gpipe.py has no other schedule"),
        ("gpipe.py NEW --bare --with-lab", "the lab needs the guard"),
        ("pretrain_llama.py NEW.py", "lines, too many to read as one file"),
    ],
)
def test_choices_that_cannot_be_made_are_rejected(words, sentence, tmp_path, capsys):
    assert copy(*shlex.split(words.replace("NEW", str(tmp_path / "mine")))) == 2
    assert sentence in capsys.readouterr().err and not os.listdir(tmp_path)


@pytest.mark.parametrize("script", first_of(SCRIPTS, 1))
def test_both_forms_run_by_themselves_with_the_losses_of_the_course_bit_for_bit(
    script, copied, tmp_path
):
    folder, bare, file = copied(script)
    without_guard = file if script in ONE_FILE else bare / script
    runs = {"course": SOURCE / script, "folder": folder / script, "bare": without_guard}
    results = []
    for name, path in runs.items():
        (tmp_path / name).mkdir()
        results.append(train(path, script, tmp_path / name))
    assert results[0] == results[1] == results[2]


def test_a_rehearsal_of_a_copy_runs_the_files_of_the_copy(tmp_path):
    assert copy("gpipe.py", tmp_path / "mine", "--bare") == 0
    model = tmp_path / "mine" / "pipeline" / "model.py"
    model.write_text(model.read_text().replace("self.dim / 3 / 16", "self.dim / 6 / 16"))
    performed = train(tmp_path / "mine" / "gpipe.py", "gpipe.py", tmp_path)
    call = f"rehearse.py strict {tmp_path}/mine/gpipe.py {SMALL}"
    rehearsed = run(call, 2, warm=True, show=False).losses
    assert rehearsed == [round(loss, 6) for loss in performed]
    assert rehearsed != run(f"gpipe.py {SMALL}", 2, warm=True, show=False).losses


@pytest.mark.further
def test_a_folder_with_the_lab_measures_and_pins_what_it_imports(tmp_path):
    assert copy("gpipe", tmp_path / "mine", "--with-lab") == 0
    run = [sys.executable, "gpipe.py", *SMALL.split(), "--pace", "1", "2"]
    shown = subprocess.check_output(run, cwd=tmp_path / "mine", text=True, timeout=60)
    assert "predicted" in shown
    pins = (tmp_path / "mine" / "requirements.txt").read_text().splitlines()
    assert {pin.split("==")[0] for pin in pins} == {"numpy", "psutil", "torch"}
    assert set(pins) <= set((ROOT / "requirements.txt").read_text().splitlines())


def test_the_course_s_script_is_not_copied_in_place_of_another_of_that_name(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "gpipe.py").write_text("print('changed')")
    assert copy("theirs/gpipe.py", "new") == 2 and not (tmp_path / "new").exists()
    assert "theirs/gpipe.py is not the course's" in capsys.readouterr().err
    assert copy(str(SOURCE / "gpipe.py"), "new") == 0


BAD_INPUT = {
    "gpip.py new": "gpipe.py", "predict.py new": "does not train",
    "gpipe.py there": "exists already", "gpipe.py there/mine.py": "field_guide.txt",
    f"gpipe.py {SOURCE}/new": "course's own", "gpipe.py random.py": "module of that name",
    "gpipe.py torch.py": "module of that name", "gpipe.py new.py --with-lab": "folder",
}  # fmt: skip


@pytest.mark.parametrize("words, reason", BAD_INPUT.items())
def test_bad_input_is_rejected_in_one_sentence(words, reason, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "field_guide.txt").write_text("mine")
    assert copy(*words.split()) == 2
    assert re.fullmatch(f".*{reason}.*\n", capsys.readouterr().err)
    assert [path.name for path in tmp_path.rglob("*")] == ["there", "field_guide.txt"]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("nowhere", path)])
def test_what_is_no_file_beside_a_copy_is_not_read_and_stays(make, tmp_path, capsys):
    make(tmp_path / "field_guide.txt")
    assert copy("gpipe.py", tmp_path / "mine.py") == 2
    assert re.fullmatch(
        r".*field_guide.txt exists already and differs.*\n", capsys.readouterr().err
    )
    assert os.listdir(tmp_path) == ["field_guide.txt"]


def test_two_copies_do_not_share_a_folder(tmp_path, monkeypatch, capsys):
    folder = copy_template.folder

    def while_another_copies(destination, modules):
        files = folder(destination, modules)
        destination.mkdir()
        return files

    monkeypatch.setattr(copy_template, "folder", while_another_copies)
    assert copy("gpipe.py", tmp_path / "mine") == 2
    assert re.fullmatch(r".*mine cannot be made \(File exists\); .*\n", capsys.readouterr().err)
    assert os.listdir(tmp_path / "mine") == []


def test_a_name_that_is_too_long_is_rejected_with_what_to_do(tmp_path, capsys):
    assert copy("gpipe.py", tmp_path / f"{'x' * 300}") == 2
    assert re.fullmatch(r".*File name too long\); name another place\n", capsys.readouterr().err)


def test_a_name_that_two_modules_define_is_rejected_with_both():
    modules = [copy_template.Module(Path(p), ()) for p in ("pipeline/job.py", "train.py")]
    modules[1].meanings.append(("Job", "train.py"))
    with pytest.raises(copy_template.CannotCopy, match="pipeline/job.py and train.py define Job"):
        copy_template.check_names(modules)


TRIED = """
import importlib.machinery, sys
names = set()
sys.addaudithook(lambda event, details: names.add(details[0]) if event == "import" else None)
import torch, torch._dynamo, torch.distributed.checkpoint
top = {str(name).partition(".")[0] for name in names} - sys.stdlib_module_names
find = importlib.machinery.PathFinder.find_spec
print(*sorted(name for name in top if name and find(name) is None))
"""


@pytest.mark.further
@pytest.mark.processes
def test_a_copy_has_no_name_that_torch_would_import_if_it_were_there(tmp_path, capsys):
    tried = subprocess.run(
        [sys.executable, "-c", TRIED], capture_output=True, text=True, timeout=120, check=True
    ).stdout.split()
    assert "triton" in tried
    assert set(tried) <= copy_template.TRIED_BY_TORCH
    for name in (*tried, "numpy", "json"):
        assert copy("gpipe.py", tmp_path / f"{name}.py") == 2
        assert "would be imported instead" in capsys.readouterr().err
