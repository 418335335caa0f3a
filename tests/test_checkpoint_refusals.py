"""A folder that does not fit is refused on every rank before the first message, and left alone."""

import json
import shlex
import shutil
import sys
from itertools import product
from pathlib import Path
from unittest import mock

import distributed_checkpointing
import pytest
from test_bad_input import Refusal, schedule_file
from whole_checkpoints import COUNTED

from extensions.checkpointing import checkpoint_arguments, checkpoint_folder

SCRIPT = "distributed_checkpointing"
MADE_WITH = "--clip 1 --optimizer adamw --warm-up-steps 3 --decay-steps 50"


@pytest.fixture
def refusal(monkeypatch, capsys):
    return Refusal(monkeypatch, capsys)


def parse(monkeypatch, *flags):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", [f"{SCRIPT}.py", *flags])
    return distributed_checkpointing.read_flags()


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A folder with the checkpoints of steps 5 and 10 of a training run with MADE_WITH."""
    folder = tmp_path / "saved"
    folder.mkdir()
    configuration = parse(monkeypatch, *MADE_WITH.split()).configuration
    for step in (5, 10):
        temporary = checkpoint_folder.begin_writing(folder, "run-0001", step)
        (temporary / "__0_0.distcp").write_bytes(b"tensors")
        files = checkpoint_folder.describe_files(temporary, "__0_")
        description = {**COUNTED, "configuration": configuration, "files": files}
        checkpoint_folder.publish(temporary, folder, "run-0001", step, description, keep=5)
    return folder


def content_of(folder):
    return {path: path.is_file() and path.read_bytes() for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("size", ["many", None, 0, -2, 8.0, True, [8]])
def test_a_checkpoint_whose_sizes_are_no_counts_is_not_what_was_written(saved, size):
    path = saved / "run-0001" / "step-00000010"
    description = json.loads((path / "checkpoint.json").read_text())
    description["configuration"]["--layers"] = size
    checkpoint_folder.write_description(path, description)
    with pytest.raises(checkpoint_folder.CheckpointError, match="has changed since it was written"):
        checkpoint_folder.find_checkpoint(saved)


@pytest.mark.parametrize(
    "flags, now, was",
    [
        ("--layers 4", "--layers is 4", "--layers 8"),
        ("--dim 64 --layers 4", "--layers is 4", "--layers 8"),  # the first mismatch
        ("--dim 64", "--dim is 64", "--dim 32"),
        ("--heads 2", "--heads is 2", "--heads 4"),
        ("--kv-heads 4", "--kv-heads is 4", "--kv-heads 2"),
        ("--seq-len 16", "--seq-len is 16", "--seq-len 32"),
        ("--dtype float32", "--dtype is float32", "--dtype float64"),
        ("--seed 1", "--seed is 1", "--seed 0"),
        ("--batch-size 32", "--batch-size is 32", "--batch-size 16"),
        ("--optimizer sgd", "--optimizer is sgd", "--optimizer adamw"),
        ("--learning-rate 0.1", "--learning-rate is 0.1", "--learning-rate 0.003"),
        ("--warm-up-steps 1", "--warm-up-steps is 1", "--warm-up-steps 3"),
        ("--decay-steps 20", "--decay-steps is 20", "--decay-steps 50"),
        ("--clip 2", "--clip is 2.0", "--clip 1.0"),
        ("--data TEXT", "--data is a text with SHA-256", "--data a text with SHA-256 "),
    ],
)
def test_a_checkpoint_of_another_training_is_refused_with_the_first_mismatch_and_left_alone(
    refusal, saved, tmp_path, flags, now, was
):
    before = content_of(saved)
    (tmp_path / "text").write_text("x" * 1000)
    flags = f"--optimizer adamw {flags}".replace("TEXT", str(tmp_path / "text")).split()
    sentence = refusal.check(SCRIPT, "--checkpoints", str(saved), *flags, names=now, ranks=4)
    assert f"{now}" in sentence and f"step-00000010 was made with {was}" in sentence
    assert refusal(SCRIPT, "--checkpoints", str(saved), *flags, rank=3, ranks=4) == (2, sentence)
    assert content_of(saved) == before


def test_a_flag_that_the_program_did_not_have_when_it_saved_is_one_that_was_not_given():
    saved = {"--seed": 0, "--packed": True}
    for value in (None, False, 0, 0.0):
        assert (
            checkpoint_arguments.first_difference(saved, "step", saved | {"--new": value}) is None
        )
    for flag, value, words in [
        ("--new", True, "--new is given, and step was made with no --new;"),
        ("--new", 0.5, "--new is 0.5, and step was made with no --new; use the program that"),
        ("--packed", False, "--packed is not given, and step was made with --packed;"),
        ("--seed", 1, "--seed is 1, and step was made with --seed 0;"),
        ("--seed", None, "--seed is not given, and step was made with --seed 0;"),
    ]:
        assert checkpoint_arguments.first_difference(
            saved, "step", saved | {flag: value}
        ).startswith(words)


def test_a_flag_that_this_program_does_not_have_was_not_given_when_it_saved():
    """Else a training would go on in silence without it, after one wrong name of a program."""
    for value in (None, False, 0, 0.0):
        saved = {"--seed": 0, "--old": value}
        assert checkpoint_arguments.first_difference(saved, "step", {"--seed": 0}) is None
    for value, words in ((True, "with --old; use the program"), (0.9, "with --old 0.9; use the")):
        sentence = checkpoint_arguments.first_difference({"--old": value}, "step", {"--seed": 0})
        assert sentence.startswith("--old is not given, and step was made ") and words in sentence


def test_the_rate_falls_after_the_warm_up_however_short_the_run_is(monkeypatch):
    arguments = parse(monkeypatch, "--steps", "2", "--warm-up-steps", "20")
    assert (arguments.warm_up_steps, arguments.decay_steps) == (20, 21)


def test_what_was_not_given_is_taken_from_the_checkpoint_and_what_may_differ_may(
    saved, monkeypatch
):
    flags = ["--checkpoints", str(saved), "--optimizer", "adamw"]
    further = "--steps 99 --microbatches 2 --schedule gpipe --keep 7 --asynchronous".split()
    arguments = parse(monkeypatch, *flags, *further)
    assert (arguments.clip, arguments.warm_up_steps, arguments.decay_steps) == (1.0, 3, 50)
    assert (arguments.begin.step, arguments.run) == (10, "run-0001")
    arguments = parse(monkeypatch, *flags, "--from-step", "5")
    assert (arguments.begin.step, arguments.run) == (5, "run-0002")
    arguments = parse(monkeypatch, *flags, "--from-step", "10")
    assert (arguments.begin.step, arguments.run) == (10, "run-0001")
    arguments = parse(monkeypatch, "--checkpoints", str(saved), "--fresh", "--layers", "4")
    assert (arguments.begin, arguments.run) == (None, "run-0002")


@pytest.mark.parametrize(
    "flags, named",
    [
        ("--checkpoints ''", "--checkpoints"),
        ("--checkpoints FOLDER/missing/too", "--checkpoints"),
        ("--checkpoints FILE", "--checkpoints"),
        ("--checkpoints /proc", "--checkpoints"),  # nobody writes there, not even root
        ("--checkpoints FOLDER --keep 0", "--keep"),
        ("--checkpoints FOLDER --save-every 0", "--save-every"),
        ("--checkpoints FOLDER --save-every often", "--save-every"),
        ("--checkpoints FOLDER --from-step 3", "--from-step"),
        ("--checkpoints FOLDER --from-step 0", "--from-step"),
        ("--checkpoints FOLDER --fresh --from-step 5", "--fresh"),
        ("--save-every 3", "--save-every"),
        ("--keep 3", "--keep"),
        ("--asynchronous", "--asynchronous"),
        ("--fresh", "--fresh"),
        ("--from-step 3", "--from-step"),
        ("--schedule 1f1b --chunks 2", "--schedule"),
        ("--schedule interleaved-1f1b --chunks 9", "--layers"),
        ("--schedule zigzag", "--schedule"),
        ("--warm-up-steps 0", "--warm-up-steps"),
        ("--warm-up-steps 10 --decay-steps 10", "--decay-steps"),
        ("--decay-steps 2", "--decay-steps"),
        ("--clip 0", "--clip"),
        ("--clip -1", "--clip"),
        ("--clip nan", "--clip"),
    ],
)
def test_flags_that_cannot_be_followed_are_refused_in_one_sentence(refusal, tmp_path, flags, named):
    folder, file = tmp_path / "folder", tmp_path / "file"
    folder.mkdir()
    file.write_text("text")
    words = [
        word.replace("FOLDER", str(folder)).replace("FILE", str(file))
        for word in shlex.split(flags)
    ]
    refusal.check(SCRIPT, *words, names=named)
    assert list(folder.iterdir()) == [] and file.read_text() == "text"


OUTPUTS = ("--losses", "--timeline", "--profile", "--record")


@pytest.mark.parametrize(
    ("script", "flag"),
    [*product((SCRIPT, "pretrain_llama"), OUTPUTS), ("pretrain_llama", "--metrics")],
)
@pytest.mark.parametrize(
    "place", ["", "latest", "new", "run-0001/step-00000010/__0_0.distcp", "../link/new"]
)
def test_no_output_lies_on_or_in_the_checkpoints(refusal, saved, script, flag, place):
    (saved.parent / "link").symlink_to(saved / "run-0001", target_is_directory=True)
    before = content_of(saved)
    flags = ["--checkpoints", str(saved), "--optimizer", "adamw", flag, str(saved / place)]
    sentence = refusal.check(script, *flags, names="--checkpoints")
    assert f"{flag} " in sentence and str(saved) in sentence
    assert ("name the same file" if place == "" else "lies in --checkpoints") in sentence
    assert content_of(saved) == before


def test_a_checkpoint_folder_behind_a_link_is_looked_into(refusal, saved):
    link = saved.parent / "link"
    link.symlink_to(saved, target_is_directory=True)
    flags = ["--checkpoints", str(link), "--optimizer", "adamw", "--losses", f"{saved}/latest"]
    assert "lies in --checkpoints" in refusal.check(SCRIPT, *flags, names="--losses")


def test_a_run_behind_a_link_is_not_continued_and_none_of_its_checkpoints_goes(refusal, saved):
    other = saved.rename(saved.parent / "other")
    before = content_of(other)
    saved.mkdir()
    (saved / "run-0001").symlink_to(other / "run-0001", target_is_directory=True)
    flags = ["--checkpoints", str(saved), "--optimizer", "adamw", "--keep", "1"]
    assert "it is a link" in refusal.check(SCRIPT, *flags, names=f"{saved / 'run-0001'}")
    with pytest.raises(PermissionError, match="it is a link"):  # one that comes later
        checkpoint_folder.begin_writing(saved, "run-0001", 20)
    assert content_of(other) == before


def test_what_the_system_refuses_in_the_folder_has_a_flag_and_a_fix(monkeypatch):
    class Refused:
        def __init__(self, *_):
            self.prepare = lambda: "Is a directory: c/stopped"

    arguments = mock.MagicMock(checkpoints="c", begin=None)
    monkeypatch.setattr(checkpoint_arguments, "Checkpoints", Refused)
    with pytest.raises(SystemExit, match="^Is a directory: c/stopped; .* --checkpoints"):
        checkpoint_arguments.continue_training(arguments, mock.MagicMock(), None)


def test_outputs_lie_apart_before_there_is_a_folder(refusal, tmp_path):
    new, record = str(tmp_path / "new"), tmp_path / "record"
    flags = ["--checkpoints", new, "--losses", f"{new}/losses"]
    assert "--losses" in refusal.check(SCRIPT, *flags, names="lies in --checkpoints")
    record.mkdir()
    flags = ["--checkpoints", f"{record}/new", "--record", str(record)]
    assert "--checkpoints" in refusal.check(SCRIPT, *flags, names="lies in --record")
    flags = ["--losses", f"{record}/losses", "--record", str(record)]
    assert "--losses" in refusal.check(SCRIPT, *flags, names="lies in --record")
    assert list(tmp_path.iterdir()) == [record] and list(record.iterdir()) == []


@pytest.mark.parametrize("flag", [*OUTPUTS, "--metrics"])
def test_no_output_overwrites_a_file_that_is_read(refusal, tmp_path, flag):
    (tmp_path / "file").write_bytes(bytes(1000))
    (tmp_path / "link").symlink_to("file")
    flags = ["--data", str(tmp_path / "file"), flag, str(tmp_path / "link")]
    flags += ["--checkpoints", str(tmp_path / "saved")]
    sentence = refusal.check(
        "pretrain_llama", *flags, names=f"{flag} and --data name the same file"
    )
    assert str(tmp_path / "link") in sentence
    assert (tmp_path / "file").read_bytes() == bytes(1000) and not (tmp_path / "saved").exists()


def test_a_schedule_that_is_performed_is_not_overwritten(refusal):
    file = schedule_file(1)
    before = Path(file).read_bytes()
    refusal.check("train", "--losses", file, names="--losses and FILE.csv")
    assert Path(file).read_bytes() == before


def test_outputs_beside_the_checkpoints_are_accepted(saved, monkeypatch):
    # A name that begins like the folder's is not a place within it.
    beside = ["--timeline", f"{saved}.json", "--losses", f"{saved}-losses"]
    found = parse(monkeypatch, "--checkpoints", str(saved), "--optimizer", "adamw", *beside)
    assert found.losses == f"{saved}-losses" and found.begin.step == 10


def test_a_training_does_not_begin_anew_where_a_model_was_to_be_brought_in(
    refusal, tmp_path, monkeypatch
):
    folder = tmp_path / "saved"
    checkpoint_folder.begin_writing(folder, "run-0001", 5)  # a training's first save, not whole
    assert parse(monkeypatch, "--checkpoints", str(folder)).begin is None
    checkpoint_folder.begin_writing(folder, "run-0001", 0)  # only convert.py saves step 0
    sentence = refusal.check("pretrain_llama", "--checkpoints", str(folder), names="--checkpoints")
    assert "convert.py" in sentence and "--fresh" in sentence
    assert parse(monkeypatch, "--checkpoints", str(folder), "--fresh").run == "run-0002"


def test_an_older_step_that_is_not_there_is_refused_with_those_that_are(refusal, saved):
    flags = ["--checkpoints", str(saved), "--optimizer", "adamw", "--from-step", "7"]
    assert "use one of 5, 10" in refusal.check(SCRIPT, *flags, names="--from-step 7")


@pytest.mark.parametrize("name", ["step-000000020", "step-٠٠٠٠٠٠٢٠", "../run-00002/step-00000020"])
def test_a_folder_whose_number_is_written_in_another_way_is_no_checkpoint(saved, name):
    (saved / "run-0001" / name).mkdir(parents=True)
    (saved / "latest").unlink()
    assert checkpoint_folder.find_checkpoint(saved).name == "run-0001/step-00000010"


@pytest.mark.parametrize("digits", [15, 16, 60])
def test_a_new_run_behind_one_with_a_huge_number_is_found_again(saved, monkeypatch, digits):
    (saved / "run-0001").rename(saved / f"run-{'9' * digits}")
    run = parse(monkeypatch, "--checkpoints", str(saved), "--fresh").run
    assert run == f"run-1{'0' * digits}"
    shutil.copytree(saved / f"run-{'9' * digits}", saved / run)
    checkpoint_folder.write_line(saved, "latest", f"{run}/step-00000010")
    assert checkpoint_folder.find_checkpoint(saved).name == f"{run}/step-00000010"


@pytest.mark.parametrize("content", [b"run-0009/step-00000001\n", b"", b"..", b"\xff\xfe", None])
def test_latest_that_names_nothing_is_refused(refusal, saved, content):
    (saved / "latest").unlink()
    if content is None:
        (saved / "latest").mkdir()
    else:
        (saved / "latest").write_bytes(content)
    flags = ["--checkpoints", str(saved), "--optimizer", "adamw"]
    assert "latest names" in refusal.check(SCRIPT, *flags, names="--checkpoints")


def test_without_latest_the_newest_run_that_has_a_checkpoint_goes_on(saved, monkeypatch):
    (saved / "latest").unlink()
    (saved / "run-0002" / ".writing-step-00000001-abcd").mkdir(parents=True)
    found = parse(monkeypatch, "--checkpoints", str(saved), "--optimizer", "adamw")
    assert (found.begin.step, found.run) == (10, "run-0001")


def test_a_folder_that_is_not_there_yet_is_made_by_the_training_and_not_by_a_look(
    tmp_path, monkeypatch
):
    found = parse(monkeypatch, "--checkpoints", str(tmp_path / "new"))
    assert (found.begin, found.run) == (None, "run-0001")
    assert list(tmp_path.iterdir()) == []
