"""The core imports itself and torch, and names no instrument.

What one reads is what runs: whoever wants to look on attaches with three statements of a script.
"""

import ast
import itertools
import re
import sys

import pytest
from copy_template import training_scripts

from course.launch import ROOT

SOURCE = ROOT / "source_code"
CORE = sorted((SOURCE / "pipeline").rglob("*.py"))
INSTRUMENTS = re.compile(
    r"\b(recorder|meter|watch|recording|pace|profile|report|timeline|prediction)\b", re.IGNORECASE
)
# Calls that block until other ranks make them, too.
COLLECTIVES = {
    "all_gather", "all_gather_object", "all_reduce", "all_to_all", "barrier", "broadcast",
    "broadcast_object_list", "gather", "gather_object", "init_device_mesh", "init_process_group",
    "monitored_barrier", "new_group", "reduce", "reduce_scatter", "scatter",
    "scatter_object_list", "open_groups", "connect_group", "waiting_for_all",
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


def test_every_script_that_attaches_the_lab_is_copied_without_it_and_run_by_test_copy_template():
    assert attaching_scripts() <= set(training_scripts())


@pytest.mark.parametrize("script", sorted(attaching_scripts()))
def test_a_script_has_three_statements_of_the_lab_import_flags_and_observe(script):
    text = (SOURCE / script).read_text()
    import_, *calls = [ast.unparse(node).partition("(")[0] for node in lab_statements(text)]
    assert import_ == "from lab import attach"
    assert sorted(calls) == ["attach.add_flags", "attach.observe"]
    rest = without_lab(text)
    assert "attach." not in rest and "lab" not in imported_names(rest)
    assert rest.count("@guarded\ndef main():\n") == 1 and len(re.findall("guarded", rest)) == 2


def imported_names(text):
    return {
        (node.module or "").partition(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom)
    }


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
    folders = [
        SOURCE / name for name in ("pipeline", "files", "guard", "lab", "extensions", "planning")
    ]
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
