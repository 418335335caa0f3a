"""Turn a folder of submissions into a table: grades.csv and grades.html, written beside them or elsewhere.

    python tools/grade_submissions.py FOLDER [--into FOLDER]

Nothing of a submission is run: it is read as JSON, and its text is shown as text. So the table says what
each person's own checks said on that person's machine. The page has every answer to look at.
"""

import csv
import io
import json
import os
import sys
from html import escape
from pathlib import Path

from exercises import read_notebooks
from make_submission import FORM, MOST_LETTERS

from files.inputs import InputError, printable, read_as_it_is
from files.outputs import not_written, replace_file, write_whole
from guard.one_sentence import in_one_sentence, naming_files
from pipeline.command_line import Parser

MOST_BYTES = 5_000_000
TABLES = "grades.csv", "grades.html"
KEYS = {"lesson", "exercise", "said", "answer"}
FORMULA = "=+-@\t\r\n\uff1d\uff0b\uff0d\uff20"  # begins one; a wide sign may count as a narrow one
MARKS = {"Right: ": "right", "Not yet: ": "not yet"}


@in_one_sentence()
def main():
    arguments = parse_arguments()
    if not os.path.isdir(arguments.folder):
        sys.exit(
            f"grade_submissions.py: {arguments.folder} is not a folder; name the one with the files"
        )
    folder = Path(arguments.folder)
    into = Path(arguments.into or folder)
    with naming_files(fix="mend that, or name another folder"):
        submissions, skipped = read_all(folder)
        notebooks, no_notebooks = read_notebooks()
        exercises = [exercise for each in notebooks.values() for exercise in each]
        skipped += no_notebooks
        texts = csv_of(submissions, exercises), page_of(submissions, skipped, exercises)
        into.mkdir(parents=True, exist_ok=True)
        write_tables(into, *texts)
    for sentence in skipped:
        print(f"skipped: {sentence}")
    print(f"{len(submissions)} submissions in {' and '.join(str(into / name) for name in TABLES)}")
    return int(bool(not_written))


def parse_arguments():
    parser = Parser(__doc__)
    parser.add_argument("folder", metavar="FOLDER", help="where the submissions are")
    parser.add_argument("--into", metavar="FOLDER", help="the folder for the table")
    return parser.parse_args()


def write_tables(into, rows, page):
    """Write both tables; if one of them cannot be written, both old ones stay."""
    files = [into / name for name in TABLES]
    for file in files:
        if file.is_symlink():  # an archive may bring it, and it may lead to a submission
            raise InputError(f"{file} is a link")

    def write(partial):
        write_whole(partial, rows)
        write_whole(files[1], page)

    replace_file(files[0], write)


def read_all(folder):
    """({file name: submission}, [skipped file and reason]); tables of an earlier run do not count."""
    submissions, skipped = {}, []
    for file in sorted(folder.iterdir()):
        if file.name in TABLES:
            continue
        try:
            submissions[file.name] = read(file)
        except ValueError as error:
            skipped.append(f"{printable(file.name)} {error}")  # anybody may hand in
    return submissions, skipped


def read(file):
    """The content of a submission, with every field checked. Raises ValueError with the reason."""
    if file.is_symlink():
        raise ValueError("is a link, which is not followed")
    try:
        is_one = file.suffix == ".json" and file.is_file()
        is_small = is_one and file.stat().st_size <= MOST_BYTES
        text = read_as_it_is(file, MOST_BYTES) if is_small else ""
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    if not is_small:
        raise ValueError("is too large for a submission" if is_one else "is not a submission")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("is damaged: it is not JSON") from None
    if not isinstance(content, dict) or content.get("form") != FORM:
        raise ValueError("is not a submission of this course, or of another version of it")
    answers = content.get("answers")
    if not all(is_text(content.get(key), 80) for key in ("name", "made")):
        raise ValueError("is damaged: it has no name or no time")
    if not isinstance(answers, list) or not all(map(is_answer, answers)):
        raise ValueError("is damaged: its answers are not what make submission writes")
    return content


def is_answer(answer):
    if not isinstance(answer, dict) or answer.keys() != KEYS:
        return False
    return all(is_text(answer[key], MOST_LETTERS) for key in KEYS)


def is_text(value, most):
    return isinstance(value, str) and len(value) <= most


def mark_of(said):
    """The mark "right" or "not yet"; empty if the exercise was not attempted."""
    return next((mark for start, mark in MARKS.items() if said.startswith(start)), "")


def marks_of(submission):
    """{name of an exercise: its mark}; if an exercise is answered twice, the better mark."""
    marks = {}
    for answer in submission["answers"]:
        name, mark = answer["exercise"], mark_of(answer["said"])
        marks[name] = max(marks.get(name, ""), mark, key=["", "not yet", "right"].index)
    return marks


def csv_of(submissions, exercises):
    """A row per submission: name, file, time, number of right answers, a mark per exercise."""
    text = io.StringIO()
    table = csv.writer(text, quoting=csv.QUOTE_ALL)  # another sign may separate cells elsewhere
    titles = [f"{exercise.lesson} {exercise.name}" for exercise in exercises]
    table.writerow(["name", "file", "made", "right", *titles])
    for name, submission in submissions.items():
        marks = marks_of(submission)
        cells = [marks.get(exercise.name, "") for exercise in exercises]
        head = [submission["name"], name, submission["made"]]
        table.writerow([*map(harmless, head), cells.count("right"), *cells])
    return text.getvalue()


def harmless(text):
    """The text, changed if a spreadsheet would read it as a formula."""
    return f"'{text}" if text[:1] in FORMULA else text


def page_of(submissions, skipped, exercises):
    """The table as a page. Below it are all answers with the output of their checks."""
    heads = "".join(
        f'<th scope="col"><span>{escape(f"{exercise.lesson} {exercise.name}")}</span></th>'
        for exercise in exercises
    )
    rows, answers = [], []
    for number, (file, submission) in enumerate(submissions.items()):
        marks = marks_of(submission)
        known = [marks.get(exercise.name, "") for exercise in exercises]
        cells = "".join(f"<td>{SIGNS[mark]}</td>" for mark in known)
        rows.append(
            f'<tr><th scope="row"><a href="#a{number}">{escape(submission["name"])}</a></th>'
            f"<td>{known.count('right')}</td>{cells}</tr>"
        )
        answers.append(answers_of(number, file, submission))
    left = "".join(f"<li>{escape(sentence)}</li>" for sentence in skipped)
    return PAGE.format(
        count=len(submissions),
        heads=heads,
        rows="".join(rows),
        skipped=f"<h2>Skipped</h2><ul>{left}</ul>" if skipped else "",
        answers="".join(answers),
    )


def answers_of(number, file, submission):
    parts = "".join(
        f"<h3>{escape(answer['lesson'])} {escape(answer['exercise'])}</h3>"
        f"<p>{escape(answer['said'])}</p><pre>{escape(answer['answer'])}</pre>"
        for answer in submission["answers"]
        if mark_of(answer["said"])
    )
    title = f"{escape(submission['name'])}, {escape(submission['made'])} ({escape(file)})"
    return f'<details id="a{number}"><summary>{title}</summary>{parts}</details>'


SIGNS = {"right": "●", "not yet": "◐", "": "·"}
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Submissions</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, Helvetica, Arial, sans-serif; margin: 24px 32px; }}
.wide {{ overflow-x: auto; }} table {{ border-collapse: collapse; }}
td, th {{ padding: 2px 8px; border-bottom: 1px solid #8a929966; text-align: left; }}
th span {{ writing-mode: vertical-rl; }} pre {{ overflow-x: auto; padding-left: 2em; }}
summary {{ cursor: pointer; font-weight: bold; }}
</style></head><body>
<h1>{count} submissions</h1>
<p>● right, ◐ not yet, · not attempted: what each person's own checks said. Nothing was run here.</p>
<div class="wide"><table><thead><tr><th>name</th><th>right</th>{heads}</tr></thead>
<tbody>{rows}</tbody></table></div>{skipped}
<h2>Answers</h2>{answers}
</body></html>
"""


if __name__ == "__main__":
    os.umask(0o077)  # people may open, by name, what lies in the folder they hand in to
    sys.exit(main())
