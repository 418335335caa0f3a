"""One readable file from a training script: only what it uses, in the order in which it is read."""

import ast
import re
import subprocess
import sys
import textwrap
from pathlib import Path

from pipeline.schedule import to_csv
from pipeline.schedules import one_f_one_b
from templates.changes import EVERYWHERE, MEASURING, RECIPES, UNWRAPPED, Recipe
from templates.definitions import CannotCopy, Module, Used, sorted_imports
from templates.folder import requirements_of, start_of
from templates.leave_out import leave_out

SOURCE_CODE = Path(__file__).resolve().parents[1]
COMPACT = Path(__file__).with_name("compact")
DATA = SOURCE_CODE / "pipeline" / "field_guide.txt"
LONGEST = 500  # lines: a copy has fewer, so that it can be read in one go


def write_single_file(script, file):
    """Write the copy of `script` as one file, with the text that it learns beside it."""
    if file.stem in {*sys.stdlib_module_names, "numpy", "torch", "transformers"}:
        raise CannotCopy(
            f"{file}: Python would take it for the module {file.stem} and no program beside it would "
            "start; choose another name"
        )
    text = single_file(script, file.name)
    lines = len(text.splitlines())
    if lines >= LONGEST:
        raise CannotCopy(
            f"{script} takes {lines} lines in one file, and fewer than {LONGEST} can be read in one "
            "go; name a folder instead"
        )
    beside = file.with_name(DATA.name)
    if file.exists():
        raise CannotCopy(f"{file} is there already, and nothing is overwritten; name a new file")
    if DATA.name in text and beside.exists() and beside.read_bytes() != DATA.read_bytes():
        raise CannotCopy(
            f"{beside} is there already with another content, and nothing is overwritten; name a "
            "file in another folder"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    if DATA.name in text:
        beside.write_bytes(DATA.read_bytes())
    start, schedule = start_of(script, file)
    if schedule and not (beside := file.with_name(schedule)).exists():
        beside.write_text(to_csv(one_f_one_b(4, 8)))
        start = start.replace(f" {schedule}", f" {beside}")
    return f"{file} has {lines} lines; start it with\n    {start}"


def single_file(script, name):
    """The text of the copy. Raises CannotCopy."""
    recipe = RECIPES.get(script, Recipe())
    text = (SOURCE_CODE / f"{script}.py").read_text()
    own = adapted(text, recipe)
    for old, new in recipe.changes:
        own = replaced(own, old, new)
    own = leave_out(own, set())  # what only the old text had read
    instead = COMPACT / "scripts" / f"{script}.py"
    if instead.exists():
        own = with_definitions_of(instead.read_text(), own)
    used = Used(Module("", own), lambda module: adapted(text_of(module, recipe), recipe))
    constants = [block_of(used, *entry) for entry in used.order if is_constant(used, *entry)]
    others = [block_of(used, *entry) for entry in used.order if not is_constant(used, *entry)]
    parts = [
        sorted_imports([*used.imports.values(), "import sys"]),
        "\n".join(dict.fromkeys(constants)) + "\n\n",
        "\n\n\n".join(others) + "\n\n",
        'if __name__ == "__main__":\n    sys.exit(main())\n',
    ]
    body = "\n".join(parts)
    return formatted(head_of(text, script, recipe, name, requirements_of([body])) + "\n" + body)


def head_of(text, script, recipe, name, packages):
    """The docstring of the copy: what it is, how it starts, what it is made from and lacks."""
    what = ast.get_docstring(ast.parse(text)).splitlines()[0]
    made = (
        f"Made by copy_template.py from the course's {script}.py and the files of pipeline/ that it "
        f"uses. {recipe.says} Left out is what measures, draws, compares and watches."
    )
    # A version that depends on Python's would need quotes in a shell: such a package has none here.
    packages = dict.fromkeys(p.split("==")[0] if ";" in p else p for p in packages)
    start = f"    python -m pip install {' '.join(packages)}\n    {start_of(script, name)[0]}"
    return f'"""{what}\n\n{start}\n\n{textwrap.fill(made, 100)}\n"""\n'


def text_of(module, recipe):
    """The text of a module of pipeline/, or its compact form, which goes by the file's name alone."""
    path = COMPACT / f"{recipe.parts.get(module, module).split('.')[-1]}.py"
    if not path.exists():
        base = SOURCE_CODE / "pipeline" / module.replace(".", "/")
        path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    return path.read_text()


def adapted(text, recipe):
    """A file's text without what a copy leaves out."""
    text = leave_out(text, MEASURING | recipe.left_out, UNWRAPPED)
    for old, new in [*EVERYWHERE, *recipe.elsewhere]:
        text = replaced(text, old, new, must=False)
    return short_docstrings(text)


def replaced(text, old, new, must=True):
    """`text` with `new` for `old`, whose white space may be any; without `new` whole lines go."""
    words = r"\s*".join(re.escape(word) for word in re.findall(r"\w+|[^\w\s]", old))
    pattern = words if new else rf"[ \t]*{words}[ \t]*\n"
    text, count = re.subn(pattern, lambda match: new, text)
    if must and not count:
        raise CannotCopy(
            f"the script no longer says '{old}', which a copy in one file changes; mend "
            "templates/changes.py"
        )
    return text


def with_definitions_of(short, text):
    """`text` with the definitions of `short` in place of its own, new ones where `short` has them."""
    lines, short_lines = text.splitlines(), short.splitlines()
    old = {node.name: node for node in ast.parse(text).body if hasattr(node, "name")}
    tree = ast.parse(short)
    first = min(node.lineno for node in tree.body if hasattr(node, "name"))
    place = {}  # line of `text` -> what comes in place of it, the old definition being emptied
    here = old["main"].lineno
    for node in tree.body:
        if not hasattr(node, "name"):
            continue
        if node.name in old:
            here = old[node.name].lineno
            for number in range(here, old[node.name].end_lineno + 1):
                lines[number - 1] = ""
        new = short_lines[node.lineno - 1 : node.end_lineno]
        place.setdefault(here, []).extend([*new, "", ""])
    for number, new in sorted(place.items(), reverse=True):
        at = number if lines[number - 1] == "" else number - 1
        lines[at:at] = new
    # Their imports come last, so that they count where both import a name.
    main = next(i for i, line in enumerate(lines) if line.startswith("def main"))
    return "\n".join([*lines[:main], *short_lines[: first - 1], *lines[main:]]) + "\n"


def short_docstrings(text):
    """Of each docstring the first line, which says what the thing does."""
    lines = text.splitlines(keepends=True)
    found = [
        node.body[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node)
    ]
    for docstring in sorted(found, key=lambda node: node.lineno, reverse=True):
        if docstring.end_lineno > docstring.lineno:
            first = lines[docstring.lineno - 1].rstrip()
            lines[docstring.lineno - 1 : docstring.end_lineno] = [first + '"""\n']
    return "".join(lines)


def is_constant(used, module, name):
    return isinstance(used.module(module).definitions[name], ast.Assign)


def block_of(used, module, name):
    """The text of one definition, without the methods that nothing calls."""
    text = used.module(module).text
    node = used.module(module).definitions[name]
    lines = text.splitlines()
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    while first > 1 and lines[first - 2].startswith("#"):
        first -= 1
    left_out = set()
    for item in node.body if isinstance(node, ast.ClassDef) else []:
        if isinstance(item, ast.FunctionDef) and not used.is_taken(node, item):
            start = min([item.lineno, *(d.lineno for d in item.decorator_list)])
            left_out |= set(range(start - 1, item.end_lineno + 1))  # and the empty line before it
    kept = [n for n in range(first, node.end_lineno + 1) if n not in left_out]
    return "\n".join(lines[n - 1] for n in kept).rstrip()


def formatted(text):
    """With imports sorted and as ruff formats it; where there is no ruff, as it is."""
    ruff = [sys.executable, "-m", "ruff"]
    style = ["--line-length", "100", "-"]
    for words in (["check", "--select", "I", "--fix-only", "--quiet"], ["format"]):
        try:
            done = subprocess.run(
                [*ruff, *words, *style], input=text, capture_output=True, text=True, timeout=60
            )
        except (OSError, subprocess.TimeoutExpired):
            return text
        text = done.stdout if done.returncode == 0 else text
    return text
