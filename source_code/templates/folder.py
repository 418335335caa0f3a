"""A folder of one's own from a training script: exactly the files that it imports, and how to start.

Imports are followed from file to file, those within functions too. A file of another kind, such as
the text that is learnt, goes along when one of the copied files names it.
"""

import ast
import re
import sys
from pathlib import Path

from pipeline.schedule import to_csv
from pipeline.schedules import one_f_one_b
from templates.definitions import CannotCopy

SOURCE_CODE = Path(__file__).resolve().parents[1]
REQUIREMENTS = SOURCE_CODE.parent / "requirements.txt"
JOB_SCRIPT = Path(__file__).with_name("job.sbatch")
# Objects travel as torch turns them into arrays, and torch installs without numpy.
NEEDS_NUMPY = r"\.numpy\(\)|_object\(|_object_list\(|torch\.distributed\.checkpoint"
# Where in a script the model is built and the batches are made: the first of these that there is.
PLACES = {
    "MODEL": ["build_model_part", "build_own_stage", "Network"],
    "DATA": ["read_corpus", "microbatches_of", "batch_of"],
}
README = Path(__file__).with_name("README.md")


def write_folder(script, folder):
    """Write the copy of `script` into a folder that is not there yet, or empty; says what to do."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CannotCopy(
            f"{folder} is there already, and nothing is overwritten; name a new folder"
        )
    files = files_of(SOURCE_CODE / f"{script}.py")
    contents = {path.relative_to(SOURCE_CODE): path.read_bytes() for path in files}
    texts = [path.read_text() for path in files if path.suffix == ".py"]
    requirements = "".join(f"{line}\n" for line in requirements_of(texts))
    own = files[0].read_text().replace(f" source_code/{script}.py", f" {script}.py")
    # Its commands name files in the course's folder `build`, which a copy does not have.
    contents[Path(f"{script}.py")] = own.replace(" build/", " ").encode()
    start, schedule = start_of(script, f"{script}.py")
    if schedule:
        contents[Path(schedule)] = to_csv(one_f_one_b(4, 8)).encode()
    contents[Path("requirements.txt")] = requirements.encode()
    contents[Path("job.sbatch")] = (
        JOB_SCRIPT.read_text().replace("SCRIPT.py", f"{script}.py").encode()
    )
    contents[Path("README.md")] = readme_of(script, files).encode()
    for path, content in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return (
        f"{folder} has {script}.py and {len(files) - 1} files of pipeline/; its README says how to "
        f"start it:\n    cd {folder}; {start}"
    )


def start_of(script, name):
    """The command that starts a copy called `name`, and the schedule's file if it names one.

    Both are those of the script's docstring, whose first torchrun has as many ranks as it needs.
    """
    pattern = rf"(torchrun .*) source_code/{script}\.py( \w+\.csv)?"
    torchrun, file = re.search(pattern, (SOURCE_CODE / f"{script}.py").read_text()).groups("")
    return f"{torchrun} {name}{file}", file.strip()


def files_of(script):
    """The script, the files of pipeline/ that it needs, and the other files that these name."""
    found, waiting = [], [script]
    while waiting:
        path = waiting.pop(0)
        if path in found:
            continue
        found.append(path)
        for name in imported_names(path.read_text()):
            waiting += files_of_module(name)
    texts = [path.read_text() for path in found]
    others = [path for path in (SOURCE_CODE / "pipeline").iterdir() if path.suffix != ".py"]
    named = [path for path in others if any(f'"{path.name}"' in text for text in texts)]
    return sorted({*found, *filter(Path.is_file, named)}, key=lambda path: (path != script, path))


def files_of_module(name):
    """The files that `import name` reads, its folders' own first; none unless it is of pipeline/."""
    parts = name.split(".")
    if parts[0] != "pipeline":
        return []
    folders = [SOURCE_CODE.joinpath(*parts[:depth]) for depth in range(1, 1 + len(parts))]
    candidates = [folder / "__init__.py" for folder in folders]
    candidates.append(folders[-1].with_suffix(".py"))
    return [candidate for candidate in candidates if candidate.is_file()]


def imported_names(text):
    """Every dotted name that a source imports; `from a import b` gives `a` and `a.b`."""
    names = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def requirements_of(texts):
    """A line for each package that these sources import, as the course's requirements.txt pins it.

    What comes along with another package has no pin there, and none here. A package that a source
    can do without (it catches the ImportError) is left out.
    """
    imported = {name.split(".")[0] for text in texts for name in imported_names(text)}
    if any(re.search(NEEDS_NUMPY, text) for text in texts):
        imported.add("numpy")
    packages = imported - sys.stdlib_module_names - {"pipeline"}
    pinned = {}
    for line in REQUIREMENTS.read_text().splitlines():
        if match := re.match(r"([\w-]+)==", line):
            pinned.setdefault(match[1], []).append(line.split("  #")[0].rstrip())
    lines = []
    for package in sorted(packages):
        if package in pinned:
            lines += pinned[package]
        elif not any(is_optional(package, text) for text in texts):
            lines.append(package)
    return lines


def is_optional(package, text):
    """Whether a source tries to import a package and says what to do where there is none."""
    return any(
        "ImportError" in ast.unparse(node.handlers)
        and f"import {package}" in ast.unparse(node.body)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Try)
    )


def readme_of(script, files):
    """How to start the copy, where model and data go, and what each file knows."""
    rows = [
        f"| `{path.relative_to(SOURCE_CODE)}` | {what_it_knows(path)} |"
        for path in files
        if path.suffix == ".py" and path != SOURCE_CODE / "pipeline" / "__init__.py"
    ]
    rows += [
        f"| `{path.relative_to(SOURCE_CODE)}` | the text that is learnt without `--data` |"
        for path in files
        if path.suffix == ".txt"
    ]
    text = README.read_text()
    source = files[0].read_text()
    if "training_parser(" not in source:  # its model and data are its own
        text = re.sub(r"^\| your text .*\n", "", text, flags=re.MULTILINE)
        own = r"\1MODEL, of any form: `cut` traces it and says where it comes apart |"
        text = re.sub(r"^(\| your model \| ).*", own, text, flags=re.MULTILINE)
    if not re.search(r"^from pipeline.model import .*(build_part|ModelPart)", source, re.MULTILINE):
        text = re.sub(r"^\| its weights .*\n", "", text, flags=re.MULTILINE)  # drawn in the script
    elif "def build_model_part" not in source:
        # Changed there, it is changed for the process that --verify compares with, too.
        name = "build_part" if "build_part(" in source else "ModelPart"
        text = text.replace("MODEL", f"`{name}` in `pipeline/model.py`")
    start, schedule = start_of(script, f"{script}.py")
    submit = "sbatch job.sbatch"
    if ranks := re.search("node ([^4])", start):  # and not two nodes with two ranks each
        submit = f"sbatch --nodes=1 --gres=gpu:{ranks[1]} job.sbatch"
    text = text.replace("START", start).replace("SUBMIT", f"{submit} {schedule}".rstrip())
    text = text.replace("SCRIPT", script).replace("FILES", "\n".join(rows))
    for word, names in PLACES.items():
        here = [
            name for name in names if re.search(rf"^(def|class) {name}\b", source, re.MULTILINE)
        ]
        text = text.replace(word, f"`{here[0]}` in `{script}.py`" if here else f"`{script}.py`")
    return text


def what_it_knows(path):
    """The first sentence of a file's docstring."""
    return ast.get_docstring(ast.parse(path.read_text())).splitlines()[0]
