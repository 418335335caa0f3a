"""Put what accept.py found on GPUs into docs/measurements.md.

    make measurements FROM=build/accept.json

It replaces what stands between two marks, and its own row in the table of machines.
"""

import re
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "source_code"))

from files.inputs import read_json, read_text  # noqa: E402
from files.outputs import not_written, write_whole  # noqa: E402
from guard.one_sentence import in_one_sentence, naming_files  # noqa: E402
from pipeline.command_line import Parser  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- accepted: begin -->", "<!-- accepted: end -->"
PAGE = "docs/measurements.md"
ANCHOR = "#on-borrowed-gpus"


@in_one_sentence()
def main():
    parser = Parser(__doc__)
    parser.add_argument("file", metavar="FILE", help="what accept.py has written")
    file = parser.parse_args().file
    with naming_files(ROOT / PAGE):
        page, found = read_text(ROOT / PAGE), read_json(file)
        if page.count(BEGIN) != 1 or END not in page.partition(BEGIN)[2]:
            raise SystemExit(f"{PAGE} lacks {BEGIN} or {END} below it; take the page from git")
        try:
            page = with_measurements(page, found, file)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SystemExit(
                f"{file} is not what tools/accept.py writes ({error}); run the acceptance anew"
            ) from None
        write_whole(ROOT / PAGE, page)
    print(f"written: {PAGE}")
    return int(bool(not_written))


def with_measurements(page, found, file):
    """The page with what was `found` in `file`."""
    machine, parts = found["machine"], found["parts"]
    if machine["device"] != "cuda" or machine["small"]:
        raise SystemExit(
            f"{file} has no measurements: CPUs stood in for GPUs, or its sizes were --small"
        )
    return with_row(with_figures(page, machine, parts), machine, parts)


def with_figures(page, machine, parts):
    """The page of measurements with these figures between its two marks."""
    before, rest = page.split(BEGIN)
    figures = "\n\n".join([about(machine), *map(section, parts)])
    return f"{before}{BEGIN}\n\n{figures}\n\n{END}{rest.split(END)[1]}"


def with_row(page, machine, parts):
    """The page with a row for this machine in its table; it replaces an older row."""
    passed = sum(part["status"] == "passed" for part in parts)
    row = (
        f"| {hardware(machine)} | [the acceptance]({ANCHOR}): {passed} of {len(parts)} parts "
        "passed |\n"
    )
    page = re.sub(rf"^\|.*\({re.escape(ANCHOR)}\).*\n", "", page, flags=re.MULTILINE)
    return re.sub(r"^(?=\| NCCL with one GPU per rank)", lambda _: row, page, flags=re.MULTILINE)


def hardware(machine):
    """The hardware in words, as in "2 nodes with 4 x NVIDIA H100 80GB HBM3 each"."""
    counts = Counter(machine["gpus_per_node"]).items()
    names = ", ".join(f"{count} x {name}" for name, count in counts)
    return names if machine["nodes"] == 1 else f"{machine['nodes']} nodes with {names} each"


def about(machine):
    m = machine
    return (
        f"{hardware(m)}; {m['ranks']} ranks; {m['processor']}, {m['cores']} cores and "
        f"{m['memory_gib']} GiB per node; {m['system']}, Python {m['python']}, torch {m['torch']}, "
        f"NCCL {m['nccl']}; commit {m['commit']}, {m['date']}."
    )


def section(part):
    """One part: its status, its table, and its failures."""
    status = part["status"]
    if status == "out of time":
        status = f"out of time after {part['limit']} s"
    lines = [f"### {part['title']}", "", f"{part['about']} {part['runs']} runs, {status}.", ""]
    if part["rows"]:
        lines += [table_row(part["columns"]), table_row(["---"] * len(part["columns"]))]
        lines += map(table_row, part["rows"])
        lines.append("")
    lines += [f"- failed: `{each['command']}`" for each in part["failures"]]
    return "\n".join(lines).rstrip()


def table_row(cells):
    texts = ("" if cell is None else str(cell).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(texts)} |"


if __name__ == "__main__":
    sys.exit(main())
