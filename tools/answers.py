"""Fold the stored outputs that answer a question of the lesson, so that a reader can guess first.

    python tools/answers.py

A cell below a paragraph that asks for a guess opens in JupyterLab with its output folded; one click,
or running the cell, shows it. The website folds the same outputs (make_site.py), and the handout
leaves them out (make_handout.py).
"""

import html
import re
import sys
from pathlib import Path

import nbformat
from exercises import notebook_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "source_code"))

from files.outputs import not_written, write_whole  # noqa: E402
from guard.one_sentence import in_one_sentence, naming_files  # noqa: E402
from pipeline.command_line import Parser  # noqa: E402

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
ASKS = (
    r"[Gg]uess|[Ww]rite (?:your \w+ )?down|[Bb]efore you (?:run|look)|[Dd]ecide first"
    r"|[Ss]ay it before|you expect"
)
PANEL = r"^(?:explore|time_machine)\("  # a panel to play with


@in_one_sentence()
def main():
    Parser(__doc__).parse_args()
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        with naming_files():
            notebook = notebook_of(path)
        answers = answers_of(notebook)
        for cell in notebook.cells:
            fold(cell, cell in answers)
        with naming_files(path):
            write_whole(path, nbformat.writes(notebook) + "\n")
        print(f"{path.name:36} {len(answers):2} outputs folded")
    return int(bool(not_written))


def answers_of(notebook):
    """The cells of code whose outputs answer the question above them."""
    found, asked = [], False
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            asked = asks_for_a_guess(cell.source)
        elif asked and cell.get("outputs") and not tells_nothing(cell):
            found.append(cell)
    return found


def tells_nothing(cell):
    """Whether the output gives nothing away: a panel, or the check of an empty exercise."""
    said = "".join(output.get("text", "") for output in cell.outputs)
    return re.search(PANEL, cell.source, re.M) or said.startswith("Not attempted yet")


def asks_for_a_guess(prose):
    """Whether the last paragraph asks the reader to answer before the next cell runs.

    A picture may stand below the question.
    """
    words = [part for part in prose.strip().split("\n\n") if not part.startswith("![")]
    last = words[-1] if words else ""
    return last.endswith("?") or re.search(ASKS, last) is not None


def fold(cell, folded):
    """Let JupyterLab open the notebook with this cell's output folded, or not."""
    shown = cell.metadata.get("jupyter", {})
    shown.pop("outputs_hidden", None)
    if folded:
        shown["outputs_hidden"] = True
    cell.metadata.pop("jupyter", None)
    if shown:
        cell.metadata["jupyter"] = shown


def folded(outputs):
    """One output that shows the others when the reader asks for them."""
    shown = []
    for output in outputs:
        data = output.get("data", {})
        text = output.get("text") or data.get("text/plain", "")
        shown.append(data.get("text/html") or f"<pre>{html.escape(text)}</pre>")
    page = f"<details><summary>Show the output</summary>{''.join(shown)}</details>"
    return nbformat.v4.new_output("display_data", {"text/html": page})


if __name__ == "__main__":
    sys.exit(main())
