"""A lesson is stored from a quiet machine only: from a run whose paced steps are as predicted."""

import json
import subprocess
import sys

import pytest
import quiet_run

CELL = {"metadata": {}}
CODE = {**CELL, "cell_type": "code", "execution_count": None}
PACED, FREE = 'run("gpipe.py --pace 10 20")', 'run("gpipe.py")'


def stream(text):
    return {"output_type": "stream", "name": "stdout", "text": [text]}


def notebook(*cells):
    """The text of a notebook of (source, output) cells."""
    return json.dumps(
        {
            "cells": [
                {**CELL, "cell_type": "markdown", "source": ["step 9 ms (predicted 1 ms)"]},
                *(
                    {**CODE, "source": [source], "outputs": [stream(text)]}
                    for source, text in cells
                ),
            ],
            "metadata": {},
            "nbformat": 4,
            "nbformat_minor": 4,
        }
    )


def step(took, predicted=300.0):
    return f"step 0  loss 1.000000\nstep {took} ms (predicted {predicted} ms)  idle 30.0%\n"


def test_only_steps_with_a_pace_count_and_the_slowest_of_them(tmp_path):
    path = tmp_path / "00_x.ipynb"
    path.write_text(notebook((PACED, step(330.0)), (PACED, step(303.0)), (FREE, step(900.0))))
    assert quiet_run.longest_over(path) == pytest.approx(10)
    path.write_text(notebook((PACED, step("1.2.3") + step(330.0) + step(1.0, 0.0))))
    assert quiet_run.longest_over(path) == pytest.approx(10)
    path.write_text(notebook((FREE, step(900.0))))
    assert quiet_run.longest_over(path) == 0


@pytest.fixture
def lesson(tmp_path, monkeypatch):
    """Call the tool on a lesson whose runs take the given times; its exit status and its text."""
    path = tmp_path / "00_x.ipynb"
    path.write_text(notebook((PACED, step(1.0))))
    monkeypatch.setattr(quiet_run, "ROOT", tmp_path)

    def call(*times, flags=()):
        runs = iter(times)

        def make(words, **_):
            copy = tmp_path / words[-1].removeprefix("ONLY=")
            assert words[:2] == ["make", "notebooks"] and copy != path
            copy.write_text(notebook((PACED, step(next(runs)))))

        monkeypatch.setattr(quiet_run.subprocess, "run", make)
        monkeypatch.setattr(sys, "argv", ["quiet_run.py", str(path), *flags])
        return quiet_run.main(), path.read_text(), list(runs)

    return call


def test_the_first_quiet_run_is_stored(lesson):
    status, text, left = lesson(390.0, 310.0, 300.0)
    assert (status, left) == (0, [300.0]) and "step 310.0 ms" in text


def test_a_machine_that_is_never_quiet_is_named_and_nothing_is_stored(lesson, capsys):
    status, text, left = lesson(390.0, 391.0, 300.0, flags=["--tries", "2"])
    assert (status, left) == (1, [300.0]) and "step 1.0 ms" in text
    assert "the machine was not quiet" in capsys.readouterr().err


def test_what_is_no_file_costs_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["quiet_run.py", "notebooks/99.ipynb"])
    with pytest.raises(SystemExit):
        quiet_run.main()
    assert "99.ipynb is not a file; give a lesson" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{}", "[]", "<<<<<<< ours"])
def test_what_is_no_notebook_is_not_run(tmp_path, monkeypatch, capsys, text):
    path = tmp_path / "00_x.ipynb"
    path.write_text(text)
    monkeypatch.setattr(quiet_run.subprocess, "run", pytest.fail)
    monkeypatch.setattr(sys, "argv", ["quiet_run.py", str(path)])
    with pytest.raises(SystemExit, match="2"):
        quiet_run.main()
    assert str(path) in capsys.readouterr().err and path.read_text() == text


@pytest.fixture
def run_of(tmp_path, monkeypatch):
    """Call the tool on a notebook of the given name, with the given function in make's place."""
    monkeypatch.setattr(quiet_run, "ROOT", tmp_path)

    def call(name, make):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(notebook((PACED, step(1.0))))
        monkeypatch.setattr(quiet_run.subprocess, "run", make)
        monkeypatch.setattr(sys, "argv", ["quiet_run.py", str(path)])
        with pytest.raises(SystemExit, match="2"):
            quiet_run.main()
        return path

    return call


def test_make_gets_a_name_that_a_shell_takes_as_it_is(run_of, capsys):
    asked = []

    def make(words, **_):
        asked.append(words[-1])
        raise subprocess.CalledProcessError(2, words)

    for name in ("a;touch injected.ipynb", "$(HOME).ipynb", "a b.ipynb", "sub/00_x.ipynb"):
        assert run_of(name, make).name in capsys.readouterr().err
    places = {word.removeprefix("ONLY=") for word in asked}
    assert len(places) == 4 and all(quiet_run.re.fullmatch(r"[\w/.-]+", each) for each in places)


def test_a_lesson_that_changed_during_the_run_is_not_overwritten(run_of, tmp_path):
    mine = notebook((FREE, "mine"))

    def make(words, **_):
        (tmp_path / "00_x.ipynb").write_text(mine)

    assert run_of("00_x.ipynb", make).read_text() == mine


def test_without_make_the_lesson_is_as_it_was(run_of, capsys):
    def make(words, **_):
        raise FileNotFoundError(2, "No such file or directory", "make")

    run_of("00_x.ipynb", make)
    assert "make cannot be used (No such file" in capsys.readouterr().err
