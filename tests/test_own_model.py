"""The changes that docs/your-own-model.md shows are made to fresh copies, which then train."""

import re

import pytest
from test_copy_template import FLAGS, SMALL, copy, train

from course.launch import ROOT

PAGE = ROOT / "docs" / "your-own-model.md"
OWN_TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind.\n" * 50


def diffs_of(page):
    """{file: its diff} of all diffs that the page shows."""
    found = re.findall(r"^```diff\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return {diff.split()[1]: diff for diff in found}


def patched(text, diff):
    """`text` with a unified diff applied to it; every line that the diff shows must be there."""
    for hunk in re.split(r"^@@.*@@\n", diff, flags=re.MULTILINE)[1:]:
        lines = [(line[:1] or " ", line[1:]) for line in hunk.splitlines()]
        before = "".join(line + "\n" for sign, line in lines if sign in " -")
        after = "".join(line + "\n" for sign, line in lines if sign in " +")
        assert text.count(before) == 1, f"a fresh copy does not have these lines:\n{before}"
        text = text.replace(before, after)
    return text


@pytest.mark.parametrize(
    "script, form, file",
    [
        ("gpipe.py", "mine", "pipeline/model.py"),
        ("gpipe.py", "mine.py", "pipeline/model.py"),
        ("zero_bubble.py", "mine", "pipeline/model.py"),
        ("pretrain_llama.py", "mine", "pretrain_llama.py"),
    ],
)
def test_fewer_than_20_lines_bring_in_another_model_and_text(
    script, form, file, tmp_path, monkeypatch
):
    diff = diffs_of(PAGE)[file]
    assert 0 < len(re.findall(r"^[+-](?![+-]{2})", diff, re.MULTILINE)) < 20
    assert copy(script, tmp_path / form) == 0
    copied = tmp_path / form / script if form == "mine" else tmp_path / form
    changed = tmp_path / form / file if form == "mine" else copied
    changed.write_text(patched(changed.read_text(), diff))
    (tmp_path / "my_text.txt").write_text(OWN_TEXT)
    flags = f"{FLAGS.get(script, SMALL)} --data {tmp_path / 'my_text.txt'}"
    monkeypatch.setitem(FLAGS, script, flags)
    losses = train(copied, script, tmp_path)  # with --verify
    assert losses[-1] < losses[0]
