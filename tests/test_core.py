"""The core imports itself and torch, names no instrument, and runs without the lab.

What one reads is what runs: whoever wants to look on attaches with three statements of a script.
"""

import ast
import contextlib
import io
import itertools
import re
import runpy
import sys
from pathlib import Path

import pytest
from ranks import PRELOAD, run_on_ranks
from saved_models import write_model

from course.launch import ROOT

SOURCE = ROOT / "source_code"
CORE = sorted((SOURCE / "pipeline").rglob("*.py"))
INSTRUMENTS = re.compile(
    r"\b(recorder|meter|watch|recording|pace|profile|report|timeline|prediction)\b", re.IGNORECASE
)
SIZES = "--layers 4 --dim 16 --heads 4 --kv-heads 2 --seq-len 16 --device cpu"
TRAINING = "--batch-size 8 --steps 3"
WRITING = {"inference.py"}  # instead of losses it prints texts, a line for each request
FLAGS = {  # script that attaches the lab: what it is called with
    "activation_checkpointing.py": "--microbatches 4 --schedule zb-v",
    "distributed_checkpointing.py": "--microbatches 4 --clip 0.5",
    "finetune.py": "--microbatches 4 --dtype float64 --model {model}",
    "gpipe.py": "--microbatches 4",
    "inference.py": "--requests 3 --slots 2 --tokens 5",
    "interleaved_1f1b.py": "--microbatches 4",
    "naive_model_parallelism.py": "--microbatches 4",
    "one_f_one_b.py": "--microbatches 4",
    "pipedream.py": "",
    "pipeline_with_data_parallel.py": "--microbatches 4 --replicas 2",
    "pretrain_llama.py": "--microbatches 4 --dtype float64",
    "tensor_parallel.py": "--microbatches 4 --tensor 2",
    "torch_pipelining.py": "--microbatches 4",
    "torch_pipelining_gpt2.py": "--microbatches 4",
    "train.py": "--microbatches 4 --schedule 1f1b --option depth=2",
    "vocabulary_parallel.py": "--microbatches 4 --spread --tied",
    "zero_bubble.py": "--microbatches 4 --schedule zb-h2",
}
PRELOAD.append("torch.distributed.device_mesh")
# Calls that block until other ranks make them, too.
COLLECTIVES = {
    "all_gather", "all_gather_object", "all_reduce", "all_to_all", "barrier", "broadcast",
    "broadcast_object_list", "gather", "gather_object", "init_device_mesh", "init_process_group",
    "monitored_barrier", "new_group", "reduce", "reduce_scatter", "scatter",
    "scatter_object_list", "open_groups", "connect_group", "mean_over_ranks", "waiting_for_all",
}  # fmt: skip


def path_of(file):
    return str(file.relative_to(SOURCE))


# What the core knows


def imported_by(file):
    """The first words of the modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.partition(".")[0] if node.level == 0 else "pipeline"


@pytest.mark.parametrize("file", CORE, ids=path_of)
def test_the_core_imports_the_standard_library_torch_and_itself(file):
    assert set(imported_by(file)) <= sys.stdlib_module_names | {"torch", "pipeline"}


@pytest.mark.parametrize("file", CORE, ids=path_of)
def test_no_line_of_the_core_names_an_instrument(file):
    lines = enumerate(file.read_text().splitlines(), 1)
    assert [f"{number}: {line}" for number, line in lines if INSTRUMENTS.search(line)] == []


# The lab's statements


def is_of_the_lab(node):
    """Whether a statement imports from the lab, or is a call of what it imported."""
    if isinstance(node, ast.ImportFrom):
        return node.module.partition(".")[0] == "lab"
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and getattr(node.value.func.value, "id", None) == "attach"
    )


def lab_statements(text):
    """The statements of a script that are the lab's, in order."""
    found = [node for node in ast.walk(ast.parse(text)) if is_of_the_lab(node)]
    return sorted(found, key=lambda node: node.lineno)


def without_lab(text):
    """The script without the lab's statements; every other line stays as it is."""
    lines = text.splitlines(keepends=True)
    for node in reversed(lab_statements(text)):
        del lines[node.lineno - 1 : node.end_lineno]
    return "".join(lines)


def attaching_scripts():
    """The scripts that attach the lab to a run that is to end well."""
    attaching = {path.name for path in SOURCE.glob("*.py") if "attach.observe" in path.read_text()}
    return {name for name in attaching if not name.startswith("broken_")}


def test_every_script_that_attaches_the_lab_is_run_without_it_below():
    assert set(FLAGS) == attaching_scripts()


@pytest.mark.parametrize("script", FLAGS)
def test_a_script_has_three_statements_of_the_lab_import_flags_and_observe(script):
    text = (SOURCE / script).read_text()
    import_, *calls = [ast.unparse(node).partition("(")[0] for node in lab_statements(text)]
    assert import_ == "from lab import attach"
    assert sorted(calls) == ["attach.add_flags", "attach.observe"]
    rest = without_lab(text)
    assert "attach." not in rest and "lab" not in imported_names(rest)


def imported_names(text):
    return {
        (node.module or "").partition(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom)
    }


def run_script(rank, folder, script, flags):
    """Run a script in `folder`, where all that it imports of the course lies, on this rank."""
    at_home = (str(SOURCE), str(ROOT / "tests"))
    for name, module in list(sys.modules.items()):
        lies_there = (getattr(module, "__file__", None) or "").startswith(at_home)
        of_a_package = name.partition(".")[0] in ("pipeline", "lab", "extensions")
        if (lies_there or of_a_package) and name != "__main__":
            del sys.modules[name]
    sys.path[:] = [folder, *(path for path in sys.path if not path.startswith(at_home))]
    sys.argv = [script, *flags.split()]
    printed = io.StringIO()
    with pytest.raises(SystemExit) as ended, contextlib.redirect_stdout(printed):
        runpy.run_path(str(Path(folder) / script), run_name="__main__")
    if script in WRITING and rank == 0:
        texts = re.findall(r"^request .*\n", printed.getvalue(), re.MULTILINE)
        Path(folder, "results").write_text("".join(texts))
    return ended.value.code, sorted({name.partition(".")[0] for name in sys.modules} & {"lab"})


def results_of(folder, script):
    """The three losses or texts of a script on two ranks, and how each rank ended."""
    flags = f"{SIZES} {FLAGS[script]}"
    if "{model}" in flags:
        flags = flags.replace("{model}", str(write_model(folder / "model")))
    if script not in WRITING:
        flags += f" {TRAINING} --losses {folder}/results"
    ended = run_on_ranks(run_script, 2, str(folder), script, flags, timeout=90)
    return (folder / "results").read_text(), ended


@pytest.mark.parametrize("script", FLAGS)
def test_without_the_lab_s_lines_a_script_needs_no_lab_and_moves_no_digit(script, tmp_path):
    with_lab, bare = tmp_path / "attached", tmp_path / "bare"
    for folder, packages in ((with_lab, ["pipeline", "extensions", "lab"]), (bare, ["pipeline", "extensions"])):  # fmt: skip
        folder.mkdir()
        for package in packages:
            (folder / package).symlink_to(SOURCE / package)
    text = (SOURCE / script).read_text()
    (with_lab / script).write_text(text)
    (bare / script).write_text(without_lab(text))
    results, ended = results_of(with_lab, script)
    assert ended == [(0, ["lab"])] * 2
    assert results.count("\n") == 3
    assert results_of(bare, script) == (results, [(0, [])] * 2)


# Constructors


def collectives_in(constructor):
    """The names of collectives that an __init__ or __post_init__ calls."""
    for node in ast.walk(constructor):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", None))
            if name in COLLECTIVES and not is_asynchronous(node):
                yield name


def is_asynchronous(call):
    """Whether a call only starts the collective, as that of a Summing, which others wait for."""
    return any(
        word.arg == "async_op" and getattr(word.value, "value", None) is True
        for word in call.keywords
    )


def constructors():
    folders = [SOURCE / name for name in ("pipeline", "lab", "extensions")]
    for file in itertools.chain.from_iterable(folder.rglob("*.py") for folder in folders):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                for method in node.body:
                    if getattr(method, "name", None) in ("__init__", "__post_init__"):
                        yield f"{path_of(file)}: {node.name}", method


def test_no_constructor_runs_a_collective():
    found = {where: sorted(collectives_in(method)) for where, method in constructors()}
    assert len(found) > 30
    assert {where: names for where, names in found.items() if names} == {}
