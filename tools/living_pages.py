"""Which explorers and exercises of a notebook run in a page, and their initial settings.

The pages store these settings as JSON in attributes; the scripts in tools/browser turn them into
controls. An exercise runs in a page if a browser can import everything that its check needs.
"""

import ast
import html
import json
import re
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "source_code"))

import architecture  # noqa: E402
import living_site  # noqa: E402
from nbformat.v4 import new_markdown_cell, new_output  # noqa: E402

from course.browser import explorer_page  # noqa: E402
from course.checks.puzzles import PUZZLES  # noqa: E402
from course.views.explorer import explore  # noqa: E402
from course.views.explorer_view import Settings, View  # noqa: E402
from course.views.memory_and_time import AXES, SIZE_SLIDERS, Sizes  # noqa: E402
from lab.figures import draw_timelines  # noqa: E402
from pipeline.schedule import Schedule  # noqa: E402
from pipeline.schedules.text_form import to_csv  # noqa: E402

EXPLORE = r"^explore\(.*\)$"
CHECK = r"^check\.(\w+)\((?:(\d+), )?(\w+)(?:, \w+)*\)$"
MARK = "a-place-that-lives-{}"
PERFORM = '<p class="panel">Real ranks perform it in JupyterLab: <code>make lab</code>.</p>'


def bring_to_life(cells, name, page):
    """Replace the cells of a notebook that run in a page; return the HTML of the replacements.

    A replaced cell contains MARK with the number of its place. `name` is the notebook's name, such
    as "02_gpipe"; `page` is the address of the large explorer.
    """
    lesson = f"lesson_{name.partition('_')[0]}"
    originals = [cell.copy() for cell in cells]
    places = []
    for index, cell in enumerate(originals):
        if cell.cell_type != "code":
            continue
        if shown := explorer(originals, index, page):
            cells[index].outputs = [new_output("display_data", {"text/html": shown})]
        elif asked := index and exercise(originals, index, lesson):
            cells[index - 1] = new_markdown_cell(MARK.format(len(places)))
            cells[index] = new_markdown_cell("")
            places.append(asked)
        elif cell.source.startswith("check.perform("):
            cells[index].outputs = [new_output("display_data", {"text/html": PERFORM})]
    return places


def explorer(cells, index, page):
    """The explorer that the cell shows, as HTML, or None.

    `page` is the address of the large explorer.
    """
    call = re.search(EXPLORE, cells[index].source, re.MULTILINE)
    if call is None:
        return None
    names = {"explore": explore}
    for cell in cells[:index]:
        if cell.cell_type == "code":
            exec(imports_for_a_page(cell.source) + functions_of(cell.source), names)
    before = cells[index].source[: call.start()]
    exec(before, names)
    shown = eval(call[0], names)
    return explorer_place(shown.settings, page, shown.sizes)


def explorer_place(settings, page, sizes=None, whole=False):
    """An explorer with these Settings as HTML. `whole`: it has its own page and starts at once.

    With `sizes` it also has settings for memory and time.
    """
    start = dict(explorer_page.START)
    start |= {field.name: getattr(settings, field.name) for field in fields(Settings)}
    start["compare"] = settings.compare or explorer_page.NOTHING
    if isinstance(settings.schedule, Schedule):
        start |= {"schedule": explorer_page.OWN, "rows": to_csv(settings.schedule)}
    start |= explorer_page.SIZES_START | vars(sizes) if sizes else {}
    offer = {
        "start": start,
        "defaults": explorer_page.START | explorer_page.SIZES_START,  # where links lead to
        "choices": explorer_page.CHOICES,
        "sliders": explorer_page.SLIDERS | (SIZE_SLIDERS if sizes else {}),
        "axes": list(AXES) if sizes else [],
        "own": explorer_page.OWN,
        "page": page,
        "whole": whole,
    }
    picture = draw_timelines(View(settings).timelines, stories=False)
    return place_of("live-explorer", "offer", offer, picture.svg)


def whole_explorer():
    """The explorer that has its own page, as HTML."""
    chosen = {field.name: explorer_page.START[field.name] for field in fields(Settings)}
    return explorer_place(Settings(**chosen), "", Sizes(), whole=True)


def exercise(cells, index, lesson):
    """The exercise that the cell checks and the cell before it contains, as HTML, or None.

    `lesson` is the module of the check, such as "lesson_02".
    """
    stub, cell = cells[index - 1], cells[index]
    call = re.search(CHECK, cell.source, re.MULTILINE)
    if call is None or cell.cell_type != "code" or stub.cell_type != "code":
        return None
    function, number, _ = call.groups()
    setup = "".join(imports_for_a_page(c.source) for c in cells[:index] if c.cell_type == "code")
    if function == "puzzle":
        return puzzle(int(number), stub.source, setup)
    if not check_runs_in_a_browser(lesson, function):
        return None
    given = {
        "id": f"{lesson} {function}",
        "lesson": lesson,
        "call": call[0],
        "stub": stub.source,
        "setup": setup,
    }
    return place_of("live-exercise", "exercise", given, f"<pre>{html.escape(stub.source)}</pre>")


def puzzle(number, stub, setup):
    """A puzzle of lesson 12 as HTML: its ranks, its actions, and its initial rows."""
    puzzle = PUZZLES[number]
    stages = [
        [stage for stage, owner in enumerate(puzzle.rank_of_stage) if owner == rank]
        for rank in range(puzzle.num_ranks)
    ]
    names = {}
    exec(stub, names)
    given = {
        "id": f"puzzle {number}",
        "number": number,
        "stages": stages,
        "kinds": "FBIW" if puzzle.split else "FB",
        "microbatches": puzzle.num_microbatches,
        "start": names.get(f"start_{number}", [""] * puzzle.num_ranks),
        "asCode": f"def rows_{number}(" in stub,
        "setup": setup,
        "code": "def rows(num_ranks, num_microbatches):\n    return ...\n",
    }
    return place_of("live-exercise", "exercise", given, f"<pre>{html.escape(stub)}</pre>")


def place_of(kind, name, data, content):
    attribute = html.escape(json.dumps(data))
    return f'<div class="{kind}" data-{name}="{attribute}">{content}</div>'


@cache
def check_runs_in_a_browser(lesson, function):
    """Whether a browser has all modules that a check imports, at its start or when it runs."""
    modules = living_site.modules_for_a_page()
    if f"course.checks.{lesson}" not in modules:
        return False
    tree = ast.parse(modules[f"course.checks.{lesson}"].read_text(encoding="utf-8"))
    named = {node.name: node for node in tree.body if hasattr(node, "name")}
    within, reached = [], [function]  # with all that it uses of its own module
    for name in reached:
        nodes = list(ast.walk(named[name])) if name in named else []
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        reached += [each for each in named if each in used and each not in reached]
        within += nodes
    return bool(within) and all(is_for_a_page(node) for node in within if is_import(node))


def imports_for_a_page(source):
    """The import statements of a cell that a browser can run, as lines of Python."""
    nodes = [node for node in body_of(source) if is_import(node) and is_for_a_page(node)]
    return "".join(f"{ast.unparse(node)}\n" for node in nodes)


def functions_of(source):
    nodes = [node for node in body_of(source) if isinstance(node, ast.FunctionDef)]
    return "".join(f"{ast.unparse(node)}\n" for node in nodes)


def body_of(source):
    """The statements of a cell; [] for a cell that is not Python, such as a shell command."""
    try:
        return ast.parse(source).body
    except (MemoryError, RecursionError, SyntaxError, ValueError):  # or it is too deep for Python
        return []


def is_import(node):
    return isinstance(node, (ast.Import, ast.ImportFrom))


def is_for_a_page(node):
    """Whether a browser can run an import statement."""
    names = architecture.imported_names(ast.unparse(node))
    modules = {name for name in names if living_site.path_of(name).is_file()}
    if modules:
        return modules <= living_site.modules_for_a_page().keys()
    return {name.partition(".")[0] for name in names} <= sys.stdlib_module_names
