# SPDX-License-Identifier: Apache-2.0
"""A saved model of a training run: its sizes, and the weights of the layers of a rank."""

import json

import torch
import torch.distributed as dist

from extensions.checkpointing.checkpoint_folder import (
    CheckpointError,
    current_run,
    find_checkpoint,
    read_checkpoint,
    steps_of,
)
from extensions.checkpointing.whole_checkpoint import fill_weights
from extensions.real_models.saved_folder import take_model
from extensions.real_models.saved_settings import SIZE_FLAGS
from pipeline.command_line import check_same
from pipeline.model import ModelPart, build_part

TRIES = 20  # while a training run replaces checkpoints


def take_sizes(parser, arguments):
    """Take the sizes of the model in --model, or of the newest in --checkpoints.

    The model is kept as `arguments.saved`, which is None if neither flag is given. A size is None in
    `arguments` unless its flag was given.
    """
    given = {name: getattr(arguments, name) for name in SIZE_FLAGS}
    sizes = {name: size or parser.get_default(name) for name, size in given.items()}
    arguments.saved = None
    if arguments.model_folder and arguments.checkpoints:
        raise SystemExit("--model and --checkpoints name a model each; leave one of them out")
    if arguments.model_folder:
        return take_model(arguments)
    if arguments.checkpoints is None:
        vars(arguments).update(sizes)
        return
    try:
        arguments.saved = newest_checkpoint(arguments.checkpoints)
    except CheckpointError as error:
        raise SystemExit(str(error)) from None
    if arguments.saved is None:
        raise SystemExit(
            f"--checkpoints: there is no checkpoint in {arguments.checkpoints}; train first"
        )
    flags = arguments.saved.description["configuration"]
    if flags.get("--settings"):
        raise SystemExit(
            "--checkpoints: that model came in with convert.py; take it out with convert.py --to-hf, "
            "and name that folder with --model"
        )
    for name in SIZE_FLAGS:
        flag = f"--{name.replace('_', '-')}"
        size = flags.get(flag, sizes[name])
        check_same(flag, given[name], f"--checkpoints {arguments.checkpoints}", size)
        setattr(arguments, name, size)


def newest_checkpoint(folder, read=None):
    """Return the newest Checkpoint, or None, also while a training run saves and removes some.

    With `read`, return the result of read(folder) instead. Raises CheckpointError.
    """
    read = read or find_checkpoint
    for _ in range(TRIES):
        before = run_and_steps(folder)
        try:
            return read(folder)
        except (CheckpointError, FileNotFoundError):
            if run_and_steps(folder) == before:  # it is damaged: no newer one has come meanwhile
                raise
    return read(folder)


def run_and_steps(folder):
    """Return (run, steps) of the current run."""
    run = current_run(folder)
    return run, steps_of(folder, run) if run else []


def build_saved_part(arguments, first, last, device="cpu", job=None):
    """Build layers `first` to `last` - 1 with the saved weights, or initial ones if none exist.

    With a `job` all its ranks call it, and get the weights of the same checkpoint.
    """
    a = arguments
    if a.model_folder:
        return a.saved.build_part(first, last, a.torch_dtype, device)
    part = build_part(a.config, first, last, a.seed, a.torch_dtype, device)
    if a.saved is None:
        return part
    weights = {name: parameter.detach() for name, parameter in part.named_parameters()}
    with torch.device("meta"):
        names = dict(ModelPart(a.config, 0, a.config.layers).named_parameters())
    for attempt in range(1 if job is None else TRIES):
        saved = a.saved if job is None else choice_of_rank_0(a, job, attempt)
        if all_say(job, saved is not None and is_read(saved, weights, names)):
            a.saved = saved
            return part
    if job is None:
        raise SystemExit(f"{a.saved.path} was removed while it was read; start again")
    raise SystemExit(
        f"--checkpoints {a.checkpoints}: not all ranks find the same checkpoint there; name a folder "
        "that all nodes share, or start again if a training saves there"
    )


def is_read(checkpoint, weights, names):
    """Fill `weights`, or return False if the Checkpoint was removed meanwhile.

    `names` are those of all weights of the model.
    """
    if not checkpoint.path.exists():
        return False
    try:
        fill_weights(checkpoint, weights, names)
    except (CheckpointError, FileNotFoundError) as error:
        if checkpoint.path.exists():
            raise SystemExit(str(error)) from None
        return False
    return True


def all_say(job, here):
    """Return whether `here` holds on all ranks of the job."""
    if job is None or job.num_ranks == 1:
        return here
    everywhere = torch.tensor(int(here))
    with job.waiting_for_all("the weights"):
        dist.all_reduce(everywhere, dist.ReduceOp.MIN)
    return bool(everywhere)


def choice_of_rank_0(arguments, job, attempt):
    """Return, on each rank, the checkpoint that is the newest for rank 0; None where it is not found.

    While a training saves, each rank may have found another one to be the newest.
    """
    a, key = arguments, f"checkpoint {attempt}"
    if job.rank == 0:
        if attempt:
            a.saved = checkpoint_or_none(newest_checkpoint, a.checkpoints) or a.saved
        job.store.set(key, json.dumps([a.saved.run, a.saved.step, a.saved.identity]))
        return a.saved
    with job.waiting(0, "the name of its checkpoint"):
        run, step, identity = json.loads(job.store.get(key))
    found = checkpoint_or_none(read_checkpoint, a.checkpoints, run, step)
    return found if found and found.identity == identity else None


def checkpoint_or_none(find, *where):
    try:
        return find(*where)
    except (CheckpointError, FileNotFoundError):
        return None
