"""Killed at any moment of a save, a training run continues from a whole checkpoint, digit for digit.

Everything that a save does to the disk goes through a few calls: a rank is killed before each of
them in turn (after one is before the next). The run that is killed next is the restart of the one
that was killed before, so that each crash also meets what the crashes before it have left.
"""

import functools
import io
import os
import random
import re
import shlex
import shutil
import signal
import sys
from contextlib import ExitStack, redirect_stderr
from pathlib import Path
from unittest import mock

import distributed_checkpointing
import pytest
import torch.distributed.checkpoint.filesystem as dcp_files
from further import first_of, further
from ranks import run_on_ranks

from course.failed_run import RunFailed
from extensions.checkpointing import checkpoint, checkpoint_folder
from extensions.checkpointing.checkpoint_folder import CheckpointError, check_files, find_checkpoint
from extensions.checkpointing.checkpoint_reader import reason_of
from pipeline import training

SIZES = "--layers 4 --dim 8 --heads 2 --kv-heads 1 --seq-len 8 --batch-size 4 --microbatches 2"
FLAGS = f"script {SIZES} --optimizer adamw --device cpu --decay-steps 300 --timeout 20"
RANKS = 2
SAVING = "--save-every 1 --keep 1"
WRITES = (0, 1, 30)  # of the tensors that a rank writes: before the first, after it, in the middle


# On a rank: train, note each loss as it comes, and die at a call


class Calls:
    """Counts the calls that change the disk below `folder`, and kills this process before one."""

    def __init__(self, folder, fatal):
        self.folder, self.fatal = str(folder), fatal
        self.names = []
        self.writes = 0

    def happens(self, name, path):
        """Called before it happens; `path` is the file or folder that it is about."""
        if self.folder not in str(path):
            return
        if name == "write":
            self.writes += 1
            if self.writes - 1 not in WRITES:
                return
        call = f"{name} {os.path.relpath(path, self.folder)}"
        if len(self.names) == self.fatal:
            with open(f"{self.folder}.killed", "a") as file:
                file.write(call + "\n")
            os.kill(os.getpid(), signal.SIGKILL)
        self.names.append(call)

    def patched(self, module, name, path_of):
        original = getattr(module, name)

        def call(*arguments, **options):
            self.happens(name.strip("_").removesuffix("_item"), path_of(*arguments))
            return original(*arguments, **options)

        return mock.patch.object(module, name, call)

    def counted(self):
        """While this holds, calls are counted."""
        stack = ExitStack()
        for module, name, path_of in [
            (os, "mkdir", first_argument),
            (os, "rename", first_argument),
            (os, "replace", first_argument),
            (os, "fsync", name_of_handle),
            (shutil, "rmtree", first_argument),
            (dcp_files, "_write_item", name_of_stream),
        ]:
            stack.enter_context(self.patched(module, name, path_of))
        return stack


def first_argument(path, *rest):
    return path


def name_of_handle(handle):
    return os.readlink(f"/proc/self/fd/{handle}")


def name_of_stream(transforms, stream, *rest):
    return stream.name


def without_numbers(call):
    """The same name for the same call of every save."""
    return re.sub(r"latest\.\w{8}\b", "latest.new", re.sub(r"step-\d+(-\w{4}\b)?", "step", call))


def train(rank, folder, flags, victim=None, fatal=None):
    """Train; the losses go to a file one by one. Returns (exit status, the calls of its saves)."""
    calls = Calls(folder / "saved", fatal if rank == victim else None)
    add = distributed_checkpointing.LossLog.add

    def add_and_write(log, step, loss):
        add(log, step, loss)
        if log.has_loss:
            with open(folder / "losses", "a") as file:
                file.write(f"{step} {loss.item()!r}\n")

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", shlex.split(flags)))
        stack.enter_context(
            mock.patch.object(distributed_checkpointing.LossLog, "add", add_and_write)
        )
        stack.enter_context(calls.counted())
        return distributed_checkpointing.main(), calls.names


# In the test: start, let die, look, start again


def start(folder, flags, *rest):
    return run_on_ranks(train, RANKS, folder, f"{FLAGS} {flags}", *rest, timeout=60)


def losses_in(folder):
    rows = [line.split() for line in (folder / "losses").read_text().splitlines()]
    return [(int(step), float(loss)) for step, loss in rows]


@functools.cache
def undisturbed():
    """{step: loss} of a training run that nothing disturbs and that saves nothing."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        start(Path(folder), "--steps 300")
        return dict(losses_in(Path(folder)))


def check_folder(folder, before):
    """The newest checkpoint is whole and no older than `before`; returns its step."""
    newest = find_checkpoint(folder / "saved")
    check_files(newest, newest.description["files"])
    assert newest.step >= before
    return newest.step


def check_losses(folder):
    """Every loss that was printed, in all the runs, is that of the undisturbed training."""
    losses = losses_in(folder)
    assert losses and all(undisturbed()[step] == loss for step, loss in losses)
    return [step for step, _ in losses]


def check_that_it_ends(folder, how=""):
    """Started once more, the training ends well; nothing half-written is left."""
    step = check_folder(folder, 0)
    ended = start(folder, f"--checkpoints {folder / 'saved'} {SAVING} {how} --steps {step + 3}")
    assert [status for status, _ in ended] == [0] * RANKS
    assert check_losses(folder)[-1] == step + 2
    for run in checkpoint_folder.runs_of(folder / "saved"):
        names = checkpoint_folder.entries_of(folder / "saved" / run)
        assert all(name.startswith("step-") for name in names), names


def calls_of_a_save(folder, how):
    """The calls of each rank from the start of a continued run to the end of its first save."""
    flags = f"--checkpoints {folder / 'saved'} {SAVING} {how}"
    start(folder, f"{flags} --steps 1")
    (_, of_0), (_, of_1) = start(folder, f"{flags} --steps 2")
    return [of_0, of_1]


# The random moments below are half of them those of asynchronous saves.
@pytest.mark.parametrize(
    ("victim", "how"),
    [
        pytest.param(0, "", marks=further),
        pytest.param(0, "--asynchronous", marks=pytest.mark.soak),
        pytest.param(1, "", marks=pytest.mark.soak),
        pytest.param(1, "--asynchronous", marks=pytest.mark.soak),
    ],
)
def test_killed_before_each_call_of_a_save_it_continues_from_a_whole_checkpoint(
    tmp_path, how, victim
):
    names = calls_of_a_save(tmp_path, how)[victim]
    step = check_folder(tmp_path, 2)
    flags = f"--checkpoints {tmp_path / 'saved'} {SAVING} {how} --steps 300"
    # Up to the first call of the next save, that is after the last one of this; the restart removes
    # what is half-written, which is one call more.
    for fatal in range(len(names) + 2):
        with pytest.raises(RunFailed) as killed:
            start(tmp_path, flags, victim, fatal)
        assert "SIGKILL" in str(killed.value), killed.value
        step = check_folder(tmp_path, step)
        check_losses(tmp_path)
    killed_before = (tmp_path / "saved.killed").read_text().splitlines()
    assert {*map(without_numbers, names)} <= {*map(without_numbers, killed_before)}
    check_that_it_ends(tmp_path, how)


@further
def test_the_calls_of_a_save_are_the_writes_syncs_and_renames_in_this_order(tmp_path):
    """Each file and each folder is synced before the rename that depends on it.

    A kill cannot show that a sync is missing, since what a process has written outlives it in the
    memory of the machine; only a loss of power would. So the order itself is held.
    """
    of_0, of_1 = calls_of_a_save(tmp_path, "")
    new, own = "run-0001/.writing-step", "run-0001/.writing-step/__0_0.distcp"
    assert [*map(without_numbers, of_0)] == [
        *("mkdir .", f"mkdir {new}", "fsync run-0001", "fsync .", f"mkdir {new}"),
        *(f"write {own}", f"write {own}", f"write {own}", f"fsync {own}"),
        *(f"fsync {new}/.metadata.tmp", f"rename {new}/.metadata.tmp"),
        *(f"fsync {new}/checkpoint.json", f"fsync {new}", f"rename {new}", "fsync run-0001"),
        *("fsync .latest.new", "fsync .latest.new", "replace .latest.new", "fsync ."),
        *("rename run-0001/step", "rmtree run-0001/.deleting-step"),
    ]
    assert of_0[-2].endswith("step-00000001")  # the older one
    other = own.replace("__0", "__1")
    expected = [f"mkdir {new}", *[f"write {other}"] * 3, f"fsync {other}"]
    assert [*map(without_numbers, of_1)] == expected


@further
def test_killed_at_ten_random_moments_it_ends_with_the_losses_of_an_undisturbed_training(tmp_path):
    seed = int(os.environ.get("CRASH_SEED", random.randrange(10**6)))
    print(f"CRASH_SEED={seed}")
    chance = random.Random(seed)
    start(tmp_path, f"--checkpoints {tmp_path / 'saved'} {SAVING} --steps 1")
    undisturbed()
    step = 1
    for _ in range(10):
        how = chance.choice(["", "--asynchronous"])
        flags = f"--checkpoints {tmp_path / 'saved'} {SAVING} {how} --steps 300"
        victims = chance.choice([[0], [1], [0, 1]])
        with pytest.raises(RunFailed):
            run_on_ranks(
                train_and_be_killed,
                RANKS,
                *(tmp_path, f"{FLAGS} {flags}", victims, chance.uniform(0.0, 0.6)),
                timeout=60,
            )
        step = check_folder(tmp_path, step)
        check_losses(tmp_path)
    check_that_it_ends(tmp_path)


def train_and_be_killed(rank, folder, flags, victims, seconds):
    """Train until, some seconds after all ranks have met, a timer ends this process."""
    if rank in victims:
        join_job = training.join_job

        def join_and_set_timer(*arguments):
            job = join_job(*arguments)
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends it from outside of Python
            signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
            return job

        with mock.patch.object(training, "join_job", join_and_set_timer):
            return train(rank, folder, flags)
    return train(rank, folder, flags)


# Planted faults: what these tests are for


def test_a_save_without_the_other_name_is_found_half_written(tmp_path):
    """Written straight under its own name, a checkpoint can be found that is not whole."""
    start(tmp_path, f"--checkpoints {tmp_path / 'saved'} {SAVING} --steps 1")
    with pytest.raises(RunFailed):
        run_on_ranks(train_without_other_name, RANKS, tmp_path, timeout=60)
    with pytest.raises(CheckpointError, match="checkpoint.json is missing"):
        check_folder(tmp_path, 1)


def train_without_other_name(rank, folder):
    def begin_writing(where, run, step):
        path = Path(where) / run / checkpoint_folder.name_of_step(step)
        path.mkdir()
        return path

    with mock.patch.object(checkpoint, "begin_writing", begin_writing):
        flags = f"{FLAGS} --checkpoints {folder / 'saved'} {SAVING} --steps 3"
        return train(rank, folder, flags, victim=0, fatal=3)


# A disk that is full


def train_with_little_room(rank, folder, flags, limit):
    import resource

    sys.dont_write_bytecode = True  # Python would keep compiled modules that are cut off
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    said = []
    with mock.patch.object(
        checkpoint, "reason_of", lambda error: said.append(reason_of(error)) or said[-1]
    ):
        with redirect_stderr(io.StringIO()) as warned:
            return train(rank, folder, flags), "; ".join(said), warned.getvalue()


@pytest.mark.further
@pytest.mark.parametrize(
    ("how", "limit"),  # in bytes: at the first tensor; in the middle of them
    first_of([("", 60000), ("--asynchronous", 3000), ("", 3000), ("--asynchronous", 60000)], 2),
)
def test_a_full_disk_fails_the_save_in_a_sentence_and_training_and_older_ones_stay(
    tmp_path, how, limit
):
    flags = f"--checkpoints {tmp_path / 'saved'} --save-every 2 --keep 1 {how}"
    start(tmp_path, f"{flags} --steps 2")
    ended = run_on_ranks(
        train_with_little_room, RANKS, tmp_path, f"{FLAGS} {flags} --steps 5", limit, timeout=60
    )
    assert [status for (status, _), _, _ in ended] == [1, 1]
    assert all(said and "enforce fail" not in said for _, said, _ in ended)
    assert ["after 4 steps was NOT saved" in warned for _, _, warned in ended] == [True, False]
    assert check_folder(tmp_path, 2) == 2
    assert check_losses(tmp_path) == [0, 1, 2, 3, 4]
    assert checkpoint_folder.entries_of(tmp_path / "saved" / "run-0001") == ["step-00000002"]
    check_that_it_ends(tmp_path, how)


# Damage


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with the checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("whole")
    start(folder, f"--checkpoints {folder / 'saved'} --save-every 2 --keep 5 --steps 4")
    return folder / "saved"


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def change_one_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "file, damage, words",
    [
        ("__1_0.distcp", truncate, " bytes instead of "),
        ("__1_0.distcp", Path.unlink, "is missing"),
        ("__0_0.distcp", change_one_bit, "has changed since it was written (its checksum differs)"),
        ("__1_0.distcp", change_one_bit, "has changed since it was written (its checksum differs)"),
        (".metadata", change_one_bit, "has changed since it was written (its checksum differs)"),
        ("checkpoint.json", truncate, ""),
        ("checkpoint.json", Path.unlink, "is missing"),
    ],
)
def test_damage_gets_a_sentence_that_names_the_file_and_offers_the_checkpoint_before(
    whole, tmp_path, file, damage, words
):
    saved = tmp_path / "saved"
    shutil.copytree(whole, saved)
    damaged = saved / "run-0001" / "step-00000004" / file
    damage(damaged)
    if file == "checkpoint.json" and damage is truncate:
        damaged.write_text("{")
        words = "has changed since it was written"
    content = {path: path.read_bytes() for path in (saved / "run-0001").rglob("*.*")}
    with pytest.raises(RunFailed) as refused:
        start_script(f"--checkpoints {saved} --steps 6")
    sentence = str(refused.value).splitlines()[0]
    assert sentence.startswith(f"{saved}/run-0001/step-00000004: {file} "), sentence
    assert words in sentence and sentence.count("step-0") == 1
    assert sentence.endswith(
        "; training with --from-step 2 continues from the checkpoint before it"
    )
    assert "Traceback" not in str(refused.value) and "exit status 2)" in str(refused.value)
    start(tmp_path, f"--checkpoints {saved} --steps 6 --from-step 2")
    assert check_losses(tmp_path) == [2, 3, 4, 5]
    assert content == {path: path.read_bytes() for path in (saved / "run-0001").rglob("*.*")}
    assert (saved / "latest").read_text() == "run-0002/step-00000006\n"


def start_script(flags):
    from course.launch import run

    command = FLAGS.replace("script", "distributed_checkpointing.py", 1)
    return run(f"{command} {flags}", RANKS, warm=True, show=False, limit=60)


def test_two_jobs_do_not_save_into_one_folder(whole, tmp_path):
    saved = tmp_path / "saved"
    shutil.copytree(whole, saved)
    held = checkpoint_folder.claim(saved)
    with pytest.raises(RunFailed, match="another job is saving there"):
        start_script(f"--checkpoints {saved} --steps 6")
    held.close()
    start_script(f"--checkpoints {saved} --steps 6")
    assert check_folder(tmp_path, 6) == 6
