"""Make the copy for participants: build/handout, the course and its website without the answers.

    make handout

The copy contains no solutions, no pages for instructors and no tests, because tests contain right
answers, too. Cells below a question that asks for a guess have no output, so that the answer is not
visible before the guess; running the cell shows it. Links to removed files become plain text.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
from answers import answers_of

ROOT = Path(__file__).resolve().parents[1]
HANDOUT = ROOT / "build" / "handout"
LEFT_OUT = ("notebooks/solutions", "docs/instructors.md", "docs/lesson-plans.md", "tests")
LINK = r"\[([^\]]*)\]\((?![a-z]+:)([^)#\s]*)(?:#[^)]*)?\)"


def main():
    try:
        copied, hidden = write_course(HANDOUT / "course")
    except OSError as error:
        sys.exit(f"make_handout.py: {error.filename}: {error.strerror}")
    command = [sys.executable, ROOT / "tools" / "make_site.py", *sys.argv[1:]]
    command += ["--of", HANDOUT / "course", "--into", HANDOUT / "site"]
    status = subprocess.run(command).returncode
    print(
        f"build/handout: {copied} files in course, without solutions, pages for instructors and "
        f"tests; the outputs of {hidden} cells below a question are left out"
    )
    return status


def write_course(folder):
    """Write the copy into `folder`. Returns the numbers of files and of cells without outputs."""
    try:
        listed = subprocess.run(
            ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        sys.exit("make_handout.py: git does not list the course's files; use a clone of the course")
    shutil.rmtree(folder, ignore_errors=True)
    files = [Path(line) for line in listed if (ROOT / line).is_file()]
    files = [file for file in files if not is_left_out(file)]
    hidden = 0
    for file in files:
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".ipynb":
            notebook = nbformat.read(ROOT / file, as_version=4)
            hidden += without_answers(notebook, file)
            nbformat.write(notebook, target)
        elif file.suffix == ".md":
            target.write_text(without_links((ROOT / file).read_text(), file))
        else:
            shutil.copy(ROOT / file, target)
    return len(files), hidden


def is_left_out(file):
    return any(file.is_relative_to(each) for each in LEFT_OUT)


def without_answers(notebook, file):
    """Remove outputs that give an answer away, and links to removed files.

    Returns the number of cells that lost their outputs.
    """
    answers = answers_of(notebook)
    for cell in answers:
        cell.outputs, cell.execution_count = [], None
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = without_links(cell.source, file)
    return len(answers)


def without_links(text, file):
    """Markdown of `file` in which each link to a removed file is replaced by its text.

    The sentence that links to the solutions is removed.
    """

    def words(match):
        target = (ROOT / file.parent / match[2]).resolve()
        inside = target.is_relative_to(ROOT) and is_left_out(target.relative_to(ROOT))
        return match[1] if match[2] and inside else match[0]

    text = re.sub(r"Solutions are in \[[^\]]*\]\([^)]*\)\.\s?", "", text)
    return re.sub(LINK, words, text)


if __name__ == "__main__":
    sys.exit(main())
