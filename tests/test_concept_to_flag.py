"""The page from the concept to the flag: its form, our own column, and torch's."""

import re
from pathlib import Path

import pytest
import torch.distributed.pipelining.schedules as library

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "concept-to-flag.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| concept")
]
LAUNCHER = {"--nproc-per-node"}


def test_every_row_has_all_columns_a_trap_and_a_lesson_that_exists():
    assert len(ROWS) >= 18
    for row in ROWS:
        assert len(row) == 9, row[0]
        assert all(row), row[0]
        lessons = re.findall(r"\]\((\S+?\.ipynb)\)", row[8])
        assert lessons, row[0]
        for lesson in lessons:
            assert (ROOT / "docs" / lesson).resolve().exists()


def test_no_concept_has_two_rows_and_every_library_has_many_of_them():
    concepts = [row[0] for row in ROWS]
    assert len(set(concepts)) == len(concepts)
    for column in range(1, 6):
        assert sum(row[column] != "–" for row in ROWS) >= 8


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_our_own_flags_and_files_exist(row):
    for name in re.findall(r"`([^`]+)`", row[1]):
        words = name.split()
        if words[0].endswith(".py"):
            assert (ROOT / "source_code" / words[0]).exists()
            continue
        assert words[0] in flags_of_all_scripts() | LAUNCHER, name
        assert all(f'"{value}"' in code_of_all_scripts() for value in words[1:]), name


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_names_of_torch_exist_in_this_version(row):
    for name in re.findall(r"`(_?Schedule\w+|_Pipeline\w+|OVERLAP_F_B)`", row[5]):
        assert hasattr(library, name), name
    if "register_custom_function" in row[5]:
        assert hasattr(library._PipelineScheduleRuntime, "register_custom_function")


def code_of_all_scripts():
    return "".join(path.read_text() for path in (ROOT / "source_code").rglob("*.py"))


def flags_of_all_scripts():
    return set(re.findall(r"\"(--[a-z-]+)\"", code_of_all_scripts()))


def test_the_versions_of_the_other_libraries_are_named():
    assert len(re.findall(r"github\.com/\S+/blob/[0-9a-f]{40}/", PAGE)) == 3
    assert "torch 2.13" in PAGE
