"""Asks git about the repository in a folder, whatever repository the environment names."""

import os
import subprocess

# Variables with which git names a repository or a part of it, as it does for its hooks.
REPOSITORY = "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR"


def without_repository():
    """The variables of the environment but for those that name a repository."""
    return {name: value for name, value in os.environ.items() if not name.startswith(REPOSITORY)}


def ask_git(folder, *words):
    """What git prints, as bytes. Raises OSError without git, and SubprocessError if git fails."""
    options = {"capture_output": True, "check": True, "timeout": 60, "env": without_repository()}
    return subprocess.run(["git", *words], cwd=folder, **options).stdout
