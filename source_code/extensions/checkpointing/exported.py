"""A training run as one file for torch.load: written from a checkpoint, and begun from."""

import os

import torch

from extensions.checkpointing.checkpoint_folder import CheckpointError, check_files, sync_folder
from extensions.checkpointing.checkpoint_reader import load_archive, read_whole
from pipeline.files import replace_file
from pipeline.inputs import InputError, is_count
from pipeline.job import end_process


def export(checkpoint, file):
    """Write a checkpoint as one torch.save file, in one process with enough memory for all of it.

    torch.load(file)["model"] is a state dictionary of the whole model. Every entry of the file has
    a checksum, as torch.save writes it.
    """
    check_files(checkpoint, checkpoint.description["files"])
    state = read_whole(checkpoint)
    replace_file(file, lambda partial: torch.save(state, partial))
    sync_folder(os.path.dirname(os.path.realpath(file)))


def read_exported(file):
    """Return the checked state in a file from `export`; tensors stay on disk until used."""
    try:
        state = load_archive(file)
    except InputError as error:
        raise CheckpointError(f"--import {error}; name a file of --export") from None
    if not isinstance(state, dict) or not is_training({"optimizer": {}, **state}):
        raise CheckpointError(f"--import {file} is not a training run that --export has written")
    return {"optimizer": {}, **state}  # plain descent has none, and an empty one leaves no trace


def is_training(state):
    """Return whether a dictionary has the form of the result of Training.state."""
    parts = [state.get(name) for name in ("model", "optimizer", "rate", "progress")]
    if not all(isinstance(part, dict) for part in [*parts, state.get("configuration")]):
        return False
    model, optimizer, rate, progress = parts
    tensors = [*model.values()]
    for kinds in optimizer.values():
        tensors += kinds.values() if isinstance(kinds, dict) else [None]
    return (
        all(isinstance(tensor, torch.Tensor) for tensor in tensors)
        and is_count(rate.get("updates"))
        and all(is_count(progress.get(name)) for name in ("step", "batches"))
    )


def take_exported(job, training, state):
    """Continue from the state of `read_exported`; this rank takes its own parameters from it."""
    try:
        with torch.no_grad():
            for name, parameter in training.parameters.items():
                check_shapes(name, parameter, state)
                parameter.copy_(state["model"][name])
    except CheckpointError as error:
        end_process(f"rank {job.rank}: {error}")
    own = {
        name: {
            kind: tensor.to(parameter.device if tensor.dim() else "cpu", copy=True)
            for kind, tensor in state["optimizer"][name].items()
        }
        for name, parameter in training.parameters.items()
        if name in state["optimizer"]
    }
    training.take(job, {"random": {}, **state, "optimizer": own})


def check_shapes(name, parameter, state):
    """Raise CheckpointError unless `state` has a parameter and its optimizer state in its shape."""
    tensors = {name: state["model"].get(name)}
    for kind, tensor in state["optimizer"].get(name, {}).items():
        tensors[f"{kind} of {name}"] = tensor if tensor.dim() else parameter  # a count
    for what, tensor in tensors.items():
        if tensor is None or tensor.shape != parameter.shape:
            shape = tuple(parameter.shape)
            raise CheckpointError(f"the file of --import has no {what} of shape {shape}")
