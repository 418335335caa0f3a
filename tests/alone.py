"""A lesson alone in an empty folder, as a host of notebooks opens it, with a local repository to fetch."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import nbformat
from kernels import Kernel
from make_hosted import is_first
from nbclient import NotebookClient
from nbval.plugin import IPyNbFile, coalesce_streams

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 560  # seconds for a cell
# The environment outside the tests, with a name server, which pip needs.
ONLINE = {name: value for name, value in os.environ.items() if name != "RES_OPTIONS"}


def make_repository(folder):
    """Commit the working tree to a new repository in `folder`; returns its address."""

    def git(*words, at):
        identity = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        words = ["git", *identity, *words]
        return subprocess.run(words, cwd=at, check=True, capture_output=True, timeout=60).stdout

    listed = git("ls-files", "-z", "--cached", "--others", "--exclude-standard", at=ROOT).decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    git("init", "--quiet", at=folder)
    git("add", "--all", at=folder)
    git("commit", "--quiet", "--message", "the course", at=folder)
    return folder.as_uri()


def put_alone(lesson, folder, address):
    """Write a lesson of notebooks/, whose first cell knows `address`, into `folder`; return it."""
    notebook = json.loads((ROOT / "notebooks" / lesson).read_text())
    first = next(filter(is_first, notebook["cells"]))
    first["source"] = with_address("".join(first["source"]), address)
    folder.mkdir(exist_ok=True)
    (folder / lesson).write_text(json.dumps(notebook))
    return folder / lesson


def with_address(text, address):
    before, _, after = text.partition('ADDRESS = "')
    return f'{before}ADDRESS = "{address}"{after.partition(chr(34))[2]}'


def performed(path, python):
    """Run a notebook from the top with this Python's kernel in its folder; return its cells."""
    kernel = Kernel(kernel_name="python3")
    kernel.kernel_spec.argv = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(notebook, km=kernel, timeout=LIMIT, resources=where)
    try:
        client.execute(env=ONLINE)
    finally:
        kernel.shutdown_kernel(now=True)
    return notebook.cells


def first_output(cells):
    """What the first cell printed."""
    first = next(filter(is_first, cells))
    return "".join(output.get("text", "") for output in first.outputs)


def differences(lesson, cells, session):
    """The checked cells of a lesson whose outputs differ from the stored ones, and their number."""
    stored = IPyNbFile.from_parent(session, path=ROOT / "notebooks" / lesson)
    stored.sanitize_patterns = {}
    found = {cell.id: cell.outputs for cell in cells if cell.cell_type == "code"}
    checked = [item for item in stored.collect() if item.options["check"]]
    wrong = [
        item.cell.source
        for item in checked
        if not item.compare_outputs(coalesce_streams(found[item.cell.id]), item.cell.outputs)
    ]
    return wrong, len(checked)
