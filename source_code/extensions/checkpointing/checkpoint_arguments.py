# SPDX-License-Identifier: Apache-2.0
"""The flags that save and continue a training run, their checks, and the steps that follow from them.

All errors that the names, sizes and flags in a folder reveal are found before the first message.
"""

import errno
import hashlib
import os
import sys
from pathlib import Path

from extensions.checkpointing.checkpoint import Checkpoints
from extensions.checkpointing.checkpoint_folder import (
    WRITING,
    CheckpointError,
    find_checkpoint,
    name_of_step,
    run_to_write,
    write_line,
)
from extensions.checkpointing.stop_request import status_when_stopped
from files.claims import is_in_place
from files.outputs import can_be_written, say_not_written
from pipeline.command_line import positive_integer

# What a continued run must share with the run that it continues. The number of ranks and stages,
# the schedule and the micro-batches may differ: they change a loss by no more than rounding.
SHARED = "layers dim heads kv_heads seq_len dtype seed batch_size optimizer learning_rate".split()


def add_checkpoint_arguments(parser):
    """Add the flags to a parser made by `training_parser`."""
    add = parser.add_argument
    add("--checkpoints", metavar="FOLDER", help="save there, and continue from what is there")
    add("--save-every", type=positive_integer, metavar="N", help="steps between saves; default 5")
    add("--keep", type=positive_integer, metavar="K", help="newest checkpoints kept; default 2")
    add("--asynchronous", action="store_true", help="train on while a checkpoint is written")
    add("--fresh", action="store_true", help="begin anew beside what is there, which stays")
    add("--from-step", type=positive_integer, metavar="N", help="continue from an older checkpoint")
    parser.reads.insert(0, "--checkpoints")  # also written; first, so that its content is kept


def check_checkpoint_arguments(arguments, further):
    """Check the flags and look into the folder; call it after `parse_arguments`.

    `further` are the script's own flags that a continued run must share, as {name: default}. One
    that is still None gets the checkpoint's value, or the default if there is no checkpoint. Adds
    `configuration` (the values that must be shared, by flag), `begin` (a Checkpoint or None) and
    `run` (the folder of the next checkpoint).
    """
    check_combinations(arguments)
    arguments.save_every, arguments.keep = arguments.save_every or 5, arguments.keep or 2
    arguments.begin = arguments.run = None
    try:
        if arguments.checkpoints:
            look_into_folder(arguments)
    except CheckpointError as error:
        raise SystemExit(str(error)) from None
    saved, where = {}, None
    if arguments.begin:
        saved, where = arguments.begin.description["configuration"], arguments.begin.path
    if saved.get("--settings") and "settings" not in further:
        raise SystemExit(f"{where} came in with convert.py; continue it with pretrain_llama.py")
    arguments.configuration = named = configuration_of(arguments, further, saved)
    # An older checkpoint does not say which tokenizer its tokens are from.
    saved = {**saved, "--tokenizer": saved.get("--tokenizer", named["--tokenizer"])}
    if where and not arguments.begin.step:  # a checkpoint from convert.py has only the model
        saved = {**arguments.configuration, **saved}
    if where and (sentence := first_difference(saved, where, arguments.configuration)):
        raise SystemExit(sentence)


def first_difference(saved, where, configuration):
    """Return a sentence about the first flag that differs from the run in `where`, or None.

    `saved` and `configuration` are {flag: value}. A flag that one of them lacks, because the program
    that saved or this one has no such flag, counts as not given: None, False or 0.
    """
    for flag, value in {**dict.fromkeys(saved), **configuration}.items():
        both, before = flag in saved and flag in configuration, saved.get(flag)
        if before != value if both else before or value:
            if flag == "--tokenizer":  # a flag of prepare_data.py, not of the training program
                none = "no vocabulary: they are bytes"
                return (
                    f"--data has tokens of {value or none}, and {where} those of {before or none}; make "
                    "tokens with the same tokenizer (prepare_data.py --tokenizer), or use another "
                    "--checkpoints folder"
                )
            is_now = f"is {value}" if with_value(value) else "is given" if value else "is not given"
            was = f"{flag} {before}" if with_value(before) else flag if before else f"no {flag}"
            use = "use that" if both else "use the program that made it"
            return (
                f"{flag} {is_now}, and {where} was made with {was}; {use}, or another "
                "--checkpoints folder, or begin anew with --fresh"
            )
    return None


def with_value(value):
    """Return whether the flag is one with a value, and was given."""
    return value is not None and not isinstance(value, bool)


def check_combinations(arguments):
    """Reject flags that need another flag, and flags that contradict each other."""
    for flag in ("save-every", "keep", "asynchronous", "fresh", "from-step"):
        if getattr(arguments, flag.replace("-", "_")) and not arguments.checkpoints:
            raise SystemExit(
                f"--{flag} needs --checkpoints FOLDER; name the folder, or leave it out"
            )
    if arguments.fresh and arguments.from_step:
        raise SystemExit("--fresh begins anew and --from-step from a checkpoint; use one of them")


def look_into_folder(arguments):
    """Find the checkpoint to begin from and the run to write to; reject an unusable folder."""
    folder = arguments.checkpoints
    parent = os.path.dirname(os.path.abspath(folder))
    if not os.path.isdir(parent):
        raise SystemExit(
            f"--checkpoints {folder}: the folder {parent} does not exist; make it first"
        )
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise SystemExit(f"--checkpoints {folder} is not a folder; name one")
    newest = None if arguments.fresh else find_newest(arguments)
    arguments.begin = newest
    if arguments.from_step and (newest is None or newest.step != arguments.from_step):
        arguments.begin = find_checkpoint(folder, arguments.from_step)
    arguments.from_checkpoint = arguments.begin and arguments.begin.identity  # ranks compare it
    arguments.run = run_to_write(folder, arguments.begin, arguments.begin is newest)
    # Rank 0 creates a folder that does not exist yet, so its parent must be writable.
    inside = folder if os.path.isdir(folder) else parent
    if not can_be_written(os.path.join(inside, "checkpoint")):
        raise SystemExit(f"--checkpoints {folder} cannot be written to; name a folder of yours")


def find_newest(arguments):
    """Return the newest checkpoint, or None; with --from-step also None if it is damaged."""
    folder = arguments.checkpoints
    try:
        newest = find_checkpoint(folder)
    except CheckpointError:
        if arguments.from_step:
            return None
        raise
    # A training never saves step 0.
    if newest is None and any(Path(folder).glob(f"run-*/{WRITING}{name_of_step(0)}-*")):
        raise SystemExit(
            f"--checkpoints {folder}: convert.py has not finished there; start it again with a new "
            "folder, or begin anew here with --fresh"
        )
    return newest


def configuration_of(arguments, further, saved):
    """Return {flag: value} for everything that a continued run must share, the model first."""
    named = {}
    for name in [*SHARED, *further]:
        flag = f"--{name.replace('_', '-')}"
        if getattr(arguments, name) is None:
            setattr(arguments, name, saved.get(flag, further[name]))
        named[flag] = getattr(arguments, name)
    named["--data"] = f"a text with SHA-256 {fingerprint_of(arguments.text)[:12]}"
    named["--tokenizer"] = getattr(arguments.text, "vocabulary_digest", None)
    return named


def fingerprint_of(text):
    """Return the text's own `fingerprint` if it has one, else the SHA-256 of its tokens."""
    if getattr(text, "fingerprint", ""):
        return text.fingerprint
    tokens = text.training.numpy().tobytes() + text.held_out.numpy().tobytes()
    return hashlib.sha256(tokens).hexdigest()


def continue_training(arguments, job, training):
    """Restore `training`. Returns the Checkpoints, or None without --checkpoints."""
    checkpoints = None
    if arguments.checkpoints:
        checkpoints = Checkpoints(
            job,
            arguments.checkpoints,
            arguments.run,
            arguments.begin,
            arguments.keep,
            arguments.asynchronous,
            arguments.timeout,
        )
        problem = checkpoints.prepare()
        if problem is None and arguments.begin:
            problem = checkpoints.restore(training)
        if problem:
            job.leave()
            fix = "" if "; " in problem else "; mend that, or use another --checkpoints folder"
            raise SystemExit(problem + fix)
    if training.step and job.rank == 0:
        print(f"continues after {training.step} steps, from {arguments.begin.path}", flush=True)
        if training.step >= arguments.steps:
            done = f"{training.step} steps of --steps {arguments.steps} are done"
            print(f"nothing is left to do: {done}", flush=True)
    return checkpoints


def save_when_due(arguments, job, training, checkpoints, stop_request):
    """Save after an update if it is time. All ranks call it.

    Returns why the training ends before its last step: what is not finite, in words, or the signal
    that asks the job to stop, or None. Without `checkpoints` nothing is saved.
    """
    if not checkpoints:
        return None
    stopped = stop_request.agreed(job)
    last = training.step == arguments.steps
    if stopped or last or training.step % arguments.save_every == 0:
        return checkpoints.save(training) or stopped
    return None


def end_diverged(job, what, checkpoints):
    """Print to standard error what is not finite, what is kept and what to do. Returns status 1."""
    if job.rank == 0:
        kept, where = "no checkpoint was saved", ""
        if checkpoints:
            where = " with another --checkpoints folder"
        if checkpoints and checkpoints.newest:
            kept = f"the checkpoint {checkpoints.newest} is kept"
        print(
            f"{what}: the training diverged and ends here; {kept}; begin anew{where} and a smaller "
            "--learning-rate or --clip",
            file=sys.stderr,
            flush=True,
        )
    return 1


def status_of_end(job, training, checkpoints, ending):
    """Print on rank 0 how a run has ended. Returns the exit status, the same on every rank.

    `ending` is what `find_not_finite` or `save_when_due` has returned.
    """
    stopped = ending and not isinstance(ending, str)
    if checkpoints:
        checkpoints.wait()
        if stopped and not checkpoints.problem and job.rank == 0:
            mark_stopped(checkpoints, f"{ending.name} after {training.step} steps")
        checkpoints.finish()
    if isinstance(ending, str):
        return end_diverged(job, ending, checkpoints)
    if checkpoints and checkpoints.problem:
        return 1
    return status_when_stopped() if stopped else 0


def mark_stopped(checkpoints, when):
    """Write the file `stopped`, which says that the training can be continued."""
    path = os.path.join(checkpoints.folder, "stopped")
    try:
        if not is_in_place(checkpoints.claim, checkpoints.folder):
            raise OSError(errno.ESTALE, "another folder has this name by now", path)
        write_line(checkpoints.folder, "stopped", when)
    except OSError as error:
        say_not_written("--checkpoints", path, error)
    print(f"stopped by {when}, saved", flush=True)
