"""What holds for the files of the repository."""

import ast
import json
import os
import re
from pathlib import Path
from urllib.parse import unquote

import architecture
import copy_template
import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "source_code"
MADE_HERE = {"build", "__pycache__"}


def files():
    """The repository's own files, without what tools and runs leave behind."""
    found = []
    for folder, folders, names in os.walk(ROOT):
        hidden = {name for name in folders if name.startswith(".") and name != ".ci"}
        folders[:] = set(folders) - hidden - MADE_HERE
        found += [Path(folder) / name for name in names]
    return sorted(found)


FILES = files()
SCRIPTS = sorted(SOURCE.glob("*.py"))
MODULES = [p for p in FILES if p.suffix == ".py" and SOURCE in p.parents and p not in SCRIPTS]
IMPORTS = architecture.module_imports(SOURCE)
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
PAGES = [path for path in FILES if path.suffix in (".md", ".ipynb")]


def name_of(path):
    return str(path.relative_to(ROOT))


def text_of(path):
    """Its text, or None when it has none."""
    try:
        return path.read_text()
    except UnicodeDecodeError:
        return None


# The architecture.


# What a package may import beside itself. No package may import a script.
ALLOWED = {
    "small": set(),
    "pipeline": set(),
    "files": set(),
    "guard": {"pipeline", "files"},
    "lab": {"pipeline", "files", "guard"},
    "planning": {"pipeline", "files", "guard", "lab", "extensions"},
    "extensions": {"pipeline", "files"},
    "broken": {"pipeline", "files", "guard", "lab", "extensions"},
    "course": {"small", "pipeline", "files", "guard", "lab", "extensions", "planning"},
    architecture.SCRIPTS: {"pipeline", "files", "guard", "lab", "extensions", "broken", "planning"},
}


def test_no_file_imports_itself_through_others():
    assert architecture.cycle_in(IMPORTS) is None


def test_folders_build_on_each_other_one_way():
    assert architecture.cycle_in(architecture.topics_of(IMPORTS)) is None


def test_every_folder_of_code_is_a_package_of_which_it_is_known_what_it_may_import():
    folders = {path.relative_to(SOURCE).parts[0] for path in MODULES}
    assert folders == set(architecture.PACKAGES) == set(ALLOWED) - {architecture.SCRIPTS}


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_what_lies_below_it(package):
    for module in IMPORTS:
        if architecture.package_of(module) == package:
            assert imports_not_allowed(module, IMPORTS) == set(), module


def imports_not_allowed(module, imports):
    package = architecture.package_of(module)
    allowed = ALLOWED[package] | {package}
    return {other for other in imports[module] if architecture.package_of(other) not in allowed}


def test_no_training_script_imports_what_plans_a_training():
    for script in copy_template.training_scripts():
        found, waiting = set(), [script.removesuffix(".py")]
        while waiting:
            module = waiting.pop()
            if module not in found:
                found.add(module)
                waiting += IMPORTS[module]
        assert "pipeline.training" in found or script.startswith("torch_"), script
        assert not {module for module in found if module.startswith("planning")}, script


@pytest.mark.parametrize(
    ("module", "other"),
    [
        ("pipeline.job", "lab.clock"),
        ("lab.attach", "course.launch"),
        ("extensions.recompute", "lab.clock"),
        ("extensions.pretraining.throughput", "planning.counted_memory"),
        ("broken.pipelines.faults", "gpipe"),
        ("course.launch", "gpipe"),
        ("gpipe", "course.launch"),
    ],
)
def test_an_import_in_the_wrong_direction_would_be_found(module, other):
    assert module in IMPORTS and other in IMPORTS
    assert imports_not_allowed(module, {module: IMPORTS[module] | {other}}) == {other}


def test_a_ring_of_imports_would_be_found():
    ring = {"a": {"b"}, "b": {"c", "d"}, "c": {"b"}, "d": set()}
    assert architecture.cycle_in(ring) == ["b", "c", "b"]


def test_the_tree_in_contributing_has_every_folder_of_the_code_at_its_place():
    [tree] = re.findall(r"^```text\nsource_code/\n(.*?)^```$", CONTRIBUTING, re.M | re.S)
    found, above = set(), []
    for indent, name in re.findall(r"^( +)(\w+)/ ", tree, re.M):
        above = [*above[: len(indent) // 4 - 1], name]
        found.add("/".join(above))
    folders = {path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*") if path.is_dir()}
    assert found == {folder for folder in folders if "__pycache__" not in folder}


def test_the_first_lines_of_all_files_tell_them_apart():
    """They are the table of contents that CONTRIBUTING names."""
    first = {path: ast.get_docstring(ast.parse(path.read_text())) for path in MODULES + SCRIPTS}
    lines = {path: text.splitlines()[0] for path, text in first.items() if text}
    packages = {path for path in MODULES if path.name == "__init__.py"}
    assert lines.keys() >= set(first) - packages
    assert len(set(lines.values())) == len(lines)
    for path, line in lines.items():
        assert len(line.split()) >= 3, name_of(path)


# The code.


@pytest.mark.parametrize("path", MODULES + SCRIPTS, ids=name_of)
def test_a_file_can_be_read_in_one_sitting_and_a_function_at_one_glance(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            docstring = node.body[0] if ast.get_docstring(node) else None
            told = docstring.end_lineno - docstring.lineno + 1 if docstring else 0
            assert node.end_lineno - node.lineno + 1 - told <= 60, node.name


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_what_is_public_says_what_it_does_or_is_short(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "the file itself"
    assert silent_in(tree, 8) == []
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            assert silent_in(node, 12) == [], node.name


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_what_a_script_defines_says_what_it_does_or_is_short(path):
    # main() is what the file's own docstring is about, and the flags have their help.
    silent = silent_in(ast.parse(path.read_text()), 12)
    assert set(silent) <= {"main", "parse_arguments", "parse_case", "read_flags"}


def silent_in(parent, length):
    """The public functions and classes of so many lines or more that have no docstring."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    public = [node for node in parent.body if isinstance(node, kinds) and node.name[0] != "_"]
    return [
        node.name
        for node in public
        if node.end_lineno - node.lineno + 1 >= length and not ast.get_docstring(node)
    ]


# Scripts whose loop is the lesson, those that are longer than the others, and those that train nothing.
BY_HAND = (
    "naive_model_parallelism",
    "gpipe",
    "one_f_one_b",
    "pipedream",
    "interleaved_1f1b",
    "zero_bubble",
)
LONGER = {"pipeline_with_data_parallel", "pretrain_llama"}
TOOLS = {
    "convert",
    "copy_template",
    "inference",
    "plan",
    "plan_partition",
    "predict",
    "preflight",
} | {
    "prepare_data",
    "search_schedule",
}


def test_a_training_script_has_at_most_150_lines_and_one_with_a_loop_by_hand_at_least_60():
    lines = {path.stem: len(path.read_text().splitlines()) - 1 for path in SCRIPTS}  # the licence
    assert {stem for stem, count in lines.items() if count > 150} - TOOLS == LONGER
    assert all(60 <= lines[stem] for stem in BY_HAND)


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_main_comes_first_in_a_script(path):
    tree = ast.parse(path.read_text())
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert functions[0] == "main"
    assert ast.get_docstring(tree)


def types_of_flags(path):
    """What the flags of a file are read with, as text: each `type=`, also in a dictionary of them."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            found += [word.value for word in node.keywords if word.arg == "type"]
        elif isinstance(node, ast.Dict):
            found += [
                v for k, v in zip(node.keys, node.values) if getattr(k, "value", "") == "type"
            ]
    return [ast.unparse(one) for one in found]


def test_every_flag_with_a_number_is_read_by_the_readers_that_all_programs_share():
    # int() and float() take 1_0, digits of any script, nan and inf. Programs without code of the
    # course, such as small/pipeline.py, have nothing else.
    used = {
        path: types_of_flags(path)
        for path in FILES
        if path.suffix == ".py" and path.parent.name != "tests"
        if re.search(
            r"^(from|import) (pipeline|guard|lab|course)\b", path.read_text(), re.MULTILINE
        )
    }
    assert sum("positive_integer" in types for types in used.values()) > 20
    assert [name_of(p) for p, types in used.items() if {"int", "float"} & {*types}] == []


# The pages.


def markdown_of(path):
    """The prose of a page, without code blocks and code in a line."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join(
            "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"
        )
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def links_of(markdown):
    """The targets of links and of pictures, Markdown's and HTML's."""
    targets = re.findall(r"\]\(\s*<?([^)\s>]+)", markdown)
    targets += re.findall(r"^ *\[[^\]]+\]: *(\S+)", markdown, re.MULTILINE)
    return targets + re.findall(r"""(?:src|href)=["']([^"']+)""", markdown)


def anchors_of(markdown):
    """The anchors of the headings, as GitHub and JupyterLab make them, in lower case."""
    headings = re.findall(r"^#+ +(.+)$", markdown, re.MULTILINE)
    kept = [re.sub(r"[^\w\- ]", "", heading).strip().lower() for heading in headings]
    return {heading.replace(" ", "-") for heading in kept}


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_every_link_within_the_repository_leads_somewhere(path):
    for link in links_of(markdown_of(path)):
        if re.match(r"[a-z]+:", link):  # of the web, or the picture itself
            continue
        file, _, anchor = unquote(link).partition("#")
        target = (path.parent / file) if file else path
        assert not file.startswith("/") and target.exists(), link
        if anchor:
            assert anchor.lower() in anchors_of(target.read_text()), link


def test_links_lead_from_the_readme_to_every_page():
    seen, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in seen and page in PAGES:
            seen.add(page)
            files = (unquote(link).partition("#")[0] for link in links_of(markdown_of(page)))
            waiting += [(page.parent / file).resolve() for file in files if file]
    assert set(PAGES) - seen == set()


def test_every_script_has_its_row_on_the_scripts_page():
    page = (ROOT / "source_code" / "README.md").read_text()
    for path in SCRIPTS:
        assert page.count(f"| [{path.name}]({path.name}) |") == 1, path.name


def test_the_scripts_page_names_only_files_that_their_package_has():
    page = (SOURCE / "README.md").read_text().partition("## The packages")[2]
    rows = dict(re.findall(r"^\| \[(\w+)\]\(\w+\) \|.*\| (.*) \|$", page, re.M))
    assert set(rows) == set(architecture.PACKAGES)
    for package, contents in rows.items():
        names = re.findall(r"`(\w+\.py|\w+/)`", contents)
        assert names and [name for name in names if not (SOURCE / package / name).exists()] == []
    topics = {path.name + "/" for path in (SOURCE / "extensions").iterdir() if path.is_dir()}
    assert topics - {"__pycache__/"} == set(re.findall(r"`(\w+/)`", rows["extensions"]))


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_every_picture_says_in_words_what_it_shows(path):
    markdown = markdown_of(path)
    for alt, target in re.findall(r"!\[([^\]]*)\]\(([^)\s]+)", markdown):
        assert len(alt.split()) >= 3, target
    for tag in re.findall(r"<img\b[^>]*>", markdown):
        assert re.search(r"""alt=["'][^"']+""", tag), tag


def test_links_are_seen():
    page = "[a](b.md#c) ![d e f](g.svg) <img src='h.png' alt='i'>\n\n[j]: k.md\n"
    assert links_of(page) == ["b.md#c", "g.svg", "k.md", "h.png"]
    assert anchors_of("## Start your own program\n# 1F1B: `--verify`") == {
        "start-your-own-program",
        "1f1b---verify",
    }


# The layout.


def test_the_top_level_is_seen_at_one_glance():
    top = {path.relative_to(ROOT).parts[0] for path in FILES if path.suffix != ".out"}
    visible = {name for name in top if not name.startswith(".")}
    assert {"README.md", "docs", "notebooks", "source_code", "tools"} <= visible
    assert len(visible) <= 14, sorted(visible)


def test_notebooks_holds_only_notebooks_and_what_they_read():
    for path in FILES:
        if ROOT / "notebooks" in path.parents and path.suffix != ".ipynb":
            beside = "".join(notebook.read_text() for notebook in path.parent.glob("*.ipynb"))
            assert path.name in beside, name_of(path)


def test_images_holds_only_pictures_and_their_page():
    names = {path.name for path in FILES if path.parent == ROOT / "images"}
    assert {name for name in names if not name.endswith(".svg")} == {"README.md", "preview.png"}


# All files.

FOREIGN = {
    "a home folder": r"(?<![\w.~-])/(home|root|Users)/\w",
    "a temporary folder": r"(?<![\w.~-])/(tmp|var/folders)/\w",
    "the folder in which it was made": r"(?<![\w.~-])" + re.escape(str(ROOT)) + r"\b",
}


@pytest.mark.parametrize("what", FOREIGN)
def test_no_file_holds(what):
    for path in FILES:
        text = text_of(path)
        if text is not None:
            found = re.search(FOREIGN[what], text)
            assert found is None, f"{name_of(path)} holds {found.group()}"


@pytest.mark.parametrize(
    "file", ["requirements.txt", "tools/constraints.txt", "Makefile", ".ci/run"]
)
def test_packages_come_from_wherever_pip_is_configured_to_look(file):
    text = (ROOT / file).read_text()
    assert not re.search(r"https?://|--index-url|--extra-index-url|--find-links|--trusted", text)


def test_a_value_that_the_makefile_exports_has_no_space_before_a_comment():
    # make keeps that space, and "1 " is not the "1" that the tests look for.
    text = (ROOT / "Makefile").read_text()
    assert re.findall(r"^[\w-]+: export \w+ :?= ", text, re.M)
    assert not re.findall(r"^[\w-]+: export .* #.*", text, re.M)


def test_licences_are_there_for_code_and_text():
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text()
    assert "creativecommons.org/licenses/by/4.0" in (ROOT / "README.md").read_text()
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^license: Apache-2.0$", citation, re.MULTILINE)
    assert re.search(r"^cff-version: ", citation, re.MULTILINE)


def test_the_version_and_its_date_are_the_same_wherever_they_stand():
    citation = (ROOT / "CITATION.cff").read_text()
    version, date = re.search(r"^version: (\S+)\ndate-released: (\S+)$", citation, re.M).groups()
    assert f'version = "{version}"' in (ROOT / "pyproject.toml").read_text()
    newest = re.search(r"^## (.*)$", (ROOT / "docs" / "changelog.md").read_text(), re.M)[1]
    assert newest == f"{version}, {date}"
