"""Estimate the minutes of every lesson from its notebook, by one rule.

    python tools/minutes.py             # a table of all lessons
    python tools/minutes.py --write     # also write them into the lessons and docs/lessons.md

A lesson without its exercises takes 1 minute per 150 words, 1 minute per 15 lines of code,
including the script lines that it shows, and 12 seconds per cell that the reader runs, rounded to 5
minutes. Sources and the folded first cell are not read. The exercises are added with the minutes
stated at each: 5 for a number or a choice, 10 to 15 for a function or a schedule, up to 20 for a
program on real ranks or a long puzzle. Exercises of "more minutes" are optional; a lesson with the
others takes an hour at most. All minutes are estimates; nobody was timed.
"""

import re
import sys
from pathlib import Path
from typing import NamedTuple

from make_hosted import is_first, notebook_in

from files.inputs import InputError, read_text
from files.outputs import not_written, write_whole
from guard.one_sentence import in_one_sentence, naming_files
from pipeline.command_line import Parser

ROOT = Path(__file__).resolve().parents[1]
LESSONS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PAGE = ROOT / "docs" / "lessons.md"
WORDS, LINES, CELLS = 150, 15, 5  # per minute
# No part may contain the beginning of another, or a text full of beginnings would take hours.
NOT_READ = r"<!--(?:(?!<!--).)*?-->|!\[[^][]*\]\([^()]*\)|\$\$.*?\$\$|(?<=\])\([^()]*\)"
EXERCISE = r"^\*\*\d+\. (.+?)\.?\*\*\s*\((\d{1,4})( more)? minutes\)"
HEAD = (
    r"\*\*Time:\*\* (\d{1,4}) minutes to read and run, and (\d{1,4}) minutes to write your part \(estimated\)\. "
    r"(?:Further exercises take (\d{1,4}) minutes more\. )?"
)
ANY_HEAD = r"\*\*Time:\*\* [^*]*(?=\*\*Builds on:)"


class Minutes(NamedTuple):
    """`lesson` without exercises, rounded to 5; required `exercises`; `more` for optional ones."""

    lesson: int
    exercises: int
    more: int = 0


def minutes_of(path):
    """The Minutes of a notebook by the rule above."""
    words = lines = runs = exercises = more = 0
    for cell in notebook_in(read_text(path), path)["cells"]:
        if is_first(cell):
            continue
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            exercises += sum(minutes for _, minutes, further in exercises_in(text) if not further)
            more += sum(minutes for _, minutes, further in exercises_in(text) if further)
            before = re.split(EXERCISE, text, maxsplit=1, flags=re.M)[0]
            read = re.sub(NOT_READ, "", before.partition("## Sources")[0], flags=re.S)
            words += len(read.split())
        elif cell["cell_type"] == "code":
            runs += 1
            lines += sum(1 for line in [*text.splitlines(), *shown_by(cell)] if line.strip())
    reading = words / WORDS + lines / LINES + runs / CELLS
    return Minutes(5 * round(reading / 5), exercises, more)


def exercises_in(text):
    """[(title, minutes, whether it is optional)] of the exercises in the text of a cell."""
    found = re.findall(EXERCISE, text, re.MULTILINE)
    return [(title, int(minutes), bool(more)) for title, minutes, more in found]


def shown_by(cell):
    """The lines of a script that a cell shows."""
    shown = ["".join(o.get("data", {}).get("text/markdown", "")) for o in cell["outputs"]]
    return [line for text in shown for line in text.splitlines() if not line.startswith("`")]


def stated_in(path):
    """The Minutes in the head of a notebook, or None."""
    cells = notebook_in(read_text(path), path)["cells"]
    found = re.search(HEAD, "".join(cells[0]["source"]))
    return Minutes(*(int(part or 0) for part in found.groups())) if found else None


def write(path, minutes):
    """Put `minutes` into the head of a notebook and into its row of docs/lessons.md."""
    further = f"Further exercises take {minutes.more} minutes more. " if minutes.more else ""
    head = (
        f"**Time:** {minutes.lesson} minutes to read and run, and {minutes.exercises} minutes to "
        f"write your part (estimated). {further}"
    )
    text = read_text(path)
    write_whole(path, re.sub(ANY_HEAD, head, text, count=1))
    page = read_text(PAGE)
    row = rf"(\]\(\.\./notebooks/{re.escape(path.name)}\)) \| \d+ \|(?: \d+ \|)?"
    page = re.sub(row, rf"\1 | {minutes.lesson} | {minutes.exercises} |", page)
    write_whole(PAGE, with_totals(page))


def with_totals(page):
    """The page with the minutes of its routes added up; a part (◐) counts its stated minutes."""
    part = re.search(r"◐ is lesson .*?, (\d{1,4}) minutes", page)
    if part is None:
        raise InputError(f"{PAGE} does not say how many minutes ◐ is")
    lessons = re.findall(r"^\| \w+ \| \[.*?\| (\d{1,4}) \| .*((?:\| [●◐]? ?){3})\|$", page, re.M)
    for column, route in enumerate(("90 minutes", "one day", "the course"), 1):
        spent = {"": lambda _: 0, "●": int, "◐": lambda _: int(part[1])}
        total = sum(spent[marks.split("|")[column].strip()](each) for each, marks in lessons)
        page = re.sub(rf"(?m)^(\| {route} \|) \d+ \|", rf"\1 {total} |", page)
    return page


@in_one_sentence()
def main():
    parser = Parser(__doc__)
    parser.add_argument("--write", action="store_true", help="put them into heads and the list")
    wanted = parser.parse_args().write
    for path in LESSONS:
        with naming_files():
            minutes = minutes_of(path)
        print(f"{path.stem:28}{minutes.lesson:3} minutes,{minutes.exercises:3} for what one writes")
        if wanted:
            with naming_files(path):
                write(path, minutes)
    return int(bool(not_written))


if __name__ == "__main__":
    sys.exit(main())
