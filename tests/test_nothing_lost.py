"""Nothing that is saved is lost, or mixed with what another run saves."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import grade_submissions
import make_submission
import plan
import prepare_data
import pytest
import search_schedule
import torch
from ranks import run_on_ranks
from saved_models import save_library_model, write_model

from course.failed_run import RunFailed
from course.launch import ROOT
from extensions.pretraining import token_writer
from extensions.pretraining.metrics import Metrics
from extensions.pretraining.token_writer import check_folder
from extensions.real_models import saved_output
from files import outputs
from files.claims import LOCK, ClaimError, NewFolder, lock_folder
from files.inputs import InputError
from guard.paths import check_file
from pipeline.data import DEFAULT_TEXT
from pipeline.model import ModelConfig
from pipeline.training import write_losses

PREPARE = [sys.executable, ROOT / "source_code" / "prepare_data.py", "--data", DEFAULT_TEXT]


def rejected(main, capsys, monkeypatch, *words):
    """The one sentence of a script that ends with status 2."""
    monkeypatch.setattr(sys, "argv", [f"{main.__module__}.py", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


# A folder is claimed once.


def test_a_new_folder_is_one_job_s_until_it_is_released(tmp_path):
    folder = tmp_path / "new"
    first = NewFolder("--save", folder)
    with pytest.raises(ClaimError, match="another job is saving there"):
        NewFolder("--save", folder)
    (folder / "model").touch()
    first.release()
    with pytest.raises(ClaimError, match="something is already there"):
        NewFolder("--save", folder)
    first.give_up(["model"])  # at the end of the process, too late
    assert [path.name for path in folder.iterdir()] == ["model"]  # and no lock of whom it rejects


def test_who_gives_up_removes_what_is_theirs_and_nothing_else(tmp_path):
    made, found = tmp_path / "made", tmp_path / "found"
    found.mkdir()
    for folder in (made, found):
        claimed = NewFolder("--save", folder)
        (folder / "model").touch()
        claimed.give_up(["model", "never made"])
    assert not made.exists() and list(found.iterdir()) == []
    claimed = NewFolder("--save", made)
    (made / "somebody's").touch()
    claimed.give_up()
    assert [path.name for path in made.iterdir()] == ["somebody's"]


def test_a_link_in_the_place_of_a_claimed_folder_leads_to_no_loss_elsewhere(tmp_path, capsys):
    new, other = tmp_path / "new", tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("of another training")
    running = lock_folder("--save", other)[0]
    for end in ("release", "give_up", "save"):
        claimed = NewFolder("--save", new)
        shutil.rmtree(new)
        new.symlink_to(other)
        assert claimed.is_exchanged()
        if end == "release":
            claimed.release()
        if end == "give_up":
            claimed.give_up(["config.json"])
        if end == "save":
            job = SimpleNamespace(rank=0, num_ranks=1)
            arguments = SimpleNamespace(claimed=claimed, torch_dtype=torch.float32)
            arguments.saved = SimpleNamespace(config={}, settings=None)
            saved_output.save_trained(arguments, job, {}, "--save", new, None)
            assert "another folder has this name" in capsys.readouterr().err
            assert saved_output.not_written.pop() == "--save"
        assert sorted(os.listdir(other)) == ["config.json", LOCK]
        new.unlink()
    running.close()


def test_a_folder_that_has_nothing_but_another_job_s_claim_is_that_job_s(tmp_path):
    new = tmp_path / "new"
    first = NewFolder("--save", new)
    shutil.rmtree(new)
    second = NewFolder("--save", new)
    assert first.is_exchanged() and not second.is_exchanged()
    (new / "model").touch()
    first.renew("--save")
    with pytest.raises(ClaimError, match="another folder has this name"):
        first.check("--save")
    first.give_up(["model"])
    second.check("--save", "config.json")
    with pytest.raises(ClaimError, match="model is a file of another program, so"):
        second.check("--save", "model")


def test_a_claimed_folder_that_somebody_has_removed_is_claimed_again(tmp_path):
    first = NewFolder("--save", tmp_path / "new")
    shutil.rmtree(tmp_path / "new")
    with pytest.raises(ClaimError, match="another folder has this name by now, or none has"):
        first.check("--save")
    first.renew("--save")
    first.check("--save")
    with pytest.raises(ClaimError, match="another job is saving there"):
        NewFolder("--save", tmp_path / "new")


@pytest.mark.parametrize("end", ["release", "give_up"])
def test_a_folder_that_somebody_has_replaced_is_theirs(tmp_path, end):
    claimed = NewFolder("--save", tmp_path / "new")
    shutil.rmtree(tmp_path / "new")
    (tmp_path / "new").write_text("theirs")
    getattr(claimed, end)()
    assert (tmp_path / "new").read_text() == "theirs"


def test_the_lock_of_a_job_that_was_killed_is_in_nobody_s_way(tmp_path):
    (tmp_path / LOCK).touch()
    NewFolder("--save", tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_which_no_lock_can_be_opened_is_rejected_with_the_flag(tmp_path):
    (tmp_path / LOCK).symlink_to(tmp_path / LOCK)  # as root, whom umask 777 does not stop
    with pytest.raises(ClaimError, match="^--save .*: lock cannot be opened there"):
        lock_folder("--save", tmp_path)


def test_without_locks_the_folder_is_whose_lock_file_is_new(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    first = NewFolder("--save", tmp_path)
    with pytest.raises(ClaimError, match="if no other job saves there, remove"):
        NewFolder("--save", tmp_path)
    first.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_of_two_that_prepare_data_for_one_folder_one_does_and_one_says_why_not(tmp_path):
    both = [
        subprocess.Popen([*PREPARE, "--out", tmp_path / "tokens"], stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=60)[1].decode() for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], said
    (sentence,) = filter(None, said)
    assert "another job is saving there" in sentence or "already there" in sentence
    check_folder(tmp_path / "tokens")


def test_prepare_data_that_fails_leaves_what_is_not_its_own(tmp_path, monkeypatch, capsys):
    out, words = tmp_path / "tokens", ["--data", DEFAULT_TEXT, "--out"]
    held = NewFolder("--out", out)
    (sentence,) = [rejected(prepare_data.main, capsys, monkeypatch, *words, out)]
    assert "another job is saving there" in sentence
    held.give_up()

    def fail(folder, *rest):
        (folder / "notes").write_text("somebody's")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepare_data, "write_tokens_file", fail)
    assert "No space left" in rejected(prepare_data.main, capsys, monkeypatch, *words, out)
    assert [path.name for path in out.iterdir()] == ["notes"]


def test_tokens_are_not_finished_in_another_folder_that_gets_the_name(
    tmp_path, monkeypatch, capsys
):
    out, other = tmp_path / "tokens", tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text("somebody's")
    end = prepare_data.TokenWriter.end_document

    def exchange(writer):
        if other.exists():
            out.rename(tmp_path / "moved")
            other.rename(out)
        return end(writer)

    monkeypatch.setattr(prepare_data.TokenWriter, "end_document", exchange)
    words = "--vocabulary", "300", "--data", DEFAULT_TEXT, "--out", out
    assert "another folder has this name" in rejected(
        prepare_data.main, capsys, monkeypatch, *words
    )
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [
        ("tokenizer.json", "somebody's")
    ]


@pytest.mark.parametrize("last", ["close_file", "digest_of_tokenizer"])
@pytest.mark.parametrize("change", ["exchange", "add"])
def test_the_last_files_of_tokens_replace_nobody_s(tmp_path, monkeypatch, capsys, last, change):
    out, other = tmp_path / "tokens", tmp_path / "other"
    other.mkdir()
    theirs = ["tokens.json"] + ["tokenizer.json"] * (change == "exchange" or last == "close_file")
    for name in theirs:
        (other / name).write_text("somebody's")
    place = token_writer if last == "digest_of_tokenizer" else token_writer.TokenWriter
    call = getattr(place, last)

    def changed(*given):
        result = call(*given)
        if (out / "held_out-ends.bin").exists():
            if change == "exchange":
                out.rename(tmp_path / "moved")
                other.rename(out)
            else:
                shutil.copytree(other, out, dirs_exist_ok=True)
        return result

    monkeypatch.setattr(place, last, changed)
    words = "--vocabulary", "300", "--data", DEFAULT_TEXT, "--out", out
    said = rejected(prepare_data.main, capsys, monkeypatch, *words)
    assert "another folder has this name" in said or "is a file of another program" in said
    assert {path.name: path.read_text() for path in out.iterdir()} == dict.fromkeys(
        theirs, "somebody's"
    )


def test_no_tokens_are_made_of_a_text_that_changes_while_it_is_read(tmp_path):
    text = tmp_path / "text"
    text.write_text("one\n\n" * 100_000)
    documents = prepare_data.documents_of_text(text)
    assert next(documents) == "one"
    os.truncate(text, 100)
    with pytest.raises(InputError, match="has changed while it was read"):
        list(documents)


def test_a_command_to_copy_has_a_name_with_a_space_in_quotes(tmp_path, monkeypatch, capsys):
    out, csv = tmp_path / "my tokens", tmp_path / "my order.csv"
    words = ["prepare_data.py", "--data", str(DEFAULT_TEXT), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    assert prepare_data.main() == 0
    assert str(out) in shlex.split(capsys.readouterr().out)
    sizes = "--ranks 2 --microbatches 2 --seconds 1 --csv".split()
    monkeypatch.setattr(sys, "argv", ["search_schedule.py", *sizes, str(csv)])
    assert search_schedule.main() == 0
    assert shlex.split(capsys.readouterr().out)[-1] == str(csv)


@pytest.mark.parametrize(("given", "out"), [("/", "/"), ("//", "/"), ("a/", "a"), ("a b//", "a b")])
def test_a_slash_at_the_end_names_the_same_folder(monkeypatch, given, out):
    monkeypatch.setattr(sys, "argv", ["prepare_data.py", "--data", "text", "--out", given])
    assert prepare_data.read_flags().out == out


@pytest.mark.further
@pytest.mark.processes
@pytest.mark.parametrize("where", [">&-", ">/dev/full"])
def test_tokens_stay_when_the_last_line_cannot_be_printed(tmp_path, where):
    words = ["sh", "-c", f'exec "$@" {where}', "sh", *PREPARE, "--out", tmp_path / "tokens"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60)
    check_folder(tmp_path / "tokens")
    assert "Traceback" not in ended.stderr


def fine_tune(rank, model, out):
    """On a rank: the status of a run that saves into `out`."""
    import finetune

    sizes = "--steps 1 --seq-len 16 --batch-size 4 --microbatches 2 --device cpu"
    sys.argv = ["finetune.py", "--model", model, "--save", out, *sizes.split()]
    return finetune.main()


def test_a_second_fine_tuning_into_one_folder_ends_before_it_trains(tmp_path):
    model, out = save_library_model(tmp_path / "model", "llama"), tmp_path / "out"
    lock, _ = lock_folder("--save", out)
    with pytest.raises(RunFailed, match="--save .* another job is saving there"):
        run_on_ranks(fine_tune, 2, str(model), str(out))
    assert [path.name for path in out.iterdir()] == [LOCK]
    lock.close()  # as if the first had been killed
    assert run_on_ranks(fine_tune, 2, str(model), str(out)) == [0, 0]
    assert LOCK not in os.listdir(out) and "config.json" in os.listdir(out)
    with pytest.raises(RunFailed, match="something is already there"):
        run_on_ranks(fine_tune, 2, str(model), str(out))


def fine_tune_apart(rank, model, folder):
    """On a rank: `fine_tune` into a folder that the ranks do not share."""
    os.chdir(f"{folder}/{rank}")
    return fine_tune(rank, model, "new")


@pytest.mark.parametrize("made", [[], ["0/new", "1/new"]])
def test_a_folder_that_the_ranks_do_not_share_is_rejected_before_the_training(tmp_path, made):
    model = save_library_model(tmp_path / "model", "llama")
    for name in ("0", "1", *made):
        (tmp_path / name).mkdir()
    sentence = "--save new: rank 1 does not see the folder that rank 0 has made; name one"
    with pytest.raises(RunFailed, match=sentence) as ended:
        run_on_ranks(fine_tune_apart, 2, str(model), str(tmp_path))
    assert "step 0" not in str(ended.value)
    left = [str(path.relative_to(tmp_path)) for path in tmp_path.glob("[01]/**/*")]
    assert sorted(left) == made


def fine_tune_beside(rank, model, out, name):
    """On a rank: `fine_tune`, where somebody makes the file `name` in `out` before the save."""
    save = saved_output.save_model

    def made(*given):
        if rank == 0:
            (Path(out) / name).write_text("somebody's")
        return save(*given)

    saved_output.save_model = made
    return fine_tune(rank, model, out)


@pytest.mark.parametrize("name", ["config.json", "model-00002-of-00002.safetensors"])
def test_a_model_is_not_mixed_with_the_file_of_another_program(tmp_path, name):
    model, out = save_library_model(tmp_path / "model", "llama"), tmp_path / "out"
    assert run_on_ranks(fine_tune_beside, 2, str(model), str(out), name) == [1, 1]
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [(name, "somebody's")]


def test_a_tokenizer_of_another_program_stays_and_does_not_cost_the_model(tmp_path):
    beside, out = tmp_path / "model", tmp_path / "out"
    for folder in (beside, out):
        folder.mkdir()
        (folder / "merges.txt").write_text(folder.name)
    said = saved_output.finish_folder("--save", out, {}, beside, [])
    assert said.endswith("out has the model alone: merges.txt is a file of another program")
    assert (out / "merges.txt").read_text() == "out" and (out / "config.json").exists()


def convert_exchanged(rank, flags, place=None, name=None, out=None, other=None):
    """On a rank: convert.py's status; `other` gets the name `out` before a call of `name`."""
    import convert

    if name:
        place = {"convert": convert.Checkpoints, "saved_output": saved_output}[place]
        call = getattr(place, name)

        def exchanged(*given):
            if os.path.exists(other):
                os.rename(out, f"{out}-moved")
                os.rename(other, out)
            return call(*given)

        setattr(place, name, exchanged)
    sys.argv = ["convert.py", *flags]
    try:
        return convert.main()
    except SystemExit as ended:
        return ended.code


def test_a_conversion_leaves_what_another_program_has_saved_under_the_name(tmp_path):
    model, new, other = write_model(tmp_path / "model"), tmp_path / "new", tmp_path / "other"
    names = "run-0001/step-00000000/checkpoint.json", "config.json", "model.safetensors"
    bring_in = ["--from-hf", str(model), "--checkpoints"]
    assert run_on_ranks(convert_exchanged, 1, [*bring_in, f"{tmp_path}/saved"]) == [0]
    take_out = ["--checkpoints", f"{tmp_path}/saved", "--to-hf"]
    for flags, place, name in (
        (bring_in, "convert", "begin_writing"),
        (take_out, "saved_output", "not_finite"),
        (take_out, "saved_output", "finish_folder"),
    ):
        for each in names:
            (other / each).parent.mkdir(parents=True, exist_ok=True)
            (other / each).write_text("somebody's")
        words = [*flags, str(new)], place, name, str(new), str(other)
        assert run_on_ranks(convert_exchanged, 1, *words) in ([1], [2])
        left = [path for path in new.rglob("*") if path.is_file()]
        assert sorted(str(path.relative_to(new)) for path in left) == sorted(names), name
        assert {path.read_text() for path in left} == {"somebody's"}, name
        shutil.rmtree(new)
        shutil.rmtree(f"{new}-moved")


# No output replaces an input, or a better output.


def test_plan_does_not_save_a_machine_over_the_model(tmp_path, monkeypatch, capsys):
    model = tmp_path / "config.json"
    model.write_text("{}")
    words = ["--this-machine", "--save"]
    for name in (model, tmp_path):
        said = rejected(plan.main, capsys, monkeypatch, name, *words, model)
        assert said.startswith("--save") and model.read_text() == "{}"
    said = rejected(plan.main, capsys, monkeypatch, "llama-3-8b", *words, tmp_path / "no" / "m")
    assert "does not exist; make it first" in said


def test_search_schedule_does_not_write_over_the_timeline_that_it_reads(
    tmp_path, monkeypatch, capsys
):
    file = tmp_path / "t.json"
    file.write_text("{}")
    words = ["--timeline", file, "--csv", file]
    said = rejected(search_schedule.main, capsys, monkeypatch, *words)
    assert "name the same file" in said and file.read_text() == "{}"


def test_a_submission_of_no_lesson_replaces_none(monkeypatch, capsys):
    said = rejected(make_submission.main, capsys, monkeypatch, "99")
    assert "99 is not a lesson; the lessons are 00 01" in said


def test_the_old_table_stays_when_the_new_one_cannot_be_written(tmp_path, monkeypatch, capsys):
    (tmp_path / "grades.csv").write_text("old")
    (tmp_path / "a.json").write_text(json.dumps({"form": make_submission.FORM}))

    def full(handle):
        raise OSError(28, "No space left on device", str(tmp_path))

    monkeypatch.setattr(outputs.os, "fsync", full)
    monkeypatch.setattr(sys, "argv", ["grade_submissions.py", str(tmp_path)])
    with pytest.raises(SystemExit):
        grade_submissions.main()
    assert "No space left on device" in capsys.readouterr().err
    assert (tmp_path / "grades.csv").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["a.json", "grades.csv"]


@pytest.mark.parametrize("name", ["grades.csv", "grades.html"])
@pytest.mark.parametrize("obstacle", ["link", "folder"])
def test_no_table_goes_over_a_submission_or_without_the_other(
    tmp_path, monkeypatch, capsys, name, obstacle
):
    submission, other = tmp_path / "a.json", {"grades.csv": "html", "grades.html": "csv"}[name]
    submission.write_text(json.dumps({"form": make_submission.FORM}))
    (tmp_path / f"grades.{other}").write_text("old")
    if obstacle == "link":
        (tmp_path / name).symlink_to("a.json")
    else:
        (tmp_path / name).mkdir()
    before = submission.read_text()
    said = rejected(grade_submissions.main, capsys, monkeypatch, tmp_path)
    assert f"{tmp_path / name} " in said and said.endswith("name another folder")
    assert submission.read_text() == before and (tmp_path / f"grades.{other}").read_text() == "old"
    assert len(os.listdir(tmp_path)) == 3


# A log belongs to one run.


def log_of(path, continues=False):
    return Metrics(None, path, ModelConfig(), torch.float64, True, continues, peak=1e9)


def test_no_output_of_another_run_replaces_a_log_that_is_being_written(tmp_path, capsys):
    log = tmp_path / "log"
    metrics = log_of(log)
    with pytest.raises(SystemExit, match="--losses .*log: another run is writing it; name another"):
        check_file("--losses", log)
    metrics.write(step=1)
    with pytest.raises(OSError, match="another run is writing it"):
        outputs.write_whole(log, "lost")
    outputs.write_output("--timeline", log, "lost")
    assert "another run is writing it" in capsys.readouterr().err
    outputs.not_written.clear()
    assert log.read_text() == '{"step": 1}\n' and os.listdir(tmp_path) == ["log"]
    metrics.claim.close()
    check_file("--losses", log)
    assert write_losses(log, {0: 1.0})


@pytest.mark.parametrize("continues", [False, True])
def test_a_log_that_is_moved_goes_on_where_it_is_and_not_in_that_of_another_run(
    tmp_path, capsys, continues
):
    log, old = tmp_path / "log", tmp_path / "old"
    first = log_of(log)
    first.write(step=1)
    os.rename(log, old)
    second = log_of(log, continues)
    for step in (2, 3):
        first.write(step=step)
        second.write(step=10 * step)
    assert old.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'
    assert log.read_text() == '{"step": 20}\n{"step": 30}\n'
    assert capsys.readouterr().err.count("has been moved; the log continues") == 1
    assert first.is_whole and not outputs.not_written


def test_a_log_that_is_removed_or_replaced_is_missing_at_the_end(tmp_path, capsys):
    log = tmp_path / "log"
    first = log_of(log)
    log.unlink()
    log.write_text("of another")
    for step in (1, 2):
        first.write(step=step)
    assert capsys.readouterr().err.count("removed or replaced") == 1 and not first.is_whole
    assert log.read_text() == "of another" and outputs.not_written == ["--metrics"]
    outputs.not_written.clear()


def test_a_link_that_comes_after_the_check_of_an_output_is_replaced(tmp_path):
    data, losses, before = (tmp_path / name for name in ("data", "losses", "before"))
    data.write_text("kept")
    before.symlink_to("there")
    for name in (losses, before):
        check_file("--losses", name)
    losses.symlink_to("data")
    (tmp_path / "there").symlink_to("data")
    for name in (losses, before):
        outputs.write_whole(name, "new")
        assert name.read_text() == "new"
    assert data.read_text() == "kept" and before.is_symlink() and not losses.is_symlink()
