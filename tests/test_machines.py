"""Files that bring the course onto other machines agree with each other and with what is installed."""

import contextlib
import importlib.metadata
import json
import os
import re
import sys

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from course.launch import ROOT

DEFINITION = (ROOT / "slurm" / "course.def").read_text()
DOCKERFILE = (ROOT / "tools" / "Dockerfile").read_text()


def pinned(file):
    """{package: version} of a file of pins, for this Python."""
    lines = (ROOT / file).read_text().splitlines()
    pins = re.findall(
        r"^([\w.-]+)==([^\s;#]+)(?:; *(python_version [^#\n]*))?", "\n".join(lines), re.M
    )
    here = ">=" if sys.version_info >= (3, 11) else "<"
    return {plain(name): pin for name, pin, mark in pins if not mark or f"{here} " in mark}


def plain(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def brought_along(names):
    """All that the installed packages `names` require, and what that requires."""
    seen, waiting = set(), list(names)
    while waiting:
        name = plain(waiting.pop())
        if name in seen:
            continue
        try:
            required = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another system or Python
        seen.add(name)
        waiting += [re.match(r"[\w.-]+", one)[0] for one in required if "extra ==" not in one]
    return seen


@pytest.mark.skipif(sys.version_info < (3, 11), reason="older Pythons resolve by themselves")
def test_the_constraints_pin_all_that_the_requirements_bring_along():
    requirements, constraints = pinned("requirements.txt"), pinned("tools/constraints.txt")
    assert brought_along(requirements) - set(requirements) - set(constraints) == set()
    assert not set(requirements) & set(constraints), "a version stands in one file"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="older Pythons resolve by themselves")
def test_no_pin_refuses_an_early_python_3_11():
    """Debian 12 has 3.11.2: a package that wants 3.11.5 leaves pip there without a solution."""
    pins = pinned("requirements.txt") | pinned("tools/constraints.txt")
    for name, version in pins.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # of the CUDA build
            installed = importlib.metadata.metadata(name)
            wanted = SpecifierSet(installed["Requires-Python"] or "")
            assert installed["Version"] != version or "3.11.0" in wanted, f"{name} wants {wanted}"


def test_both_images_hold_the_same():
    base = re.search(r"^FROM (\S+)", DOCKERFILE, re.M)[1]
    assert f"From: {base}\n" in DEFINITION
    for what in (
        r"apt-get install --yes --no-install-recommends ([\w -]+)",
        r"(pip install --no-cache-dir --constraint /opt/course/constraints.txt)",
        r"(--requirement /opt/course/requirements.txt)",
    ):
        assert re.search(what, DOCKERFILE)[1].strip() == re.search(what, DEFINITION)[1].strip()


def test_the_development_container_is_the_image_and_its_files_are_there():
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    built = (ROOT / ".devcontainer" / container["build"]["dockerfile"]).resolve()
    assert built == ROOT / "tools" / "Dockerfile"
    assert f"useradd --create-home {container['remoteUser']}\n" in DOCKERFILE
    for name in re.findall(r"^COPY (?!--chown)(.*) /opt", DOCKERFILE, re.M)[0].split():
        assert (ROOT / name).exists()


def test_binder_has_the_image_s_python_the_pinned_torch_and_the_same_packages():
    binder = yaml.safe_load((ROOT / ".binder" / "environment.yml").read_text())
    assert f"pytorch-cpu={pinned('requirements.txt')['torch']}" in binder["dependencies"]
    python = re.search(r"^FROM python:([\d.]+)", DOCKERFILE, re.M)[1]
    assert f"python={python}" in binder["dependencies"]
    built = (ROOT / ".binder" / "postBuild").read_text()
    assert "--constraint tools/constraints.txt --requirement requirements.txt\n" in built
    assert os.access(ROOT / ".binder" / "postBuild", os.X_OK)


def test_public_hosting_runs_what_runs_here_and_publishes_the_site():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    commands = [step.get("run", "") for step in jobs["tests"]["steps"]]
    assert any(".ci/run" in command for command in commands)
    assert any("make slides\nmake site" in command for command in commands), (
        "the site has the slides"
    )
    assert any(step.get("with", {}).get("path") == "build/site" for step in jobs["tests"]["steps"])
    assert jobs["publish"]["needs"] == "tests" and jobs["publish"]["if"]
    hosted = 'make hosted ADDRESS="$GITHUB_REPOSITORY"\n'
    assert any(f"{hosted}make slides" in command for command in commands), "the site has the links"
    address = jobs["address"]
    assert address["needs"] == "tests" and address["if"] == jobs["publish"]["if"]
    assert address["permissions"] == {"contents": "write"}
    written = "".join(step.get("run", "") for step in address["steps"])
    assert written.startswith(hosted) and written.endswith("git push\n")


def test_what_could_not_be_tried_is_marked_so():
    page = (ROOT / "docs" / "machines.md").read_text()
    for file in (
        "slurm/course.def",
        "tools/Dockerfile",
        ".devcontainer",
        ".binder",
        ".github/workflows",
    ):
        assert re.search(rf"^\|.*{re.escape(file)}.*\| \*\*not tried\*\*", page, re.M), file
