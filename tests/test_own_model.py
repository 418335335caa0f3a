"""The page about a model of one's own: its diffs fit a fresh copy, and the result trains."""

import re

import pytest
from test_copy_template import ROOT, copy, train

PAGE = ROOT / "docs" / "your-own-model.md"
TEXT = "A train stops where its line ends, and a load goes where a hand puts it. " * 40
IN_ONE_FILE, IN_A_FOLDER, IN_PRETRAINING = range(3)  # the diffs of the page


def diffs_of(page):
    """The diffs that a page shows, each as {file: its diff}."""
    found = re.findall(r"^```diff\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    files = [re.split(r"^(?=--- )", diff, flags=re.MULTILINE)[1:] for diff in found]
    return [{diff.split()[1]: diff for diff in of_page} for of_page in files]


def patched(text, diff):
    """`text` with a unified diff applied to it; every line that the diff shows must be there."""
    for hunk in re.split(r"^@@.*@@\n", diff, flags=re.MULTILINE)[1:]:
        lines = [(line[:1] or " ", line[1:]) for line in hunk.splitlines()]
        before = "".join(line + "\n" for sign, line in lines if sign in " -")
        after = "".join(line + "\n" for sign, line in lines if sign in " +")
        assert text.count(before) == 1, f"{PAGE.name} changes lines that no copy has:\n{before}"
        text = text.replace(before, after)
    return text


def changed_lines(diff):
    return [line for line in diff.splitlines() if re.match(r"[+-](?![+-]{2})", line)]


@pytest.mark.parametrize(
    ("script", "number"),
    [
        ("gpipe.py", IN_ONE_FILE),
        ("one_f_one_b.py", IN_ONE_FILE),
        ("zero_bubble.py", IN_A_FOLDER),
        ("pretrain_llama.py", IN_PRETRAINING),
    ],
)
def test_a_change_of_fewer_than_20_lines_brings_in_another_model_and_text(script, number, tmp_path):
    diffs = diffs_of(PAGE)[number]
    assert 0 < sum(len(changed_lines(diff)) for diff in diffs.values()) < 20
    # The diff for one file names gpipe.py, and fits the others.
    name = "gpipe.py" if number == IN_ONE_FILE else script
    folder = tmp_path / "mine"
    assert copy(script, folder / name if number == IN_ONE_FILE else folder) == 0
    for file, diff in diffs.items():
        (folder / file).write_text(patched((folder / file).read_text(), diff))
    (folder / "my_text.txt").write_text(TEXT)
    losses = train(folder / name, script, tmp_path)  # and asserts that they are as promised
    assert len(set(losses)) == len(losses) == 3
