"""Make what participants get: build/handout, the course and its website without the answers.

    make handout

The copy has no solutions, no pages or tools for instructors and maintainers, and no tests, because
tests contain right answers, too. The checks, and other code that lessons run and that contains
answers, are packed: they run as before, and neither a look nor a search shows the answer. Cells
below a question that asks for a guess have no output, so that the answer is not visible before the
guess; running the cell shows it. Links to removed files become plain text.

The copy is a git repository of its own, and course.bundle is the same in one file, for `git clone`.
Each further run adds one commit, so that `git pull` brings what has changed. The flags are those of
make_site.py, except --of and --into.
"""

import base64
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import make_site
import nbformat
from answers import answers_of
from exercises import notebook_of
from own_git import ask_git

from files.claims import ClaimError, lock_folder
from files.inputs import printable, read_text
from files.outputs import not_written
from guard.one_sentence import in_one_sentence, naming_files
from pipeline.command_line import Parser

ROOT = Path(__file__).resolve().parents[1]
HANDOUT = ROOT / "build" / "handout"
LEFT_OUT = (
    ".ci", ".github", "CONTRIBUTING.md", "docs/certificates.md", "docs/changelog.md",
    "docs/instructors.md", "docs/lesson-plans.md", "docs/measurements.md", "docs/two-free-gpus.md",
    "docs/website.md",
    "notebooks/solutions", "slurm/accept.sbatch", "tests",
)  # fmt: skip
TOOLS = ("Dockerfile", "constraints.txt", "exercises.py", "jupyter", "make_submission.py")
TARGETS = ("help", "lab", "run", "submission", "wheels")  # of the Makefile
# The checks are packed, because many compute the right answer; not the puzzles, which only ask.
CHECKS, PUZZLES = Path("source_code/course/checks"), "puzzles.py"
# The other files that are packed, and the functions in them that are answers.
ANSWERS = {
    "small/pipeline.py": ("naive_step", "gpipe_step", "one_f_one_b_step", "interleaved_step"),
    "small/weight_stash.py": ("pipedream_run",),
    "small/split_backward.py": ("input_half", "weight_half"),
    "course/building/single_messages.py": ("forward", "backward", "gpipe_step", "one_f_one_b_step"),
    "course/building/zb_h1.py": ("backward_input", "zb_h1_step"),
    # Lesson 12b itself shows the repair of its example, next_to_send.
    "broken/pipelines/faults.py": (
        "Cured.loss_to_go_back_from",
        "Cured.layers_of_stages",
        "Cured.keep_activation",
        "Cured.order_of_receives",
        "Cured.norm_to_clip_by",
        "Cured.before_update",
        "Cured.tied_gradient",
    ),
}
PACKED = '''# SPDX-License-Identifier: Apache-2.0
# Packed in the handout, since the text has answers of exercises. It runs as it is.
import base64
import os
import zlib

PACKED = """
{}"""
exec(compile(zlib.decompress(base64.b64decode(PACKED)), __file__, "exec"))
'''
LINK = r"\[([^\]]*)\]\((?![a-z]+:)([^)#\s\0\ud800-\udfff]*)(?:#[^)]*)?\)"
CACHES = r"^!! .*(__pycache__|\.ipynb_checkpoints|\.pytest_cache|\.ruff_cache)/\"?$"
# All that is not committed, whatever the user's own settings hide.
STATUS = "status", "--porcelain", "--ignored=matching", "--untracked-files=normal"
# With the end of the line only if it also began the line: otherwise two lines would become one.
COURSE_ONLY = r"^<!-- course only -->.*?<!-- end -->\n?|<!-- course only -->.*?<!-- end -->"


@in_one_sentence()
def main():
    flags = Parser(__doc__).parse_known_args()[1]
    # Rejects other flags than its own before anything is written.
    arguments = make_site.parse_arguments()
    if (arguments.of, arguments.into) != (make_site.ROOT, make_site.SITE):
        sys.exit(f"make_handout.py: the handout is always {HANDOUT}; leave out --of and --into")
    again = f"mend that, and make the handout again; it goes into {HANDOUT}"
    try:
        with naming_files(fix=again):
            HANDOUT.mkdir(parents=True, exist_ok=True)
            with lock_folder("the handout", HANDOUT)[0]:  # one program at a time writes there
                return make(flags)
    except ClaimError as error:
        sys.exit(f"make_handout.py: {error}")
    except subprocess.SubprocessError as error:
        said = os.fsdecode(error.stderr or b"").strip().splitlines() or ["it ended without a word"]
        why = next((line for line in said if line.startswith("fatal: ")), said[-1])  # then advice
        sys.exit(f"make_handout.py: git: {why}; {again}")


def make(flags):
    """Write the copy and, with these `flags`, its website. Returns the exit status."""
    copied, hidden = write_course(HANDOUT / "course")
    commit(HANDOUT / "course")
    command = [sys.executable, ROOT / "tools" / "make_site.py", *flags]
    command += ["--of", HANDOUT / "course", "--into", HANDOUT / "site"]
    status = subprocess.run(command).returncode
    course = HANDOUT / "course"
    packed_files = sum(is_packed(file.relative_to(course)) for file in course.rglob("*.py"))
    print(
        f"build/handout: {copied} files in course and in course.bundle, without solutions, pages for "
        f"instructors and tests; {packed_files} files with answers are packed, and the outputs of "
        f"{hidden} cells with answers are left out"
    )
    return status or int(bool(not_written))


def write_course(folder):
    """Write the copy into `folder`. Returns the numbers of files and of cells without outputs."""
    try:
        listed = ask_git(ROOT, "ls-files", "-z")
    except (OSError, subprocess.SubprocessError):
        sys.exit("make_handout.py: git does not list the course's files; use a clone of your own")
    files = [Path(os.fsdecode(name)) for name in listed.split(b"\0") if name]
    files = [file for file in files if os.path.isfile(ROOT / file) and not is_left_out(file)]
    if make_site.LESSONS not in files:  # nothing of an older copy would stay
        sys.exit(
            f"make_handout.py: git lists no {make_site.LESSONS} in {ROOT}; use a clone of the course, or "
            f"get the file back with: git checkout HEAD {make_site.LESSONS}"
        )
    changed, hidden = {}, 0  # every file is read before the older copy is removed
    for file in files:
        if file.suffix == ".ipynb":
            notebook = notebook_of(ROOT / file)
            hidden += without_answers(notebook, file)
            changed[file] = nbformat.writes(notebook) + "\n"
        elif file.suffix == ".md":
            changed[file] = without_links(read_text(ROOT / file), file)
        elif file.name == "Makefile":
            changed[file] = with_targets(read_text(ROOT / file))
        elif is_packed(file):
            changed[file] = packed(read_text(ROOT / file))
    check_is_copy(folder)
    name_changes(files)
    with tempfile.TemporaryDirectory(prefix=make_site.UNFINISHED, dir=folder.parent) as made:
        for file in files:
            target = Path(made) / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, target)
            if file in changed:
                # A notebook may have half of a surrogate pair, such as "\\ud800"; it stays as it is.
                target.write_text(changed[file], encoding="utf-8", errors="backslashreplace")
        make_site.replace_content(folder, Path(made), keep=[".git"])
    return len(files), hidden


def name_changes(files):
    """Name each of the files that differ from the last commit.

    An instructor may have written an answer into a notebook, and forgotten it.
    """
    said = ask_git(ROOT, "diff", "--name-only", "--no-renames", "--relative", "-z", "HEAD")
    changed = set(said.split(b"\0"))
    for file in files:
        if os.fsencode(file) in changed:
            name = printable(str(file))
            print(
                f"make_handout.py: {name} is handed out with changes that are not committed; to leave "
                f"them out, run git stash -- {name} and make the handout again",
                file=sys.stderr,
            )


def check_is_copy(folder):
    """Make the folder if it is missing; reject one that has something else than an older copy."""
    folder.mkdir(parents=True, exist_ok=True)
    has_history = (folder / ".git").is_dir()
    if folder.is_symlink() or (os.listdir(folder) and not has_history):
        sys.exit(f"make_handout.py: {folder} is not an older copy of the course; move it away")
    said = git(folder, *STATUS) if has_history else ""
    for line in said.splitlines():
        if not re.search(CACHES, line):
            sys.exit(
                f"make_handout.py: {line[3:]} in {folder} was changed there, and would be lost; commit "
                "it there, or move the folder away"
            )


def is_left_out(file):
    if file.parts[:1] == ("tools",):
        return not any(name in TOOLS for name in file.parts[1:2])
    return any(file.is_relative_to(each) for each in LEFT_OUT)


def is_packed(file):
    if file.parent == CHECKS and file.suffix == ".py":
        return file.name != PUZZLES
    return file.parts[:1] == ("source_code",) and "/".join(file.parts[1:]) in ANSWERS


def packed(text):
    """Return a Python file that does the same as that with the `text`, without showing the text."""
    return PACKED.format(base64.encodebytes(zlib.compress(text.encode(), 9)).decode())


def with_targets(makefile):
    """Return the Makefile with the TARGETS that participants need, and the variables in them."""
    blocks = re.split(r"\n{2,}", makefile.rstrip())
    names = [re.search(r"^([a-z-]+):", block, re.MULTILINE) for block in blocks]
    targets = [block for block, name in zip(blocks, names) if name and name[1] in TARGETS]

    def is_needed(block, name):
        variables = re.findall(r"^(?:define )?([A-Z_]+)", block, re.MULTILINE)
        used = any(f"$({variable})" in other for other in targets for variable in variables)
        return block in targets or not name and (used or not variables or "INSTALLED" in block)

    text = "\n\n".join(block for block, name in zip(blocks, names) if is_needed(block, name))
    return re.sub(r"^\.PHONY:.*$", f".PHONY: {' '.join(TARGETS)}", text, flags=re.MULTILINE) + "\n"


def without_answers(notebook, file):
    """Remove outputs that give an answer away, and links to removed files.

    Returns the number of cells that lost their outputs.
    """
    answers = answers_of(notebook)
    shown = [cell for cell in notebook.cells if shows_answer(cell.source) and cell not in answers]
    for cell in [*answers, *shown]:
        cell.outputs, cell.execution_count = [], None
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = without_links(cell.source, file)
    return len(answers) + len(shown)


def shows_answer(code):
    """Whether a cell shows the text of an answer that is packed."""
    shown = re.findall(r'^source_of\("([^"]*)"(?:, "([\w.]+)")?\)', code, re.MULTILINE)
    return any(not name or name in ANSWERS[file] for file, name in shown if file in ANSWERS)


def without_links(text, file):
    """Markdown of `file` without what is marked as the course's only, and without dead links.

    A link to a removed file, or to one that cannot be read, is replaced by its text. The sentence
    that links to the solutions is removed.
    """

    def words(match):
        target = (ROOT / file.parent / match[2]).resolve()
        if not match[2] or not target.is_relative_to(ROOT):
            return match[0]
        target = target.relative_to(ROOT)
        return match[1] if is_left_out(target) or is_packed(target) else match[0]

    text = re.sub(COURSE_ONLY, "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"Solutions are in \[[^\]]*\]\([^)]*\)\.\s?", "", text)
    return re.sub(LINK, words, text)


def commit(folder):
    """Commit the copy in its own git repository, and write it as one file beside the folder."""
    git(folder, "init", "--quiet")
    git(folder, "add", "--all", "--force")  # also what an ignore list of this user's names
    message = "The course, as it is handed out"
    git(folder, "commit", "--quiet", "--allow-empty", "--message", message)
    git(folder, "bundle", "create", folder.with_suffix(".bundle"), "--all")


def git(folder, *words):
    """Return what a command of git prints about the repository in `folder`, and in no other."""
    # Otherwise git finds the course's own repository if the copy's is damaged.
    settings = "user.name=course", "user.email=course@localhost", "commit.gpgsign=false"
    settings += ("core.hooksPath=/dev/null",)  # hooks are of people, such as a check of messages
    own = ["--git-dir", ".git", "--work-tree", "."]
    own += [word for setting in settings for word in ("-c", setting)]
    return os.fsdecode(ask_git(folder, *own, *words))


if __name__ == "__main__":
    sys.exit(main())
