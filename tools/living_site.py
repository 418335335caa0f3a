"""What lets the website run the course's Python in a page: Pyodide, and the course's own files.

Pyodide is CPython for a browser. It comes from npm, at a fixed version and with a fixed hash, and is
kept in build/npm. A page that lies on a disk can read no file but scripts, so everything is written
into two of them: runtime.js has Pyodide, course.js the course.
"""

import ast
import base64
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import architecture

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "source_code"
BROWSER = ROOT / "tools" / "browser"
DOWNLOADED = ROOT / "build" / "npm"
LIMIT = 300  # seconds for a command
VERSION = "314.0.7"
SHA512 = (
    "d18bd7c4485f11da4b7dbfd790cd8114078c44eab488c517d9bcf31fda4eb6dc"
    "8c716930abe1db139bb2b860fcd8b37bcb6abe48dbe2ffa579244b0e943d91d4"
)
RUNTIME = (
    "pyodide.mjs",
    "pyodide.asm.mjs",
    "pyodide.asm.wasm",
    "python_stdlib.zip",
    "pyodide-lock.json",
)
ENTRY = "course.browser.page"


class NoRuntime(Exception):
    """Pyodide cannot be had; the text says why."""


def pyodide():
    """The bytes of Pyodide's files, {name: bytes}, ready for a page. Raises NoRuntime.

    They are fetched, and the standard library is compiled, once; build/npm keeps both.
    """
    archive = DOWNLOADED / f"pyodide-{VERSION}.tgz"
    if not archive.is_file():
        download(archive)
    if hashlib.sha512(archive.read_bytes()).hexdigest() != SHA512:
        archive.unlink()
        raise NoRuntime(f"what npm gave for pyodide {VERSION} has another hash than expected")
    with tarfile.open(archive) as packed:
        files = {name: packed.extractfile(f"package/{name}").read() for name in RUNTIME}
    files["python_stdlib.zip"] = compiled_library(files)
    return files


def download(archive):
    """Fetch Pyodide's package with npm. Raises NoRuntime with a sentence."""
    if shutil.which("npm") is None:
        raise NoRuntime("npm is not installed")
    archive.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=archive.parent) as folder:
        run(
            ["npm", "pack", f"pyodide@{VERSION}", "--fetch-retries=1", "--pack-destination", folder]
        )
        os.replace(Path(folder) / archive.name, archive)


def compiled_library(files):
    """Pyodide's standard library as the bytes of a zip archive of compiled files."""
    if shutil.which("node") is None:
        raise NoRuntime("node is not installed")
    recipe = (BROWSER / "compile.mjs").read_bytes()
    name = f"library-{hashlib.sha256(SHA512.encode() + recipe).hexdigest()[:16]}.zip"
    library = DOWNLOADED / name
    if not library.is_file():
        with TemporaryDirectory(dir=DOWNLOADED) as folder:
            for name, data in files.items():
                (Path(folder) / name).write_bytes(data)
            compiled = Path(folder) / "compiled.zip"
            run(["node", BROWSER / "compile.mjs", folder, compiled])
            os.replace(compiled, library)
    return library.read_bytes()


def run(command):
    """Run a command. Raises NoRuntime with npm's code for the error, else the last line it says."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        raise NoRuntime(f"{command[0]} did not finish within {LIMIT} s") from None
    if done.returncode:
        code = re.search(r"npm (?:error|ERR!) code (\w+)", done.stderr)
        reason = code[1] if code else (done.stderr.strip() or "without a word").splitlines()[-1]
        raise NoRuntime(f"{command[0]} failed: {reason}")


@cache
def modules_for_a_page():
    """{module: path} of the course's files that a browser can run, as far as pages need them.

    They are what `course.browser.page` imports, and the checks of lessons that import nothing else
    than such files and the standard library.
    """
    imports = architecture.module_imports(SOURCE)
    needed = closure([ENTRY], imports)
    for module in imports:
        if module.startswith("course.checks.lesson_"):
            reached = closure([module], imports)
            if all(runs_in_a_browser(each) for each in reached):
                needed |= reached
    return {module: path_of(module) for module in sorted(needed)}


def closure(modules, imports):
    """The modules, those that importing them imports, and the packages they lie in."""
    found, ahead = set(), list(modules)
    while ahead:
        module = ahead.pop()
        if module not in found:
            found.add(module)
            ahead += imports_at_the_top(module) & imports.keys()
            ahead += {module.rpartition(".")[0]} & imports.keys()
    return found


def imports_at_the_top(module):
    """Every dotted name that a file imports when it is imported itself."""
    tree = ast.parse(path_of(module).read_text())
    tree.body = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    return architecture.imported_names(ast.unparse(tree))


def runs_in_a_browser(module):
    """Whether it imports nothing but the standard library and the course."""
    known = sys.stdlib_module_names | set(architecture.PACKAGES)
    return {name.partition(".")[0] for name in imports_at_the_top(module)} <= known


def path_of(module):
    path = SOURCE.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def zipped(files):
    """{name: bytes} as the bytes of a zip archive, the same for the same files."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, data in files.items():
            packed.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return archive.getvalue()


def as_script(files):
    """JavaScript that adds {name: bytes} to what a page gives its worker, as text."""
    text = {
        name: base64.b64encode(gzip.compress(data, mtime=0)).decode()
        for name, data in files.items()
    }
    return f"Object.assign((globalThis.pythonFiles ??= {{}}), {json.dumps(text)});\n"


def write_runtime(folder):
    """Write what pages need to run Python into `folder`. Raises NoRuntime where it cannot be had."""
    runtime = pyodide()
    course = {
        str(path.relative_to(SOURCE)): path.read_bytes() for path in modules_for_a_page().values()
    }
    worker = json.dumps((BROWSER / "worker.js").read_text())
    (folder / "runtime.js").write_text(as_script(runtime))
    (folder / "course.js").write_text(
        as_script({"course.zip": zipped(course)}) + f"globalThis.pythonWorker = {worker};\n"
    )
    for name in ("python.js", "explorer.js", "exercises.js", "LICENSES.txt"):
        shutil.copy(BROWSER / name, folder)
