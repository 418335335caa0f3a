# SPDX-License-Identifier: Apache-2.0
"""Reads weights of a checkpoint in one process, by their names in the whole model."""

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from extensions.checkpointing.checkpoint_folder import CheckpointError, check_files
from extensions.checkpointing.checkpoint_reader import PlainReader, reason_of, reject_other_weights


def read_weights(checkpoint, names):
    """Return {name: tensor} of the model in a Checkpoint, in one process. Raises CheckpointError.

    `names` are all of the model's.
    """
    saved = PlainReader(checkpoint).read_metadata().state_dict_metadata
    weights = {}
    for name in names:
        entry = saved.get(f"model.{name}")
        if entry is None:
            raise CheckpointError(f"{checkpoint.path} has no weight {name}")
        weights[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    fill_weights(checkpoint, weights, names)
    return weights


def fill_weights(checkpoint, weights, names):
    """Fill `weights`, tensors by name, from a Checkpoint, whose model has the `names` and no others.

    Compares the checksums of the files that are read. Raises CheckpointError.
    """
    reader = PlainReader(checkpoint)
    metadata = reader.read_metadata()
    # Without this call torch would print a traceback before the sentence.
    reject_other_weights(metadata.state_dict_metadata, names, checkpoint.path)
    own = {f"model.{name}" for name in weights}
    places = metadata.storage_data.items()
    check_files(checkpoint, sorted({at.relative_path for of, at in places if of.fqn in own}))
    try:
        _load_state_dict({"model": weights}, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        raise CheckpointError(f"{checkpoint.path}: {reason_of(error)}") from None
