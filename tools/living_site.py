"""The files with which a page runs the course's Python: Pyodide and the course's modules.

Pyodide is CPython for browsers. It is fetched from npm, at a fixed version and with a fixed hash,
and cached in build/npm. A page opened from disk can read only scripts, so all files are packed into
two scripts: runtime.js contains Pyodide, and course.js contains the course.
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
    """Pyodide is not available; the text gives the reason."""


def pyodide():
    """The files of Pyodide for a page, {name: bytes}. Raises NoRuntime.

    The files are fetched and the standard library is compiled once; build/npm keeps both.
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
    """Run a command. Raises NoRuntime with npm's error code, or with the last line of output."""
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
    """{module: path} of the course's files that pages need and that a browser can run.

    These are all imports of `course.browser.page`, and the checks of the lessons that import only
    such files and the standard library.
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
    """The modules, all modules that they import, and the packages of both."""
    found, ahead = set(), list(modules)
    while ahead:
        module = ahead.pop()
        if module not in found:
            found.add(module)
            ahead += imports_at_the_top(module) & imports.keys()
            ahead += {module.rpartition(".")[0]} & imports.keys()
    return found


def imports_at_the_top(module):
    """Every dotted name that is imported when the file itself is imported."""
    tree = ast.parse(path_of(module).read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    return architecture.imported_names(ast.unparse(tree))


def runs_in_a_browser(module):
    """Whether a module imports only the standard library and the course."""
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
    """JavaScript, as text, that adds {name: bytes} to the data of a page's worker."""
    text = {
        name: base64.b64encode(gzip.compress(data, mtime=0)).decode()
        for name, data in files.items()
    }
    return f"Object.assign((globalThis.pythonFiles ??= {{}}), {json.dumps(text)});\n"


def write_runtime(folder):
    """Write the files that pages need to run Python into `folder`. Raises NoRuntime."""
    runtime = pyodide()
    course = {
        str(path.relative_to(SOURCE)): path.read_bytes() for path in modules_for_a_page().values()
    }
    worker = json.dumps((BROWSER / "worker.js").read_text(encoding="utf-8"))
    (folder / "runtime.js").write_text(as_script(runtime), encoding="utf-8")
    (folder / "course.js").write_text(
        as_script({"course.zip": zipped(course)}) + f"globalThis.pythonWorker = {worker};\n",
        encoding="utf-8",
    )
    for name in ("python.js", "explorer.js", "exercises.js", "LICENSES.txt"):
        shutil.copy(BROWSER / name, folder)
