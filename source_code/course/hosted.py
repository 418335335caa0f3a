# SPDX-License-Identifier: Apache-2.0
"""Prepares the machine of a hosted notebook, on which nobody has run `make lab`.

The first cell of every lesson (tools/first_cell.py) calls `prepare`. It does something only if that
cell has fetched the course. In any other copy the reader has chosen an environment.
"""

import importlib
import importlib.metadata
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FETCHED = "fetched_course"  # the folder into which the first cell fetches the course
# What lessons and their ranks import beside torch; requirements.txt has the versions.
NEEDED = ("numpy", "matplotlib", "ipywidgets", "psutil", "tokenizers", "transformers")
KEPT = ("torch", "numpy", "matplotlib")  # the host's own versions, which pip must keep
# The oldest and the newest version with which the tests were run.
TESTED = {
    "torch": ("2.11", "2.15"),
    "numpy": ("2", "2"),
    "matplotlib": ("3", "3"),
    "transformers": ("5", "5"),
}
LIMIT = 900  # seconds for pip


class NotReady(RuntimeError):
    """The machine lacks something that cannot be installed; the text says what to do."""

    def _render_traceback_(self):
        return [str(self)]


def prepare():
    """Install the packages that are missing, and name versions that were not tested.

    It does nothing in a course that was not fetched by a notebook, and prints nothing if all
    packages are there in tested versions. Raises NotReady without torch or if pip fails.
    """
    if ROOT.name != FETCHED:
        return
    if version_of("torch") is None:
        pin = pins_of(["torch"])[0]
        raise NotReady(f"torch is missing here: run %pip install {pin}, and then this cell again.")
    missing = [name for name in NEEDED if version_of(name) is None]
    if missing:
        install(missing)
    for name in TESTED:
        if not was_tested(name, version_of(name)):
            oldest, newest = TESTED[name]
            tried = oldest if oldest == newest else f"{oldest} to {newest}"
            print(f"{name} {version_of(name)} is here; the course was tested with {name} {tried}.")


def install(names):
    """Let pip install the pinned versions of `names`, and keep the host's packages of KEPT."""
    kept = [f"{name}=={version_of(name)}" for name in KEPT if version_of(name)]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        wanted, constraints = Path(folder, "wanted.txt"), Path(folder, "kept.txt")
        wanted.write_text("\n".join(pins_of(names)), encoding="utf-8")
        constraints.write_text("\n".join(kept), encoding="utf-8")
        command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
        command += ["--no-color"]  # a notebook asks for colour, even in the last line of an error
        command += ["--requirement", str(wanted), "--constraint", str(constraints)]
        try:
            subprocess.run(command, capture_output=True, check=True, timeout=LIMIT)
        except (OSError, subprocess.SubprocessError) as error:
            told = (getattr(error, "stderr", None) or str(error).encode()).decode(errors="replace")
            raise NotReady(
                f"pip could not install {', '.join(names)} ({told.strip().splitlines()[-1]}): switch "
                "on the internet access of this notebook, and run this cell again."
            ) from None
    importlib.invalidate_caches()
    seconds = time.monotonic() - began
    print(
        f"Installed {', '.join(names)} in {seconds:.0f} s; {', '.join(kept)} were left as they are."
    )


def version_of(name):
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def pins_of(names):
    """The lines of requirements.txt for these packages; several if they depend on Python's version."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return [line.partition(" #")[0].strip() for line in lines if line.partition("==")[0] in names]


def was_tested(name, version):
    """Whether a version is within its bounds in TESTED, compared by the numbers that they have."""
    numbers = [int(number) for number in re.findall(r"\d+", version)]
    oldest, newest = ([int(number) for number in bound.split(".")] for bound in TESTED[name])
    return oldest <= numbers[: len(oldest)] and numbers[: len(newest)] <= newest
