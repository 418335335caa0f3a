"""What schedules, simulator, legality, puzzles and their drawings import: the standard library only.

So a browser can run them. Whatever is installed beside it is blocked in the process that imports.
"""

import subprocess
import sys

from course.launch import ROOT

MODULES = [
    "pipeline.message",
    "pipeline.schedule",
    "pipeline.schedules",
    "pipeline.schedules.legal",
    "lab.simulator",
    "lab.story",
    "lab.timeline",
    "lab.drawing",
    "lab.known_schedules",
    "lab.longest_path",
    "lab.figures",
    "planning.exact_search",
    "course.browser.page",
    "course.checks.puzzle_answers",
    "course.checks.puzzles",
    "course.views.explorer_view",
]

# Run with -I -S: without the folders of installed packages, and then any import is a failure that
# names what asked for it.
PROGRAM = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    importlib.import_module(name)
own = {name.partition(".")[0] for name in sys.modules}
ours = {"__main__", "course", "extensions", "files", "guard", "lab", "pipeline", "planning"}
print(sorted(own - sys.stdlib_module_names - ours))
"""


def imported_alone(*modules):
    command = [sys.executable, "-I", "-S", "-c", PROGRAM, str(ROOT / "source_code"), *modules]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_schedules_simulator_puzzles_and_drawings_import_the_standard_library_only():
    done = imported_alone(*MODULES)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


def test_a_module_that_imports_torch_fails_there():
    assert "No module named 'torch'" in imported_alone("pipeline.model").stderr
