# SPDX-License-Identifier: Apache-2.0
"""Copies a training script as the start of a program of your own.

    python source_code/copy_template.py gpipe.py my-program        a folder, laid out as source_code/
    python source_code/copy_template.py gpipe.py my_program.py     one file, and the text beside it
    python source_code/copy_template.py train.py --schedules 1f1b,zb-h1 my-program

A copy has the script and the files of the course that it imports; no line is rewritten. A folder
has LICENSE and a README, too: put your name on what you change. A copy leaves out the script's
calls of the lab (--with-lab keeps them, in a folder), and with --schedules the files and rows of
all other schedules but the script's default. --bare also leaves out the guard, the two lines with
which bad input and lost ranks are named in one sentence. A copy in one file is bare, and leaves out
the imports of the course's modules, because their code is then in the same file. Only a script that
is short enough to read as one file can be copied this way.
"""

import ast
import os
import re
import symtable
import sys
import sysconfig
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace

from files.inputs import InputError, read_text
from files.outputs import not_written, write_whole
from guard.one_sentence import in_one_sentence, shortened
from pipeline.command_line import Parser
from pipeline.schedules import SCHEDULES

SOURCE_CODE = Path(__file__).resolve().parent
ROOT = SOURCE_CODE.parent
FOLDERS = ("docs", "images", "notebooks", "slurm", "source_code", "tests", "tools")
PACKAGES = ("pipeline", "files", "guard", "extensions", "lab")  # in this order in one file
# What is attached to a program, in lines of its own.
LAB = ("lab.",)
GUARD = ("guard.",)
TEXT = Path("pipeline", "field_guide.txt")
TOKEN_FILES = Path("extensions", "pretraining", "token_files.py")
PREPARATION = Path("prepare_data.py")  # writes the files that these read
ROWS = Path("pipeline", "schedules", "__init__.py")
# Packages that torch and transformers import if present: such a file would be imported.
TRIED_BY_TORCH = set(
    "backports brotli brotlicffi colorama cuda envwrap flint gmpy gmpy2 h2 monkeytype opt_einsum org "
    "pydot pynvml redis sniffio socksio torchcomms torchdistx trio triton z3".split()
)
JOB_SCRIPT = ROOT / "slurm" / "program.sbatch"
MOST_LINES = 1500  # of a copy in one file
LICENCE_LINE = "# SPDX-License-Identifier: Apache-2.0"
README = """\
# A copy of {script}

{what}

    python -m pip install -r requirements.txt
    torchrun --standalone --nproc-per-node {ranks} {script} {flags}--verify
    sbatch {options}job.sbatch {script} {flags}--verify

To train your own model with your own data, change {model} and
{data}. Read their docstrings first.

Begin with {script}. Its files, by folder, each after those that it imports:

{files}

The code comes from the course "Pipeline parallelism: predict, perform, compare", by its authors,
under the Apache License 2.0 (LICENSE). Say here what you have changed. The text
pipeline/field_guide.txt is under CC BY 4.0 (https://creativecommons.org/licenses/by/4.0/).
"""
START = {  # the ranks of a script, its flags before --verify, and sbatch's options for so many ranks
    "finetune.py": (4, "--model DIR --data FILE ", ""),
    "torch_pipelining_mlp.py": (3, "", "--nodes=1 --ntasks-per-node=3 "),
}
# What is changed for another model or other data: the first of these names that the copy defines.
MODEL = "build_model_part", "build_network", "build_own_stage", "ModelPart"
DATA = "read_corpus", "batch_of", "Text"


class CannotCopy(Exception):
    """A copy is impossible; the text says in one sentence why, and what to do."""


@in_one_sentence()
def main():
    parser = Parser(__doc__)
    parser.add_argument("script", metavar="SCRIPT", help="one of the training scripts")
    parser.add_argument("destination", metavar="DIR|FILE.py", help="a new folder or file")
    parser.add_argument("--with-lab", action="store_true", help="keep the lab, in a folder")
    bare = "leave out the guard, which also checks paths before the first step"
    parser.add_argument("--bare", action="store_true", help=bare)
    parser.add_argument("--schedules", metavar="A,B,...", help="keep these and the default only")
    arguments = parser.parse_args()
    destination = Path(arguments.destination)
    try:
        script = Path(f"{arguments.script.removesuffix('.py')}.py")
        check_arguments(script, destination, arguments.with_lab)
        if arguments.bare and arguments.with_lab:
            raise CannotCopy("the lab needs the guard; leave out --bare or --with-lab")
        script = Path(script.name)
        without = () if arguments.with_lab else LAB
        if arguments.bare or destination.suffix == ".py":
            without += GUARD
        modules = modules_of(script, without)
        if destination.suffix != ".py":
            modules = with_preparation(modules, without)
        if arguments.schedules is not None:
            kept = [name.strip() for name in arguments.schedules.split(",")]
            modules = keep_schedules(modules, kept, arguments.with_lab)
        make = one_file if destination.suffix == ".py" else folder
        files = make(destination, modules)
        for path in (path for path, text in files.items() if is_other(path, text)):
            raise CannotCopy(f"{path} exists already and differs; name another folder")
        if destination.suffix != ".py":
            make_folder(destination)
        for path, text in files.items():
            write_new(path, text, destination)
            print(f"{len(text.splitlines()):5} lines  {path}")
        if destination.suffix != ".py":
            print(f"{destination / 'README.md'} says how to start it")
    except (CannotCopy, OSError, UnicodeDecodeError) as reason:
        print(shortened(str(reason)), file=sys.stderr)
        return 2
    return int(bool(not_written))


def make_folder(destination):
    """Make the new folder of a copy: one that another copy has made meanwhile is not shared."""
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        destination.mkdir()
    except OSError as error:
        reason = f"{destination} cannot be made ({error.strerror})"
        raise CannotCopy(f"{reason}; name another place") from None


def write_new(path, text, destination):
    """Write a file of the copy; an error also names the part of the copy that is written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        begun = os.path.lexists(destination)
        left = f"remove the part of the copy in {destination}, or " if begun else ""
        reason = f"{path} cannot be written ({error.strerror})"
        raise CannotCopy(f"{reason}; {left}name another place") from None


def is_other(path, text):
    """Return whether `path` exists and its content is not `text`."""
    try:
        return os.path.lexists(path) and read_text(path) != text
    except InputError:
        return True


def read(path):
    return path.read_text(encoding="utf-8")  # in every locale


def training_scripts():
    """Return the names of the training scripts, without the broken ones and preflight.py."""
    paths = [p for p in SOURCE_CODE.glob("*.py") if not p.stem.startswith(("broken", "preflight"))]
    return sorted(p.name for p in paths if re.search("^    job = (join|start)_", read(p), re.M))


def check_arguments(script, destination, with_lab):
    """Reject what would overwrite a file, change the course, or hide a module from Python."""
    if script.name not in training_scripts():
        names = ", ".join(training_scripts())
        raise CannotCopy(f"{script.name} does not train; use one of {names}")
    course_script = SOURCE_CODE / script.name
    if len(script.parts) > 1 and script.exists() and not script.samefile(course_script):
        raise CannotCopy(f"{script} is not the course's; give the name {script.name} alone")
    one_file, place = destination.suffix == ".py", Path(os.path.realpath(destination))
    installed = PathFinder.find_spec(place.stem, [sysconfig.get_paths()["purelib"]])
    reasons = {
        "exists already": os.path.lexists(destination),
        "lies in the course's own folders": any(place.is_relative_to(ROOT / n) for n in FOLDERS),
        "is one file, and --with-lab is for folders": one_file and with_lab,
        "would be imported instead of the module of that name": one_file
        and (place.stem in sys.stdlib_module_names | TRIED_BY_TORCH or installed),
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        raise CannotCopy(f"{destination} {reason}; name another place")


class Module:
    """A file of the course, and the statements that a copy leaves out: those that use `without`."""

    def __init__(self, path, without):
        self.path, self.text = path, read(SOURCE_CODE / path)
        self.body = ast.parse(self.text).body
        nodes = [node for statement in self.body for node in ast.walk(statement)]
        imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
        attached = [node for node in imports if names_of(node)[0][1].startswith(without)]
        names = {name for node in attached for name, _ in names_of(node)}
        calls = [node for node in nodes if isinstance(node, ast.Expr)]
        for node in (node for node in self.body if isinstance(node, ast.FunctionDef)):
            calls += node.decorator_list
        calls = [node for node in calls if re.match(r"\w*", ast.unparse(node))[0] in names]
        self.left_out = attached + calls
        self.imports = [node for node in imports if node not in attached]
        self.own = [node for node in self.imports if package_of(node) in PACKAGES]
        self.others = [n for n in self.imports if n in self.body and n not in self.own]
        symbols = symtable.symtable(self.text, str(path), "exec").get_symbols()
        defined = {s.get_name() for s in symbols if s.is_assigned() and not s.is_imported()}
        self.meanings = [(name, str(path)) for name in sorted(defined - {"__all__"})]
        self.meanings += [pair for node in self.others for pair in names_of(node)]

    def leave_out(self, imports, names):
        """Leave out some imports with their names in __all__, and the rows of SCHEDULES with `names`."""
        imported = {name for node in imports for name, _ in names_of(node)}
        self.own = [node for node in self.own if node not in imports]
        self.imports = [node for node in self.imports if node not in imports]
        self.left_out = [*self.left_out, *imports]
        for node in (node for node in self.body if isinstance(node, ast.Assign)):
            if isinstance(node.value, ast.List):
                self.left_out += [one for one in node.value.elts if one.value in imported]
            if isinstance(node.value, ast.Dict):
                pairs = zip(node.value.keys, node.value.values)
                self.left_out += [
                    SimpleNamespace(lineno=key.lineno, end_lineno=value.end_lineno)
                    for key, value in pairs
                    if names & {each.id for each in ast.walk(value) if isinstance(each, ast.Name)}
                ]

    def text_without(self, nodes):
        """Return the text without some whole statements and the comments above them."""
        lines = self.text.splitlines()
        for node in nodes:
            first, last = node.lineno - 1, node.end_lineno
            while first and (lines[first - 1] or "").lstrip().startswith("#"):
                first -= 1
            if (lines[first - 1] or "").endswith(":") and lines[last : last + 1] == [""]:
                last += 1  # no empty line begins a block
            lines[first:last] = [None] * (last - first)
        text = "\n".join(line for line in lines if line is not None)
        return re.sub("\n{4,}", "\n\n\n", text).strip() + "\n"


def modules_of(script, without):
    """Return the script and its imports, the core first, each module after those it imports."""
    modules = {}

    def add(path):
        module = modules[path] = Module(path, without)
        for needed in (file for node in module.own for file in files_of(node)):
            if needed not in modules:
                add(needed)
        modules[path] = modules.pop(path)  # after its imports

    add(script)
    places = [*PACKAGES, script.name]
    return sorted(modules.values(), key=lambda module: places.index(module.path.parts[0]))


def with_preparation(modules, without):
    """Return the modules and, if they read its tokens, prepare_data.py with its imports."""
    paths = {one.path for one in modules}
    if TOKEN_FILES not in paths:
        return modules
    more = [one for one in modules_of(PREPARATION, without) if one.path not in paths]
    places = [*PACKAGES, PREPARATION.name, modules[-1].path.name]
    return sorted([*modules, *more], key=lambda one: places.index(one.path.parts[0]))


def keep_schedules(modules, names, with_lab):
    """Return the modules without the files, imports and rows of schedules that are not in `names`.

    The default of the script's --schedule stays, and what another module imports by name.
    """
    if unknown := [name for name in names if name not in SCHEDULES]:
        raise CannotCopy(f"--schedules {unknown[0]!r}: use some of {', '.join(SCHEDULES)}")
    if with_lab:
        raise CannotCopy("the lab predicts every schedule; leave out --with-lab or --schedules")
    rows = next((module for module in modules if module.path == ROWS), None)
    if rows is None:
        raise CannotCopy(f"{modules[-1].path} has no other schedule; leave out --schedules")
    used = {SCHEDULES[name].make.__name__ for name in [*names, *defaults_of(modules)]}
    for node in (node for module in modules if module is not rows for node in module.own):
        if getattr(node, "module", None) == "pipeline.schedules":
            used |= {name for name, _ in names_of(node)}
    gone = [
        node
        for node in rows.own
        if node.module.startswith("pipeline.schedules.")
        and used.isdisjoint(name for name, _ in names_of(node))
    ]
    made = {schedule.make.__name__ for schedule in SCHEDULES.values()}
    rows.leave_out(gone, made - used)
    kept, waiting = set(), [one for one in modules if len(one.path.parts) == 1]
    places = {module.path: module for module in modules}
    while waiting:
        module = waiting.pop()
        if module.path not in kept:
            kept.add(module.path)
            waiting += [places[file] for node in module.own for file in files_of(node)]
    return [module for module in modules if module.path in kept]


def defaults_of(modules):
    """Return the schedules that are defaults of --schedule."""
    found = []
    for node in (node for module in modules for node in ast.walk(ast.parse(module.text))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "add_schedule_flags":
            given = [word.value.value for word in node.keywords if word.arg == "default"]
            found += given or ["gpipe"]
    return [name for name in found if name]


def files_of(node):
    """Return the files that an import of the course loads: modules and the packages around them."""
    for _, meaning in names_of(node):
        path = Path(*meaning.split("."))
        for part in [*reversed(path.parents), path]:
            for file in (part / "__init__.py", part.parent / f"{part.name}.py"):
                if (SOURCE_CODE / file).is_file() and len(file.parts) > 1:
                    yield file


def folder(destination, modules):
    """{path: text} of a copy in the layout of source_code."""
    files = {module.path: module.text_without(module.left_out) for module in modules}
    files[TEXT], files["job.sbatch"] = read(SOURCE_CODE / TEXT), read(JOB_SCRIPT)
    files["LICENSE"] = read(ROOT / "LICENSE")
    script, trees = modules[-1].path, {m.path: ast.parse(m.text) for m in modules}
    said = {path: ast.get_docstring(tree).splitlines()[0] for path, tree in trees.items()}
    listed = [f"- `{path}`: {what}" for path, what in said.items() if path != script]
    words = {"what": said[script], "files": "\n".join(listed)}
    words |= {"model": place_of(MODEL, modules), "data": place_of(DATA, modules)}
    words |= zip(("ranks", "flags", "options"), START.get(script.name, (4, "", "")))
    files["README.md"] = README.format(script=script, **words)
    needed = {package_of(node) for module in modules for node in module.imports}
    needed.add("numpy")  # torch needs it to send Python objects
    pins = read(ROOT / "requirements.txt").splitlines(keepends=True)
    files["requirements.txt"] = "".join(pin for pin in pins if pin.split("==")[0] in needed)
    return {destination / path: text for path, text in files.items()}


def place_of(names, modules):
    """Return the first of `names` that a module defines, and that module's file, in words."""
    places = {name: path for module in modules for name, path in module.meanings}
    name = next(name for name in names if name in places)
    return f"`{name}` in {places[name]}"


def one_file(destination, modules):
    """{path: text} of a copy in one file: docstring, imports, and the code, the script's last."""
    script = modules[-1]
    docstring = ast.get_source_segment(script.text, script.body[0])  # --help shows it
    sections = [f"{LICENCE_LINE}\n{docstring}\n\n{gathered_imports(modules)}"]
    for module in modules:
        comment = module.body[:1] if module is script or not module.meanings else []
        left_out = [*comment, *module.own, *module.others, *module.left_out]
        sections.append(module.text_without(left_out).removeprefix(LICENCE_LINE).strip())
    text = "\n\n\n".join(filter(None, sections)) + "\n"
    if (lines := text.count("\n")) > MOST_LINES:
        raise CannotCopy(
            f"{script.path} would have {lines:,} lines, too many to read as one file; copy into a folder"
        )
    check_names(modules)
    return {destination: text, destination.with_name(TEXT.name): read(SOURCE_CODE / TEXT)}


def gathered_imports(modules):
    """Return the imports of other packages once each, those of the standard library first."""
    found = {}  # what is imported -> where it belongs, and the course's lines
    for node, text in ((node, module.text) for module in modules for node in module.others):
        lines = "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])
        other = package_of(node) not in sys.stdlib_module_names
        place = other, isinstance(node, ast.ImportFrom), lines
        found.setdefault(frozenset(names_of(node)), place)
    once = [found[names] for names in found if not any(names < more for more in found)]
    return "\n".join(lines for _, _, lines in sorted(once))


def check_names(modules):
    """Reject two meanings of one name, which one file cannot have."""
    bound = {}  # name -> (its meaning, the module that has it)
    for module in modules:
        for name, meaning in module.meanings:
            first, where = bound.setdefault(name, (meaning, module.path))
            if first != meaning:
                raise CannotCopy(f"{where} and {module.path} define {name}; copy into a folder")


def names_of(node):
    """(name, what it means) for each name that an import binds."""
    source = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    return [(alias.asname or alias.name, source + alias.name) for alias in node.names]


def package_of(node):
    return names_of(node)[0][1].split(".")[0]


if __name__ == "__main__":
    sys.exit(main())
