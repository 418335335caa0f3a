"""Nothing wrong is saved, read or counted in silence."""

import argparse
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext as does
from pathlib import Path
from types import SimpleNamespace

import convert
import finetune
import grade_submissions
import inference
import nbformat
import prepare_data
import pretrain_llama
import pytest
import tokenizers
import torch
import wall
from exercises import read_notebooks
from further import first_of, further
from ranks import run_on_ranks
from saved_models import write_model

from course import launch, progress
from extensions.checkpointing import checkpoint, checkpoint_folder
from extensions.checkpointing.checkpoint_folder import CheckpointError
from extensions.inference import saved_model
from extensions.pretraining import metrics
from extensions.pretraining.token_files import load_tokens
from extensions.pretraining.tokens import Corpus, read_tokenizer
from extensions.real_models import saved_output
from extensions.real_models.saved_folder import read_model
from extensions.real_models.saved_settings import read_settings
from extensions.real_models.tensor_files import stored_tensors, write_tensors
from files.inputs import InputError
from files.outputs import write_whole
from guard import meeting
from guard.launcher import LauncherError
from lab.flight_log import FlightLog
from lab.flight_log_reader import RUN_FILE
from pipeline.data import DataError
from pipeline.job import Job, join_job
from pipeline.model import ModelConfig
from pipeline.schedules import build_schedule


def diverge(rank, model, out, value):
    """On a rank: a fine-tuning run, one of whose weights on rank 1 becomes `value`."""
    import sys

    import finetune

    from extensions.real_models import saved_output

    save = saved_output.save_model

    def damaged(job, flag, folder, config, parts, *rest):
        if job.rank == 1:
            next(parts[0].parameters()).data.view(-1)[3] = value
        return save(job, flag, folder, config, parts, *rest)

    saved_output.save_model = damaged
    sizes = "--steps 1 --seq-len 16 --batch-size 4 --microbatches 2 --device cpu"
    sys.argv = ["finetune.py", "--model", model, "--save", out, *sizes.split()]
    return finetune.main()


@pytest.mark.parametrize("value", first_of([float("nan"), -float("inf")], 1))
def test_a_model_with_a_value_that_is_not_a_number_is_not_saved(tmp_path, value):
    model, out = write_model(tmp_path / "model"), tmp_path / "out"
    assert run_on_ranks(diverge, 2, str(model), str(out), value) == [1, 1]
    assert not out.exists()


def test_layers_that_config_json_does_not_count_are_named(tmp_path):
    folder = write_model(tmp_path / "model")
    read_model(folder, 8)
    (file,) = folder.glob("*.safetensors")
    tensors = {name: stored.read() for name, stored in stored_tensors(file).items()}
    last = max(name for name in tensors if "layers.1." in name)
    tensors[last.replace("layers.1.", "layers.12.")] = tensors[last]
    write_tensors(file, tensors)
    with pytest.raises(InputError, match=r"has the tensor model.layers.12.* the 4 layers of"):
        read_model(folder, 8)


@pytest.mark.parametrize("value", [0.1, 1, "0.1", [0], True])
def test_a_dropout_that_the_layers_do_not_have_is_rejected(tmp_path, value):
    folder = write_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    for given in (0, 0.0, None):
        (folder / "config.json").write_text(json.dumps({**config, "attention_dropout": given}))
        read_settings(folder, 8)
    (folder / "config.json").write_text(json.dumps({**config, "attention_dropout": value}))
    with pytest.raises(InputError, match="attention_dropout is .* attention has none"):
        read_settings(folder, 8)


# A room.


def notebook(path, answer, check="puzzle(1, rows_1)"):
    source = f"from course.checks import lesson_12 as check\n\ncheck.{check}"
    cells = [nbformat.v4.new_code_cell(text) for text in (answer, source)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)


@pytest.mark.parametrize(
    "copy", ["12_small-Copy1", "12_small_backup", "Copy of 12_small", "a_12_small"]
)
def test_a_copy_of_a_notebook_does_not_count_in_place_of_it(tmp_path, copy):
    notebook(tmp_path / "12_small.ipynb", "rows_1 = 1")
    notebook(tmp_path / f"{copy}.ipynb", "rows_1 = ...")
    notebook(tmp_path / "13_other.ipynb", "rows_2 = ...", "puzzle(2, rows_2)")
    found, skipped = read_notebooks(tmp_path)
    assert [path.name for path in found] == ["12_small.ipynb", "13_other.ipynb"]
    assert skipped == [f"{copy}.ipynb has exercises of 12_small.ipynb, which counts"]


def test_the_course_s_own_notebooks_have_each_exercise_once():
    found, skipped = read_notebooks()
    names = [exercise.name for exercises in found.values() for exercise in exercises]
    assert skipped == [] and len(found) > 20 and len(names) > 60


def test_of_two_answers_to_an_exercise_the_right_one_is_marked():
    answers = [{"exercise": "a", "said": said} for said in ("Not yet: 1", "Right: 1", "hm")]
    assert grade_submissions.marks_of({"answers": answers}) == {"a": "right"}


def test_progress_can_be_read_by_the_wall_whatever_the_umask(tmp_path, monkeypatch):
    monkeypatch.setenv(progress.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv(progress.NAME_VARIABLE, "ada")
    before = os.umask(0o077)
    try:
        progress.note("puzzle 1", progress.RIGHT)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "ada.jsonl").stat().st_mode) == 0o644


@pytest.mark.parametrize("name", ["progres", "x" * 5000])
def test_a_mistyped_folder_of_progress_is_named_and_not_made(tmp_path, monkeypatch, capsys, name):
    monkeypatch.setattr(progress, "told", set())
    monkeypatch.setenv(progress.FOLDER_VARIABLE, str(tmp_path / name))
    progress.note("puzzle 1", progress.RIGHT)
    said = capsys.readouterr().err
    assert said.startswith("Your progress is not noted: COURSE_PROGRESS") and said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_wall_shows_known_exercises_only_and_follows_no_link(tmp_path):
    secret, room = tmp_path / "secret.jsonl", tmp_path / "room"
    room.mkdir()
    line = '{"exercise": "EXERCISE", "outcome": "right", "time": 1.0}\n'
    secret.write_text(line.replace("EXERCISE", "puzzle 1"))
    (room / "link.jsonl").symlink_to(secret)
    names = "".join(line.replace("EXERCISE", f"word {number}") for number in range(40_000))
    (room / "bob.jsonl").write_text(names + line.replace("EXERCISE", "puzzle 1"))
    people, skipped = progress.read_progress(room)
    assert skipped == ["link.jsonl is a link, which is not followed"]
    known = wall.with_known(people, {"puzzle 1": "12"})
    assert {name: len(records) for name, records in known.items()} == {"bob": 1}
    assert wall.with_known(people, {"puzzle 2": "12"}) == {}


# Tokens of another tokenizer whose vocabulary is as large.


def tokenizer_with(path, words):
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, words[0])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return path


def tokens_made_with(folder, tokenizer, monkeypatch):
    (folder / "text").write_text("one two three\n\n" * 40)
    words = f"prepare_data.py --data {folder}/text --out {folder}/tokens"
    monkeypatch.setattr("sys.argv", [*words.split(), *tokenizer])
    assert not prepare_data.main()
    return folder / "tokens"


def test_tokens_of_another_tokenizer_of_the_same_size_are_rejected(tmp_path, monkeypatch):
    one = tokenizer_with(tmp_path / "one.json", ["?", "one", "two", "three"])
    other = tokenizer_with(tmp_path / "other.json", ["?", "one", "three", "two"])
    tokens = tokens_made_with(tmp_path, ["--tokenizer", str(one)], monkeypatch)
    assert load_tokens(tokens, 4, 4, tokenizer_of_model=one).num_tokens == 4
    with pytest.raises(DataError, match="token 2 is 'two' there and 'three' here"):
        load_tokens(tokens, 4, 4, tokenizer_of_model=other)
    fewer = tokenizer_with(tmp_path / "fewer.json", ["?", "one"])
    with pytest.raises(DataError, match="token 2 is 'two' there and nothing here"):
        load_tokens(tokens, 4, 4, tokenizer_of_model=fewer)


def test_a_trained_model_neither_goes_out_nor_speaks_with_another_tokenizer_of_the_same_size(
    tmp_path, monkeypatch
):
    names = ["?", "one", "two", "three", *(f"more{number}" for number in range(252))]
    folders = {"one": tmp_path / "one", "other": tmp_path / "other"}
    for name, words in (("one", names), ("other", [*names[:2], "three", "two", *names[4:]])):
        folders[name].mkdir()
        tokenizer_with(folders[name] / "tokenizer.json", words)
    one = ["--tokenizer", str(folders["one"] / "tokenizer.json")]
    tokens = tokens_made_with(tmp_path, one, monkeypatch)
    sizes = "--layers 2 --dim 8 --heads 2 --kv-heads 1 --seq-len 4 --batch-size 8 --steps 1"
    saved = f"--checkpoints {tmp_path / 'saved'}"
    launch.run(f"pretrain_llama.py {sizes} {saved} --data {tokens}", 1, warm=True, show=False)
    for name, folder in folders.items():
        words = f"convert.py {saved} --to-hf {tmp_path / f'to {name}'} --tokenizer {folder}"
        monkeypatch.setattr("sys.argv", words.replace("to ", "to-").split())
        with pytest.raises(SystemExit, match="has other tokens") if name == "other" else does():
            assert not convert.take_out(convert.read_flags())
        words = f"inference.py {saved} --tokenizer {folder / 'tokenizer.json'} --seq-len 4"
        monkeypatch.setattr("sys.argv", words.split())
        with pytest.raises(SystemExit, match="name that one") if name == "other" else does():
            inference.read_flags()
    monkeypatch.setattr("sys.argv", f"inference.py {saved} --seq-len 4".split())
    with pytest.raises(
        SystemExit, match="name that one"
    ):  # the model has 256 tokens, but they are not bytes
        inference.read_flags()


def test_a_model_that_comes_in_with_a_tokenizer_learns_only_its_tokens(tmp_path, monkeypatch):
    names = ["?", "one", "two", "three", *(f"more{number}" for number in range(252))]
    folder = write_model(tmp_path / "model", layers=2)
    own = tokenizer_with(folder / "tokenizer.json", names)
    other = tokenizer_with(tmp_path / "tokenizer.json", [*names[:2], "three", "two", *names[4:]])
    words = f"convert.py --from-hf {folder} --checkpoints {tmp_path / 'saved'}"
    said = launch.run(words, 1, warm=True, show=False).output
    assert f"prepare_data.py --data TEXT --tokenizer {own} --out TOKENS" in said
    sizes = re.search("continue with pretrain_llama.py (.*) --data TOKENS", said)[1].split()
    flags = ["pretrain_llama.py", *sizes, "--seq-len", "8", "--batch-size", "8"]
    monkeypatch.setattr("sys.argv", flags)  # with a text, whose tokens are bytes
    with pytest.raises(SystemExit, match="make tokens with the same tokenizer"):
        pretrain_llama.read_flags()
    for made_with in own, other:
        tokens = tokens_made_with(made_with.parent, ["--tokenizer", str(made_with)], monkeypatch)
        monkeypatch.setattr("sys.argv", [*flags, "--data", str(tokens)])
        wrong = pytest.raises(SystemExit, match="make tokens with the same tokenizer")
        with wrong if made_with == other else does():
            assert pretrain_llama.read_flags()[0].begin.step == 0


def test_a_tokenizer_that_changes_during_the_training_is_not_saved_with_the_model(
    tmp_path, monkeypatch, capsys
):
    file = tokenizer_with(tmp_path / "tokenizer.json", ["?", "one", "two"])
    text = Corpus(None, None, read_tokenizer(file))
    saved = SimpleNamespace(config={}, settings=None)
    claimed = SimpleNamespace(release=lambda: None)
    arguments = SimpleNamespace(claimed=claimed, saved=saved, torch_dtype=torch.float64, text=text)
    found = []
    monkeypatch.setattr(saved_output, "save_model", lambda *given: found.append(given[6]) or True)
    monkeypatch.setattr(saved_output, "not_written", [])
    save = (arguments, None, {}, "--save", "out", str(tmp_path))
    saved_output.save_trained(*save)
    tokenizer_with(file, ["?", "two", "one"])
    saved_output.save_trained(*save)
    assert found == [str(tmp_path), None] and saved_output.not_written == ["--save"]
    assert "the model alone: the tokenizer in" in capsys.readouterr().err


def test_bytes_are_not_the_tokens_of_a_model_with_a_tokenizer(tmp_path, monkeypatch, capsys):
    tokens = tokens_made_with(tmp_path, [], monkeypatch)
    folder = write_model(tmp_path / "model", layers=2)
    flags = f"finetune.py --model {folder} --data {tokens} --seq-len 8 --batch-size 8".split()
    monkeypatch.setattr("sys.argv", flags)
    assert finetune.read_flags()[0].text.num_tokens == 256  # the model has none
    tokenizer_with(folder / "tokenizer.json", ["?", "one"])
    for program in (finetune, inference):
        name = [f"{program.__name__}.py", "--model", str(folder), "--data", str(tokens)]
        monkeypatch.setattr("sys.argv", [*name, "--seq-len", "8"])
        with pytest.raises(SystemExit) as ended:
            program.read_flags()
        assert "another tokenizer than" in str(ended.value) and "is a byte" in str(ended.value)


# At the same time.


def test_a_job_that_looked_before_another_saved_does_not_mix_its_run_with_the_other(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(checkpoint.dist, "new_group", lambda **_: None)
    monkeypatch.setattr(checkpoint.Checkpoints, "first", lambda self, problem: problem)
    job = Job(0, 1, torch.device("cpu"), "gloo", 1.0)
    second = checkpoint_folder.Checkpoint(tmp_path, "run-0001", 2, {"files": {}})

    def told(run, begin):
        checkpoints = checkpoint.Checkpoints(job, tmp_path, run, begin)
        problem = checkpoints.prepare()
        checkpoints.claim.close()
        return problem

    assert told("run-0001", None) is None
    for step in (1, 2):
        (tmp_path / "run-0001" / f"step-0000000{step}").mkdir(parents=True)
    assert told("run-0001", second) is None and told("run-0002", second) is None
    (tmp_path / "run-0001" / "step-00000003").mkdir()
    for begin in (None, second):
        assert "another job has saved there meanwhile" in told("run-0001", begin)


def test_a_checkpoint_that_vanishes_while_it_is_looked_at_is_followed_by_the_next(monkeypatch):
    steps, looked = [[1], [1], [1, 2], [2], [2]], []

    def find(folder):
        looked.append(folder)
        if len(looked) == 1:
            raise CheckpointError("step 1 is damaged")
        return "step 2"

    monkeypatch.setattr(saved_model, "find_checkpoint", find)
    monkeypatch.setattr(saved_model, "current_run", lambda folder: "run-0001")
    monkeypatch.setattr(saved_model, "steps_of", lambda *_: steps[len(looked) * 2])
    assert saved_model.newest_checkpoint("folder") == "step 2"
    looked.clear()
    monkeypatch.setattr(saved_model, "steps_of", lambda *_: [1])
    with pytest.raises(CheckpointError, match="step 1 is damaged"):  # nothing newer: it is
        saved_model.newest_checkpoint("folder")


def test_a_checkpoint_that_vanishes_while_it_is_converted_is_followed_by_the_next(
    tmp_path, monkeypatch
):
    folder, read = tmp_path / "saved", convert.read_model_of
    flags = "--layers 4 --dim 16 --heads 2 --kv-heads 1 --seq-len 8 --steps 2 --save-every 1"
    launch.run(
        f"distributed_checkpointing.py {flags} --checkpoints {folder}", 1, warm=True, show=False
    )
    step_2, later = folder / "run-0001/step-00000002", tmp_path / "later"
    os.rename(step_2, later)

    def read_while_a_training_goes_on(checkpoint):
        if later.exists():
            os.rename(later, step_2)
            shutil.rmtree(checkpoint.path)
        return read(checkpoint)

    monkeypatch.setattr(convert, "read_model_of", read_while_a_training_goes_on)
    assert convert.read_newest(folder)[0].step == 2


def weights_while_checkpoints_go(rank, folder, gone):
    """In a rank of inference: the sum of its weights, where rank 1 finds the checkpoints `gone`."""
    job = join_job("cpu", pairs=[])
    arguments = argparse.Namespace(
        saved=checkpoint_folder.find_checkpoint(folder, 1), checkpoints=folder, model_folder=None,
        config=ModelConfig(4, 16, 2, 1, 8), seed=0, torch_dtype=torch.float64,
    )  # fmt: skip
    torch.distributed.barrier()
    if rank == 1:
        for step in gone:  # as a training removes them: at once
            path = Path(folder) / "run-0001" / f"step-{step:08}"
            os.rename(path, path.with_name(f".deleting-{path.name}"))
    part = saved_model.build_saved_part(arguments, 0, 4, "cpu", job)
    job.leave()
    return arguments.saved.step, sum(weight.sum().item() for weight in part.parameters())


def test_a_checkpoint_that_vanishes_while_weights_are_read_is_followed_by_the_next(tmp_path):
    folder = tmp_path / "saved"
    flags = "--layers 4 --dim 16 --heads 2 --kv-heads 1 --seq-len 8 --steps 2 --save-every 1"
    launch.run(
        f"distributed_checkpointing.py {flags} --checkpoints {folder}", 2, warm=True, show=False
    )
    both = run_on_ranks(weights_while_checkpoints_go, 2, str(folder), [1])
    assert both[0] == both[1] and both[0][0] == 2


def test_a_folder_without_checkpoints_has_none(tmp_path):
    assert saved_model.newest_checkpoint(tmp_path) is None
    assert checkpoint_folder.find_checkpoint(tmp_path) is None


def test_a_log_is_written_by_one_run_at_a_time(tmp_path):
    first = metrics.open_for_one(tmp_path / "log")
    with pytest.raises(InputError, match="--metrics .*log: another run is writing it"):
        metrics.open_for_one(tmp_path / "log")
    first.close()
    metrics.open_for_one(tmp_path / "log").close()
    assert metrics.open_for_one(tmp_path / "no" / "log") is None


def test_two_runs_that_found_a_folder_empty_are_not_both_recorded_there(tmp_path):
    def begin(name, ranks):
        return FlightLog(tmp_path, 0, build_schedule(name, ranks, 4), None, None)

    first = begin("gpipe", 2)
    before = (tmp_path / RUN_FILE).read_text()
    with pytest.raises(FileExistsError):
        begin("1f1b", 3)
    first.close()
    assert (tmp_path / RUN_FILE).read_text() == before


@further
@pytest.mark.processes
def test_a_folder_of_a_recording_that_changes_after_the_check_is_one_sentence(tmp_path):
    program = (
        "import errno, sys; from lab import attach; import gpipe\n"
        "def gone(*_): raise NotADirectoryError(errno.ENOTDIR, 'Not a directory')\n"
        "attach.FlightLog = gone; sys.exit(gpipe.main())"
    )
    words = ["--device", "cpu", "--steps", "1", "--record", tmp_path / "run"]
    ended = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=launch.SCRIPTS, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1
    assert ended.stderr.endswith("cannot be written (Not a directory); name another folder\n")


def test_a_file_that_several_write_at_once_is_whole_at_any_moment(tmp_path):
    """As the page of two walls, or --losses of two runs."""
    file, texts = tmp_path / "wall_data.js", [f"{letter}" * 50_000 for letter in "abcd"]
    write_whole(file, texts[0])

    def write(text):
        for _ in range(20):
            write_whole(file, text)
            assert file.read_text() in texts

    with ThreadPoolExecutor(len(texts)) as pool:
        list(pool.map(write, texts))
    assert os.listdir(tmp_path) == [file.name]


def test_an_address_that_no_name_server_knows_is_a_sentence(monkeypatch):
    monkeypatch.setattr(meeting, "GRACE", 0.0)
    with pytest.raises(LauncherError, match="MASTER_ADDR is 'nowhere.invalid', which cannot be"):
        meeting.check_known("nowhere.invalid")
    meeting.check_known("127.0.0.1")
