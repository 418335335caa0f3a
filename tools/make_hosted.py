"""Let the lessons run in hosted notebooks: their first cells, and the links that open them there.

    make hosted                       # the first cells and links anew
    make hosted ADDRESS=owner/name    # for a repository at this address on GitHub

The address is known in one place, the `url` of CITATION.cff. From there it is written into the first
cell of every lesson (tools/first_cell.py), into the heads of README.md and of the lessons, and
make_site.py takes it for the website. Without an address there is no link.
"""

import json
import re
import sys
from pathlib import Path

from exercises import is_cell

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "source_code"))

from files.inputs import InputError, parse_json, read_text  # noqa: E402
from files.outputs import not_written, write_whole  # noqa: E402
from guard.one_sentence import in_one_sentence, naming_files  # noqa: E402
from pipeline.command_line import Parser  # noqa: E402

FIRST_CELL = Path(__file__).with_name("first_cell.py")
BRANCH = "main"
HOST = "https://github.com/"
OWNER_AND_NAME = r"[\w-]+/[\w.-]+"
URL = r'^url: "(.*)"\n'
START = "notebooks/00_start_here.ipynb"
# {address} is owner/name, {path} is that of a notebook.
PLACES = {
    "Colab": "https://colab.research.google.com/github/{address}/blob/{branch}/{path}",
    "Kaggle": "https://www.kaggle.com/kernels/welcome?src=https://github.com/{address}/blob/{branch}/{path}",
    "Binder": "https://mybinder.org/v2/gh/{address}/{branch}?urlpath=lab/tree/{path}",
    "a dev container": "https://codespaces.new/{address}?quickstart=1",
}
ROW = r"^\*\*Open in:\*\* .*\n\n"
ID, TAG = "first-cell", "first-cell"  # of the first cell of code
FOLDED = {"cellView": "form", "jupyter": {"source_hidden": True}, "tags": [TAG]}


@in_one_sentence()
def main():
    address = parse_arguments().address
    if address:
        write_citation(address)
    with naming_files():
        address = address_of(ROOT)
    change(ROOT / "README.md", lambda text: with_address(text, address))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        change(path, lambda text, path=path: prepared(text, path.relative_to(ROOT), address))
    print(f"hosted: {address or 'no address is known, so there are no links'}")
    return int(bool(not_written))


def parse_arguments():
    parser = Parser(__doc__)
    parser.add_argument(
        "address", nargs="?", help="owner/name on GitHub; else that of CITATION.cff"
    )
    arguments = parser.parse_args()
    if arguments.address and not re.fullmatch(OWNER_AND_NAME, arguments.address):
        parser.error(f"ADDRESS={arguments.address} is not of the form owner/name")
    return arguments


def change(path, function):
    """Replace the text of a file by `function` of it; a file that stays the same is not written."""
    with naming_files(path):
        before = read_text(path)
        after = function(before)
        if after != before:
            write_whole(path, after)


def write_citation(address):
    def changed(text):
        return re.sub(URL, "", text, flags=re.M) + f'url: "{HOST}{address}"\n'

    change(ROOT / "CITATION.cff", changed)


def address_of(root):
    """The owner/name of a copy of the course, or None if its CITATION.cff has none."""
    found = re.search(URL, read_text(root / "CITATION.cff"), re.M)
    return found[1].removeprefix(HOST) if found else None


def row_of(address, path=START):
    """The links that open a notebook elsewhere, as a paragraph of Markdown; "" without an address."""
    if not address:
        return ""
    links = (
        f"[{name}]({form.format(address=address, branch=BRANCH, path=path)})"
        for name, form in PLACES.items()
    )
    return f"**Open in:** {' · '.join(links)}\n\n"


def with_row(text, row):
    """A page with this row below its title."""
    title, _, rest = text.partition("\n\n")
    return f"{title}\n\n{row}{re.sub(ROW, '', rest, flags=re.M)}"


def with_address(text, address):
    """The text of README.md with the links, and with the address to clone."""
    cloned = f"git clone {HOST + address if address else 'ADDRESS'} pipeline-course"
    text = re.sub(r"git clone \S+ pipeline-course", cloned, text)
    return with_row(text, row_of(address))


def prepared(text, path, address):
    """The text of a notebook whose head has the links and whose first cell finds the course."""
    notebook = notebook_in(text, path)
    cells = notebook["cells"]
    head = with_row("".join(cells[0]["source"]), row_of(address, path.as_posix()))
    cells[0]["source"] = head.splitlines(keepends=True)
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    if not code:  # a notebook without code needs nothing of the course
        return text
    if is_first(code[0]):
        cell = code[0]
    else:
        cell = {"cell_type": "code", "execution_count": None, "id": ID}
        cells.insert(cells.index(code[0]), cell)
    cell |= {"metadata": FOLDED, "outputs": []}
    cell["source"] = first_cell(address).splitlines(keepends=True)
    number(cells)
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def notebook_in(text, path):
    """The notebook in the text of a file, as JSON has it. Raises InputError for any other text."""
    notebook = parse_json(text, path)
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list) or not cells or not all(map(is_cell, cells)):
        raise InputError(f"{path} is not a notebook")
    return notebook


def is_first(cell):
    """Whether a cell of a notebook, as JSON or as a NotebookNode, is the one that finds the course."""
    return TAG in cell.get("metadata", {}).get("tags", [])


def first_cell(address):
    """The text of the first cell of every lesson."""
    text = read_text(FIRST_CELL).rstrip("\n")
    return text.replace('ADDRESS = ""', f'ADDRESS = "{HOST}{address}"') if address else text


def number(cells):
    """Number the cells of code from 1, as after a run from the top."""
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    for count, cell in enumerate(code, 1):
        cell["execution_count"] = count
        for output in cell["outputs"]:
            if "execution_count" in output:
                output["execution_count"] = count


if __name__ == "__main__":
    sys.exit(main())
