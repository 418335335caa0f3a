"""The faults of tools/spoilt_code can be planted, and their tests are there. The tool runs them."""

import ast
import functools
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
import spoil_code
from architecture import PACKAGES
from spoil_code import FAULTS, MAKE_TEST, ROOT
from spoilt_code.fault import Fault, StaleFaultError

SOURCE = "class Sum:\n    def of(self, x):\n        return x + x\n\n\ndef of(x):\n    return x\n"
TEST = "from sums import Sum\n\n\ndef test_a_sum():\n    assert Sum().of(3) == 6\n"
DIFFERENCE = Fault(
    "a", "sums.py::Sum.of", "x + x", "x - x", "It subtracts.", "test_sums.py", ("test_a_sum",)
)


@functools.cache
def functions_of(test_file):
    tree = ast.parse((ROOT / "tests" / test_file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_still_finds_its_place_and_its_tests(fault):
    text = (ROOT / fault.path).read_text()
    assert ast.dump(ast.parse(fault.plant(text))) != ast.dump(ast.parse(text))
    assert fault.tests and fault.wrong.endswith(".")
    assert {test.partition("[")[0] for test in fault.tests} <= functions_of(fault.test_file)


@pytest.mark.further
@pytest.mark.processes
def test_each_test_of_a_fault_is_one_that_make_test_runs():
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", *MAKE_TEST, "tests"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240).stdout
    runs = set(printed.splitlines())
    runs |= {line.partition("[")[0] for line in runs}
    assert not {node for fault in FAULTS for node in fault.node_ids} - runs


def test_every_package_has_faults_and_each_has_a_name_of_its_own():
    assert len(FAULTS) >= 45
    assert max(Counter(fault.name for fault in FAULTS).values()) == 1
    packages = {fault.place.split("/")[0] for fault in FAULTS if "/" in fault.place}
    assert packages == {*PACKAGES} - {"broken"}  # what is wrong on purpose needs no fault


def test_only_the_function_that_is_named_is_changed():
    assert DIFFERENCE.plant(SOURCE) == SOURCE.replace("x + x", "x - x")
    nothing = replace(DIFFERENCE, old="return x", new="return 0", place="sums.py::of")
    with pytest.raises(StaleFaultError, match="a: sums.py::of has 'return x' 0 times, not once"):
        nothing.plant(SOURCE.replace("    return x\n", "    return 2 * x\n"))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"old": "x"}, r"a: sums.py::Sum.of has 'x' 3 times, not once"),
        ({"old": "y"}, r"a: sums.py::Sum.of has 'y' 0 times, not once"),
        ({"place": "sums.py::Sum.by"}, r"a: there is no sums.py::Sum.by"),
    ],
)
def test_a_stale_fault_is_refused_by_its_name(change, sentence):
    with pytest.raises(StaleFaultError, match=sentence):
        replace(DIFFERENCE, **change).plant(SOURCE)


@pytest.mark.further
@pytest.mark.processes
def test_what_a_test_notices_is_caught_and_the_copy_is_as_before(tmp_path):
    for folder, name, text in ("source_code", "sums.py", SOURCE), ("tests", "test_sums.py", TEST):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = source_code\n")
    product = replace(DIFFERENCE, new="2 * x")
    slow = replace(DIFFERENCE, new="[1 for _ in iter(int, 1)]")
    verdicts = [spoil_code.verdict_on(fault, tmp_path, 60) for fault in (DIFFERENCE, product)]
    verdicts.append(spoil_code.verdict_on(slow, tmp_path, 5))
    assert [caught for caught, _ in verdicts] == [True, False, False]
    assert verdicts[0][1].startswith("caught by tests/test_sums.py::test_a_sum (")
    assert verdicts[1][1].startswith("NOT CAUGHT: the tests pass (")
    assert "no end in time" in verdicts[2][1]
    assert (tmp_path / "source_code" / "sums.py").read_text() == SOURCE
