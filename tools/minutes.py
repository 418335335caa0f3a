"""Estimate the minutes of every lesson from its notebook, by one rule.

python tools/minutes.py             # a table of all lessons
python tools/minutes.py --write     # the same, and put them into each lesson's head and the README

Reading, watching and running: 150 words a minute, 15 lines of code a minute, the notebook's own and
those that it shows of a script, and 12 seconds for each cell that one runs; rounded to 5 minutes.
The sources at the end are not read. Exercises come on top, with the minutes that stand at each: 15
to 20 for a program that runs on real ranks, 5 to 15 for a function or a schedule, 5 for a number
or a choice; the longest puzzles and faults have 20. All of it is an estimate; nobody was timed.
"""

import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LESSONS = sorted((ROOT / "notebooks").glob("*.ipynb"))
README = ROOT / "README.md"
WORDS, LINES, CELLS = 150, 15, 5  # per minute
NOT_READ = r"<!--.*?-->|!\[.*?\]\(.*?\)|\$\$.*?\$\$|(?<=\])\(.*?\)"
EXERCISE = r"^\*\*\d+\. (.+?)\.?\*\*\s*\((\d+) minutes\)"
HEAD = r"\*\*Time:\*\* (\d+) minutes, and (\d+) more for the exercises, both estimated\."


class Minutes(NamedTuple):
    """`lesson` without its exercises, rounded to 5; `exercises` all of them."""

    lesson: int
    exercises: int


def minutes_of(path):
    """The Minutes of a notebook by the rule above."""
    words = lines = runs = exercises = 0
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            exercises += sum(int(minutes) for _, minutes in exercises_in(text))
            read = re.sub(NOT_READ, "", text.partition("## Sources")[0], flags=re.S)
            words += len(read.split())
        else:
            runs += 1
            lines += sum(1 for line in [*text.splitlines(), *shown_by(cell)] if line.strip())
    reading = words / WORDS + lines / LINES + runs / CELLS
    return Minutes(5 * round(reading / 5), exercises)


def exercises_in(text):
    """[(title, minutes)] of the exercises that a cell of prose sets."""
    return re.findall(EXERCISE, text, re.MULTILINE)


def shown_by(cell):
    """The lines of a script that a cell shows."""
    shown = ["".join(o.get("data", {}).get("text/markdown", "")) for o in cell["outputs"]]
    return [line for text in shown for line in text.splitlines() if not line.startswith("`")]


def stated_in(path):
    """The Minutes that stand in the head of a notebook, or None."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    found = re.search(HEAD, "".join(cells[0]["source"]))
    return Minutes(*map(int, found.groups())) if found else None


def write(path, minutes):
    """Put `minutes` into the head of a notebook and into its row of the README."""
    text = path.read_text(encoding="utf-8")
    head = HEAD.replace("\\*", "*").replace("\\.", ".")
    head = head.replace("(\\d+)", str(minutes.lesson), 1).replace("(\\d+)", str(minutes.exercises))
    path.write_text(re.sub(HEAD, head, text, count=1), encoding="utf-8")
    readme = README.read_text(encoding="utf-8")
    row = rf"(\]\(notebooks/{re.escape(path.name)}\)) \| \d+ \| \d+ \|"
    readme = re.sub(row, rf"\1 | {minutes.lesson} | {minutes.exercises} |", readme)
    README.write_text(readme, encoding="utf-8")


def main():
    for path in LESSONS:
        minutes = minutes_of(path)
        print(f"{path.stem:28} {minutes.lesson:3} minutes, {minutes.exercises:3} for the exercises")
        if "--write" in sys.argv[1:]:
            write(path, minutes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
