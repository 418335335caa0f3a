# SPDX-License-Identifier: Apache-2.0
"""Where checkpoints lie, and how one appears: whole, or not at all.

    FOLDER/latest                                the newest one's name: run-0001/step-00000020
    FOLDER/run-0001/step-00000020/               whole, because it has this name
        checkpoint.json                          flags, rate and progress of the run; size and
                                                 checksum of every file, and a checksum of its own
        .metadata  __0_0.distcp  __1_0.distcp    written by torch.distributed.checkpoint
    FOLDER/run-0001/.writing-step-00000030-a1b2  not whole: being written, or left by a crash

A checkpoint is first written under a temporary name that no reader looks for. When every rank has
written and synced its files, one atomic rename gives the folder its final name; only from then on
does the checkpoint exist. Then another rename replaces `latest`, and only after that are older
checkpoints removed. A crash at any moment leaves at least the previous checkpoint.

A training run that does not continue the newest checkpoint (--fresh, --from-step) gets a new
run folder, and `latest` names it from its first checkpoint on. So no saved file is ever
overwritten, and no checkpoint of an older run is removed. To return to an older run, write its name
into `latest`.
"""

import errno
import json
import os
import re
import secrets
import shutil
import stat
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

from files.claims import ClaimError, lock_folder
from files.inputs import MEBIBYTE, InputError, is_count, open_input, read_json, read_text
from files.outputs import place_of, replace_file, to_json

DESCRIPTION = "checkpoint.json"
PLAIN = "configuration", "rate", "progress"  # what a training's state has beside tensors
WRITING, DELETING = ".writing-", ".deleting-"
LARGEST_DESCRIPTION = 16 * MEBIBYTE
LONGEST_NAME = 4096  # bytes in the file `latest`
# Only names as they are written: step-000000020 would count as step 20, which has another name.
STEP, RUN = "step-([0-9]{8}|[1-9][0-9]{8,15})", "run-([0-9]{4}|[1-9][0-9]{4,})"
COUNTS = "--layers", "--dim", "--heads", "--kv-heads", "--vocabulary", "--seq-len"


class CheckpointError(Exception):
    """A folder or a checkpoint in it is unusable; the text says in one sentence what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint; `description` is the content of its checkpoint.json."""

    folder: Path
    run: str
    step: int
    description: dict

    @property
    def name(self):
        return f"{self.run}/{name_of_step(self.step)}"

    @property
    def path(self):
        return self.folder / self.name

    @property
    def identity(self):
        """Its name and checksum in words: a node may have a folder of its own, with other weights."""
        return f"{self.name}, checksum {self.description['checksum']}"


def name_of_step(step):
    return f"step-{step:08}"


def steps_of(folder, run):
    """Return the steps that have a checkpoint in this run, ascending."""
    names = entries_of(folder, run)
    return sorted(int(name[5:]) for name in names if re.fullmatch(STEP, name))


def runs_of(folder):
    """Return the names of the runs, ascending."""
    names = [name for name in entries_of(folder) if re.fullmatch(RUN, name)]
    return sorted(names, key=lambda name: int(name[4:]))


def entries_of(folder, run=""):
    """Return the names in a folder, or in the folder of a run; none if it does not exist."""
    try:
        reject_link(folder, run)
        return os.listdir(Path(folder) / run)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"--checkpoints {Path(folder) / run} cannot be read ({error.strerror}); name a folder of "
            "yours"
        ) from None


def reject_link(folder, run):
    """Raise OSError if another user's link leads to the folder, or the run's folder is any link.

    The oldest checkpoints of a run are removed, and a link may lead to another training's run.
    """
    place = Path(folder) / run
    place_of(place / "any")
    if run and os.path.islink(place):
        raise OSError(errno.EACCES, "it is a link", str(place))


def current_run(folder):
    """Return the run that `latest` names, or the last run with a checkpoint, or None.

    After a crash between the rename of a run's first checkpoint and the move of `latest`, `latest`
    is missing or names the previous run. Both folders are complete.
    """
    latest = Path(folder) / "latest"
    if os.path.lexists(latest):
        try:
            run = " ".join(read_text(latest, LONGEST_NAME).split("/")[0].split())
        except InputError:
            run = "something unreadable"
        if run not in runs_of(folder) or not steps_of(folder, run):
            raise CheckpointError(
                f"--checkpoints {folder}: latest names {run[:40]}, where no checkpoint is; remove latest to "
                "continue the last run that has one"
            )
        return run
    return next((run for run in reversed(runs_of(folder)) if steps_of(folder, run)), None)


def find_checkpoint(folder, step=None):
    """Return the newest Checkpoint of the current run, or that of `step`; None if none exists.

    Raises CheckpointError if the run has no checkpoint of `step`, or if names and sizes show that
    the checkpoint is damaged.
    """
    run = current_run(folder)
    if run is None:
        if step is not None:
            raise CheckpointError(
                f"--from-step {step}: there is no checkpoint in {folder}; leave it out"
            )
        return None
    steps = steps_of(folder, run)
    if step is None:
        return read_checkpoint(folder, run, steps[-1])
    if step not in steps:
        raise CheckpointError(
            f"--from-step {step}: {folder}/{run} has no such checkpoint; use one of "
            f"{', '.join(map(str, steps))}"
        )
    return read_checkpoint(folder, run, step)


def read_checkpoint(folder, run, step):
    """Return the Checkpoint with its description, once every file has its recorded size."""
    checkpoint, problem = look_at(folder, run, step)
    if problem:
        raise damage(checkpoint, *problem)
    return checkpoint


def look_at(folder, run, step):
    """A Checkpoint, and None or what is wrong with it as (file, what)."""
    checkpoint = Checkpoint(Path(folder), run, step, {})
    path = checkpoint.path / DESCRIPTION
    if not os.path.lexists(path):
        return checkpoint, (DESCRIPTION, "is missing")
    try:
        description = read_json(path, LARGEST_DESCRIPTION)
    except InputError as error:
        reason = str(error).removeprefix(f"{path} ")
        return checkpoint, (DESCRIPTION, f"has changed since it was written: it {reason}")
    if not is_description(description, step):
        return checkpoint, (DESCRIPTION, "has changed since it was written, or is too old to read")
    for name, (size, _) in description["files"].items():
        try:
            found = os.lstat(checkpoint.path / name)
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            return checkpoint, (name, "is missing" if missing else f"has gone ({error.strerror})")
        if not stat.S_ISREG(found.st_mode):
            return checkpoint, (name, "is not a regular file any more")
        if found.st_size != size:
            return checkpoint, (name, f"has {found.st_size} bytes instead of {size}")
    return Checkpoint(Path(folder), run, step, description), None


def is_description(value, step):
    """Return whether a value from JSON has the form that `publish` writes for that step."""
    if not isinstance(value, dict) or value.get("checksum") != checksum_of_description(value):
        return False
    if not all(isinstance(value.get(name), dict) for name in ("files", *PLAIN)):
        return False
    sizes = [value["configuration"].get(flag, 1) for flag in COUNTS]
    counts = [value["progress"].get(name) for name in ("step", "batches")]
    counts += [value["rate"].get("updates"), *sizes]
    files = value["files"]
    return (
        value.get("step") == step
        and all(map(is_count, counts))
        and all(sizes)
        and all(re.fullmatch(r"\.metadata|__\d+_\d+\.distcp", name) for name in files)
        and all(isinstance(entry, list) and len(entry) == 2 for entry in files.values())
        and all(is_count(number) for entry in files.values() for number in entry)
    )


def checksum_of_description(description):
    """Return the CRC-32 of the content of checkpoint.json except the checksum itself."""
    rest = {name: value for name, value in description.items() if name != "checksum"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def check_files(checkpoint, names):
    """Compare the checksums of some files. Raises CheckpointError when one differs."""
    for name in names:
        try:
            found = checksum_of_file(checkpoint.path / name)
        except (InputError, OSError) as error:
            raise damage(checkpoint, name, f"cannot be read any more ({error})") from None
        if [found] != checkpoint.description["files"].get(name, [])[1:]:
            raise damage(
                checkpoint, name, "has changed since it was written (its checksum differs)"
            )


def damage(checkpoint, file, what):
    """Return the sentence about a damaged file and how to continue without it."""
    folder, run, step = checkpoint.folder, checkpoint.run, checkpoint.step
    for earlier in reversed([s for s in steps_of(folder, run) if s < step]):
        if look_at(folder, run, earlier)[1] is None:
            return CheckpointError(
                f"{checkpoint.path}: {file} {what}; training with --from-step {earlier} continues "
                f"from the checkpoint before it"
            )
    return CheckpointError(
        f"{checkpoint.path}: {file} {what}, and there is no earlier checkpoint; training with "
        "--fresh begins anew"
    )


# Writing. Only rank 0 does it, except for the files of torch.distributed.checkpoint.


def run_to_write(folder, continued, is_newest):
    """Return the run of the next checkpoints: that of `continued` if newest, else a new run."""
    if continued is not None and is_newest:
        return continued.run
    runs = runs_of(folder)
    return f"run-{int(runs[-1][4:]) + 1 if runs else 1:04}"


def begin_writing(folder, run, step):
    """Make the temporary folder of a checkpoint; returns its path."""
    temporary = Path(folder) / run / f"{WRITING}{name_of_step(step)}-{secrets.token_hex(2)}"
    reject_link(folder, run)
    temporary.mkdir(parents=True)
    (temporary / DESCRIPTION).touch()  # `publish` looks for it: torch makes a missing folder anew
    # A new folder's entry is on disk only once its parent folder is synced.
    for made in (temporary.parent, temporary.parent.parent, temporary.parent.parent.parent):
        sync_folder(made)
    return temporary


def publish(temporary, folder, run, step, description, keep):
    """Give a completely written checkpoint its name, then move `latest`, then remove the oldest.

    `description` goes into checkpoint.json. Keeps the `keep` newest of the run. Returns the path.
    """
    run_folder, name = Path(folder) / run, name_of_step(step)
    if not (temporary / DESCRIPTION).exists():
        raise CheckpointError(f"another folder has the name {folder} by now")
    made, path = os.stat(temporary), run_folder / name
    for file in description["files"]:
        if not (temporary / file).is_file():
            raise CheckpointError(
                f"rank 0 does not see {file} in {run_folder}; --checkpoints must name a folder that "
                "all nodes share"
            )
    write_description(temporary, {**description, "step": step})
    sync_folder(temporary)
    check_is_there(temporary, made)
    os.rename(temporary, path)
    sync_folder(run_folder)
    check_is_there(path, made)
    write_line(folder, "latest", f"{run}/{name}")
    for old in steps_of(folder, run)[:-keep]:
        check_is_there(path, made)
        remove_checkpoint(run_folder, name_of_step(old))
    return path


def check_is_there(path, made):
    """Raise CheckpointError unless `path` is the folder with this os.stat, not one that got its name."""
    if not os.path.exists(path) or not os.path.samestat(made, os.stat(path)):
        raise CheckpointError(f"another folder has the name {path.parents[1]} by now")


def write_description(folder, description):
    """Write checkpoint.json, with the checksum of its own content."""
    description = {**description, "checksum": checksum_of_description(description)}
    write_synced(folder / DESCRIPTION, to_json(description, indent=1) + "\n")


def write_line(folder, name, line):
    """Write a file of one line; once this returns, it is on disk under its name."""
    replace_file(Path(folder) / name, lambda partial: write_synced(partial, line + "\n"))
    sync_folder(folder)


def remove_checkpoint(run_folder, name):
    """Rename the checkpoint first, so that its final name never stands for a partial one.

    A checkpoint that cannot be removed stays and is reported; the new one is saved all the same.
    """
    doomed = run_folder / f"{DELETING}{name}-{secrets.token_hex(2)}"
    try:
        if not os.access(run_folder / name, os.W_OK):  # otherwise rmtree would remove only a part
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        # rmtree would refuse a link, and open anything else and wait at a pipe.
        if os.path.islink(run_folder / name) or not os.path.isdir(run_folder / name):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        os.rename(run_folder / name, doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        sentence = f"{run_folder / name} cannot be removed ({error.strerror}); remove it yourself"
        print(sentence, file=sys.stderr, flush=True)


def remove_leftovers(folder):
    """Remove the file `stopped`, and half-written and half-deleted checkpoints; nothing else."""
    for name in entries_of(folder):
        if re.fullmatch(r"stopped|\.(latest|stopped)\.[0-9a-f]{8}", name):  # see `replace_file`
            (Path(folder) / name).unlink(missing_ok=True)
    for run in runs_of(folder):
        for name in entries_of(folder, run):
            path = Path(folder) / run / name
            if name.startswith((WRITING, DELETING)) and os.path.isdir(path):
                shutil.rmtree(path, ignore_errors=True)


def write_synced(path, text):
    """Write a file and wait until it is on disk."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path):
    """Block until the names in a folder are on disk; a file's own sync excludes its name."""
    if os.name == "nt":  # where a folder cannot be opened
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def describe_files(folder, prefix):
    """Return {name: [bytes, checksum]} of the files whose name starts with `prefix`."""
    files = sorted(path for path in Path(folder).iterdir() if path.name.startswith(prefix))
    return {path.name: [path.stat().st_size, checksum_of_file(path)] for path in files}


def checksum_of_file(path):
    """Return the CRC-32 of a file, which reveals accidental damage but not manipulation."""
    checksum = 0
    with open_input(path) as file:
        while block := file.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum


def claim(folder):
    """Lock the folder for this job until the process ends. Returns the lock file to keep open.

    Raises CheckpointError when another running job has claimed the folder.
    """
    try:
        return lock_folder("--checkpoints", folder)[0]
    except ClaimError as error:
        raise CheckpointError(str(error)) from None


def check_unchanged(folder, run, begin):
    """Reject a folder in which another job has saved since this one chose `run` and `begin` there."""
    expected = [begin.step] if begin is not None and begin.run == run else []
    if steps_of(folder, run)[-1:] != expected:
        raise CheckpointError(
            f"--checkpoints {folder}: another job has saved there meanwhile; start this one again"
        )
