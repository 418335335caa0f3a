"""The notebooks' own promises: what is checked can fail, and every lesson has the same shape.

That they run and print what they store is nbval's work, in the same pytest call.
"""

import ast
import copy
import os
import re
from pathlib import Path

import nbformat
import psutil
import pytest
from answers import answers_of
from make_hosted import is_first
from nbval.kernel import CURRENT_ENV_KERNEL_NAME, start_new_kernel
from nbval.plugin import IPyNbFile

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
LESSONS = sorted(NOTEBOOKS.glob("*.ipynb"))
SOLUTIONS = sorted((NOTEBOOKS / "solutions").glob("*.ipynb"))
ALL = LESSONS + SOLUTIONS
TAG = "nbval-check-output"  # of the cells whose stored output is what a run has to print
NUMBER = re.compile(r"\d+(?:\.\d+)?")
CALL = r"^(?:check|build)\..*$"  # of an exercise's check


def name_of(path):
    return path.relative_to(NOTEBOOKS).with_suffix("").as_posix()


every_notebook = pytest.mark.parametrize("path", ALL, ids=name_of)
every_lesson = pytest.mark.parametrize("path", LESSONS, ids=name_of)


def cells_of(path):
    return nbformat.read(path, as_version=4).cells


def text_of(outputs):
    return "".join(output.get("text", "") for output in outputs)


def checked_cells(path):
    return [c for c in cells_of(path) if TAG in c.metadata.get("tags", [])]


def change_one_digit(text, position):
    return f"{text[:position]}{(int(text[position]) + 1) % 10}{text[position + 1 :]}"


def test_jupyterlab_folds_the_outputs_that_answer_a_question_and_no_others():
    folded = 0
    for path in LESSONS:
        notebook = nbformat.read(path, as_version=4)
        hidden = {
            c.id for c in notebook.cells if c.metadata.get("jupyter", {}).get("outputs_hidden")
        }
        assert hidden == {cell.id for cell in answers_of(notebook)}, "run tools/answers.py"
        folded += len(hidden)
    assert folded > 30


def test_the_words_for_a_folded_picture_are_not_read_in_the_code_above_it():
    for path in LESSONS:
        for cell in nbformat.read(path, as_version=4).cells:
            shown = cell.metadata.get("jupyter", {})
            if shown.get("outputs_hidden") and not shown.get("source_hidden"):
                for call in (
                    n for n in ast.walk(ast.parse(cell.source)) if isinstance(n, ast.Call)
                ):
                    if getattr(call.func, "id", "") == "picture_of":
                        is_written = isinstance(call.args[1], ast.Constant)
                        assert not is_written, (
                            f"{path.stem}, {cell.id}: compute it, or fold the code"
                        )


def test_the_line_of_a_folded_output_that_jupyterlab_shows_has_no_result():
    """It shows the first line as a preview; results are numbers that the lesson has not had before."""
    for path in LESSONS:
        cells, said = nbformat.read(path, as_version=4).cells, ""
        for cell in cells:
            said += "\n" + cell.source
            if cell.cell_type == "code":
                if cell.metadata.get("jupyter", {}).get("outputs_hidden"):
                    first = next(filter(None, text_of(cell.outputs).split("\n")), "")
                    drawing = cell.outputs[0].get("data", {}).get("image/svg+xml", "")
                    assert not drawing, f"{path.stem}, {cell.id}: say what it is"
                    new = set(NUMBER.findall(first)) - set(NUMBER.findall(said))
                    assert not new or first.startswith("$ "), f"{path.stem}, {cell.id}: {first}"
                said += text_of(cell.outputs)


@every_notebook
def test_each_changed_digit_of_a_checked_output_fails_nbvals_own_comparison(path, request):
    notebook = IPyNbFile.from_parent(request.session, path=path)
    notebook.sanitize_patterns = {}
    changed = 0
    for item in notebook.collect():
        if not item.options["check"]:
            continue
        stored = item.cell.outputs
        assert item.compare_outputs(stored, stored), "an unchanged output must pass"
        for index, output in enumerate(stored):
            for digit in re.finditer(r"\d", output.get("text", "")):
                test = copy.deepcopy(stored)
                test[index]["text"] = change_one_digit(output["text"], digit.start())
                assert not item.compare_outputs(test, stored), test[index]["text"]
                changed += 1
    assert changed > 0 or path in SOLUTIONS, "a lesson without a checked number"
    assert sum(item.options["check"] for item in notebook.collect()) == len(checked_cells(path))


@every_notebook
def test_every_checked_cell_has_a_stored_output(path):
    cells = checked_cells(path)
    assert cells
    for cell in cells:
        assert text_of(cell.outputs).strip(), cell.source
        assert cell.cell_type == "code"


@every_notebook
def test_make_test_runs_every_checked_cell(path):
    assert not any("further" in cell.metadata.tags for cell in checked_cells(path))


@every_lesson
def test_every_lesson_has_a_checked_loss_cell_with_six_decimals(path):
    outputs = "\n".join(text_of(cell.outputs) for cell in checked_cells(path))
    assert re.search(r"loss \d+\.\d{6}\b", outputs)


def rerun(path):
    return f"make notebooks ONLY={path.relative_to(NOTEBOOKS.parent)}"


@every_notebook
def test_every_cell_was_run_in_order_and_none_ended_in_an_error(path):
    code = [cell for cell in cells_of(path) if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), rerun(path)
    kinds = {output.output_type for cell in code for output in cell.outputs}
    assert "error" not in kinds


@every_notebook
def test_no_notebook_keeps_times_or_a_kernel_of_one_machine(path):
    notebook = nbformat.read(path, as_version=4)
    assert notebook.metadata.kernelspec.name == "python3"
    assert not any("execution" in cell.metadata for cell in notebook.cells)


@every_notebook
def test_prose_stands_before_every_pair_of_code_cells(path):
    cells = [cell for cell in cells_of(path) if not is_first(cell)]
    kinds = [cell.cell_type for cell in cells]
    assert kinds[0] == "markdown"
    for before, here, cell in zip(kinds, kinds[1:], cells[1:]):
        if here == "code" and before == "code":
            follows_up = TAG in cell.metadata.get("tags", []) or "source_of" in cell.source
            follows_up = follows_up or cell.source.startswith(("figure,", "try:"))
            assert follows_up, f"two code cells without a word between them:\n{cell.source}"


@every_notebook
def test_a_comment_that_begins_a_line_ends_it_since_markdown_leaves_such_a_line_as_html(path):
    for cell in cells_of(path):
        if cell.cell_type == "markdown":
            assert not re.findall(r"^ {0,3}<!--.*?-->[^\S\n]*\S.*$", cell.source, re.M)


@every_lesson
def test_every_lesson_has_the_shape_of_a_lesson(path):
    cells = cells_of(path)
    assert re.match(rf"# Lesson {path.stem.split('_')[0]}: ", cells[0].source)
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    for part in ["**After this lesson**", "**Time:**", "**Builds on:**", "**Next.**"]:
        assert part in prose, part
    for heading in ["Exercises", "Sources"]:
        assert f"\n## {heading}" in "\n" + prose, heading
    assert re.search(r"^## What goes wrong", prose, re.MULTILINE)
    assert re.search(r"\bpredict", prose, re.IGNORECASE)
    assert f"solutions/{path.name}" in prose


@every_lesson
def test_every_exercise_says_not_attempted_yet_and_its_solution_is_right(path):
    lesson = [c for c in checked_cells(path) if re.search(CALL, c.source, re.MULTILINE)]
    solution = NOTEBOOKS / "solutions" / path.name
    solved = [c for c in checked_cells(solution) if re.search(CALL, c.source, re.MULTILINE)]
    asked, answered = (
        [call for cell in cells for call in re.findall(CALL, cell.source, re.MULTILINE)]
        for cells in (lesson, solved)
    )
    assert sorted(asked) == sorted(answered)
    assert len(asked) >= 2
    for cell in lesson:
        calls = re.findall(CALL, cell.source, re.MULTILINE)
        assert text_of(cell.outputs).count("Not attempted yet") == len(calls)
    for cell in solved:
        assert text_of(cell.outputs).startswith("Right: ")


@every_notebook
def test_every_figure_has_a_text_equivalent(path):
    for cell in cells_of(path):
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/svg+xml" in data:
                assert len(data["text/plain"]) > 20
                assert 'role="img" aria-label=' in data["image/svg+xml"]
            else:
                assert "image/png" not in data, "a figure without words; use picture_of"


@every_notebook
def test_every_cell_that_draws_has_its_picture_stored(path):
    for cell in cells_of(path):
        last = cell.source.rstrip().splitlines()[-1:] if cell.cell_type == "code" else []
        if last and re.match(r"(draw_timelines|picture_of|explore)\(", last[0]):
            assert "image/svg+xml" in cell.outputs[-1]["data"], cell.source


@every_lesson
def test_the_code_that_a_lesson_shows_is_the_scripts_code_as_it_is(path):
    cells = [c for c in cells_of(path) if c.cell_type == "code"]
    names = {}
    for cell in cells:
        if line := re.search(r"^from \S+ import source_of$", cell.source, re.MULTILINE):
            exec(line[0], names)
        if cell.source.startswith("source_of("):
            shown = cell.outputs[0]["data"]["text/markdown"]
            today = eval(cell.source, names)._repr_mimebundle_()["text/markdown"]
            assert shown == today, rerun(path)


def test_the_first_lesson_starts_its_first_run_as_a_reader_would():
    cold = [p.stem for p in LESSONS if any("warm=False" in c.source for c in cells_of(p))]
    assert cold == ["00_start_here"]


@pytest.mark.skipif(os.name == "nt", reason="a kernel on Windows has TCP only")
def test_a_tested_kernel_binds_no_port_that_was_chosen_before_it_started():
    manager, client = start_new_kernel(kernel_name=CURRENT_ENV_KERNEL_NAME)
    try:
        kernel = psutil.Process(manager.provisioner.pid)
        bound = {connection.laddr.port for connection in kernel.net_connections("inet")}
        assert bound.isdisjoint(manager.ports)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
