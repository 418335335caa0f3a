# SPDX-License-Identifier: Apache-2.0
"""Reads the files of torch.distributed.checkpoint without running code that they contain.

Torch stores the metadata of a checkpoint, and each value that is not a tensor, as a pickle. This
reader allows only the classes that the metadata needs, reads the values as torch.load does with
weights_only, and compares the sizes and file names in the metadata with the files.
"""

import pickle
import traceback
import zipfile
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader, metadata, planner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import _get_layout

from extensions.checkpointing.checkpoint_folder import CheckpointError
from guard.inputs import MEBIBYTE, InputError, is_count, is_shape, read_bytes
from guard.unpickling import UNPICKLING_ERRORS, allow, unpickle

METADATA = ".metadata"
LARGEST_METADATA = 256 * MEBIBYTE
NUMBER_TYPES = "bool bfloat16 float16 float32 float64 int8 int16 int32 int64 uint8".split()

# What is in a description, and what ranks tell each other when they save and load.
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
        self.sizes = {name: size for name, (size, _) in checkpoint.description["files"].items()}

    def read_metadata(self, *arguments, **options):
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
            if isinstance(entry, TensorStorageMetadata):
                check_tensor(name, entry, sum(sizes.values()))
            elif not isinstance(entry, BytesStorageMetadata):
                raise InputError(f"{name} is neither a tensor nor a value")
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

    torch reads the names that it is asked for, and leaves out all others without a word.
    """
    weights = (name.removeprefix("model.") for name in saved if name.startswith("model."))
    if other := next((name for name in weights if name not in names), None):
        raise CheckpointError(
            f"{where} has the weight {other}, and this model has none of that name; use the program "
            "that saved it"
        )


class ReadsPlainValues:
    """A planner's mixin: values that are not tensors are read as torch.load reads weights."""

    def load_bytes(self, read_item, value):
        check_archive(value, f"{read_item.storage_index.fqn}")
        plain = torch.load(value, weights_only=True)
        keys = self.mappings[read_item.dest_index.fqn]
        target = self.original_state_dict
        for key in keys[:-1]:
            target = target.setdefault(key, {})
        target[keys[-1]] = plain


class PlainPlanner(ReadsPlainValues, DefaultLoadPlanner):
    """Loads the tensors and values that a rank requests."""


def reason_of(error):
    """Return in one line the first failure that torch.distributed.checkpoint collected."""
    rank, (failure, _) = min(error.failures.items())
    lines = str(failure).splitlines() or [type(failure).__name__]
    return f"rank {rank}: {lines[0][:500]}"


def check_archive(file, name):
    """Raise InputError unless every entry of a file from torch.save matches its checksum.

    torch.load does not check the checksums, and accepts an entry of any size.
    """
    length = file.seek(0, 2)
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if any(entry.compress_type for entry in entries):
                raise InputError(f"{name} has compressed parts, which torch.save does not write")
            if sum(entry.file_size for entry in entries) > length:
                raise InputError(f"{name} has parts that do not fit into its {length:,} bytes")
            if damaged := archive.testzip():
                raise InputError(f"{name} has changed since it was written ({damaged} differs)")
    except (zipfile.BadZipFile, *UNPICKLING_ERRORS, OSError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{name} cannot be read as what torch.save writes ({error})") from None
    file.seek(0)
