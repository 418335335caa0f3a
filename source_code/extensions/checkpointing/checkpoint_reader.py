# SPDX-License-Identifier: Apache-2.0
"""Reads the files of torch.distributed.checkpoint without running code that they contain.

Torch stores the metadata of a checkpoint as a pickle. This reader allows only the classes that the
metadata needs, compares the sizes and file names in it with the files, and accepts tensors only:
torch would unpickle every other value.
"""

import pickle
import traceback
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader, metadata, planner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import _get_layout

from extensions.checkpointing.checkpoint_folder import CheckpointError, check_files
from files.inputs import MEBIBYTE, InputError, is_count, is_shape, read_bytes
from files.unpickling import allow, unpickle

METADATA = ".metadata"
LARGEST_METADATA = 256 * MEBIBYTE
NUMBER_TYPES = "bool bfloat16 float16 float32 float64 int8 int16 int32 int64 uint8".split()

# The classes in a description, and in what ranks exchange when they save and load.
allow(
    torch.Size,
    _get_layout,
    _StorageInfo,
    _StoragePrefix,
    WriteResult,
    *(getattr(metadata, name) for name in metadata.__all__),
    metadata._MEM_FORMAT_ENCODING,
    *(getattr(planner, name) for name in ("SavePlan", "LoadPlan", "WriteItem", "ReadItem")),
    *(getattr(planner, name) for name in ("WriteItemType", "LoadItemType", "TensorWriteData")),
    planner.BytesIOWriteData,
    *(("torch", name, getattr(torch, name)) for name in NUMBER_TYPES),
    *(("pathlib", name, Path) for name in ("PosixPath", "WindowsPath")),
    *(("pathlib._local", name, Path) for name in ("PosixPath", "WindowsPath")),  # in Python 3.13
    *(CheckpointError, CheckpointException, traceback.FrameSummary, traceback.StackSummary),
)


class PlainReader(FileSystemReader):
    """A FileSystemReader for a Checkpoint. Raises CheckpointError for inconsistent metadata."""

    def __init__(self, checkpoint):
        super().__init__(checkpoint.path)
        self.checkpoint = checkpoint
        self.sizes = {name: size for name, (size, _) in checkpoint.description["files"].items()}

    def read_metadata(self, *arguments, **options):
        check_files(self.checkpoint, [METADATA])
        path = Path(self.path, METADATA)
        try:
            description = unpickle(read_bytes(path, LARGEST_METADATA))
            check_description(description, self.sizes)
        except (InputError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{path} cannot be trusted: {error}") from None
        description.storage_meta = description.storage_meta or metadata.StorageMeta()
        description.storage_meta.load_id = self.load_id
        return description


def check_description(description, sizes):
    """Raise InputError unless a description fits the files, whose `sizes` are given by name.

    The check covers all that the reader relies on: every tensor is complete and no larger than the
    files, and every part of a tensor lies within one file.
    """
    try:
        for name, entry in description.state_dict_metadata.items():
            path = description.planner_data[name]
            if not all(isinstance(part, str) for part in path) or ".".join(path) != name:
                raise InputError(f"{name} has another place than its name says")
            if not isinstance(entry, TensorStorageMetadata):
                raise InputError(f"{name} is not a tensor")
            check_tensor(name, entry, sum(sizes.values()))
        for index, place in description.storage_data.items():
            end = place.offset + place.length
            inside = is_count(place.offset) and is_count(place.length)
            if not inside or end > sizes[place.relative_path] or place.transform_descriptors:
                raise InputError(f"{index.fqn} lies outside of {place.relative_path}")
    except (AttributeError, LookupError, TypeError) as error:
        raise InputError(f"it describes no tensors ({type(error).__name__})") from None


def check_tensor(name, entry, most):
    """Raise InputError unless the parts of a tensor cover it and take at most `most` bytes."""
    # Before anything is multiplied: in a torch.Size, a product beyond 64 bits may become 0.
    shapes = [entry.size, *(part.sizes for part in entry.chunks)]
    known = all(map(is_shape, shapes)) and all(is_count(n) for c in entry.chunks for n in c.offsets)
    if not isinstance(entry.properties.dtype, torch.dtype) or not known:
        raise InputError(f"{name} has no sizes")
    if entry.size.numel() * entry.properties.dtype.itemsize > most:
        raise InputError(f"{name} of {tuple(entry.size)} does not fit into {most:,} bytes")
    for part in entry.chunks:
        alike = len(part.offsets) == len(part.sizes) == len(entry.size)
        dimensions = zip(part.offsets, part.sizes, entry.size)
        if not alike or any(offset + size > whole for offset, size, whole in dimensions):
            raise InputError(f"{name} has a part outside of {tuple(entry.size)}")
    if sum(torch.Size(part.sizes).numel() for part in entry.chunks) != entry.size.numel():
        raise InputError(f"{name} is not whole")


def reject_other_weights(saved, names, where):
    """Raise CheckpointError if a weight of `saved`, a checkpoint's metadata, is not in `names`.

    torch reads the names that it is asked for, and leaves out all others silently.
    """
    weights = (name.removeprefix("model.") for name in saved if name.startswith("model."))
    if other := next((name for name in weights if name not in names), None):
        raise CheckpointError(
            f"{where} has the weight {other}, and this model has none of that name; use the program "
            "that saved it"
        )


def reason_of(error):
    """Return in one line the first failure that torch.distributed.checkpoint collected."""
    rank, (failure, _) = min(error.failures.items())
    lines = str(failure).splitlines() or [type(failure).__name__]
    if "unexpected pos" in lines[0]:  # all that torch says when a write fails
        lines = ["no space left on the disk, or a limit of its files"]
    return f"rank {rank}: {lines[0][:500]}"
