# SPDX-License-Identifier: Apache-2.0
"""Reads and writes safetensors files, one tensor at a time.

    8 bytes   the length of the header, a whole number, little-endian
    header    JSON: {name: {"dtype", "shape", "data_offsets": [first, last] after the header}}
    data      the tensors, one after the other, little-endian, without gaps

(Format: huggingface.co/docs/safetensors.) The header gives the position of each tensor, so a rank
reads only its own tensors, and a truncated file is detected before any tensor is read. The format
contains no code.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from files.inputs import MEBIBYTE, InputError, is_count, is_shape, open_input, parse_json
from files.outputs import replace_file

LARGEST_HEADER = 100 * MEBIBYTE  # the limit of the format
ALIGNMENT = 8  # bytes: where the data begin
DTYPE_OF_CODE = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}


@dataclass(frozen=True)
class StoredTensor:
    """The position of a tensor: `length` bytes of the file `path`, from byte `start` on."""

    path: Path
    dtype: torch.dtype
    shape: tuple
    start: int
    length: int

    def read(self):
        """Read the tensor into new memory. Raises InputError if the file has become shorter."""
        content = torch.empty(self.length, dtype=torch.uint8)
        view, done = memoryview(content.numpy()), 0
        with open_input(self.path) as file:
            file.seek(self.start)
            while done < self.length:
                count = file.readinto(view[done:])
                if not count:
                    raise InputError(f"{self.path} has changed while it was read")
                done += count
        return content.view(self.dtype).view(self.shape)


def stored_tensors(path):
    """Return {name: StoredTensor} of a safetensors file. Raises InputError if it is incomplete."""
    with open_input(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, LARGEST_HEADER):
            raise InputError(f"{path} is not a complete safetensors file")
        text = file.read(length)
    try:
        header = parse_json(text.decode(), f"the header of {path}")
    except UnicodeDecodeError:
        raise InputError(f"the header of {path} is not text in UTF-8") from None
    if not isinstance(header, dict):
        raise InputError(f"the header of {path} is not a JSON object")
    header.pop("__metadata__", None)
    found = {name: stored(path, 8 + length, name, entry) for name, entry in header.items()}
    places = sorted((tensor.start, tensor.start + tensor.length) for tensor in found.values())
    ends = [8 + length, *(end for _, end in places)]
    if max(ends) > size:
        raise InputError(
            f"{path} is truncated: it has {size:,} bytes, and its tensors need {max(ends):,}"
        )
    if [*(start for start, _ in places), size] != ends:
        raise InputError(
            f"{path} is damaged: its tensors do not lie one after the other to its end"
        )
    return found


def stored(path, data, name, entry):
    """Return the StoredTensor of a header's entry; the file's data begin at byte `data`."""
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape = DTYPE_OF_CODE.get(str(entry.get("dtype"))), entry.get("shape")
    offsets = entry.get("data_offsets")
    if dtype is None:
        known = ", ".join(DTYPE_OF_CODE)
        raise InputError(f"{path}: the type of {name} is not one of {known}")
    places = isinstance(offsets, list) and all(map(is_count, offsets))
    if not places or not is_shape(shape):
        raise InputError(f"{path}: the header does not say where {name} lies")
    length = math.prod(shape) * dtype.itemsize
    if len(offsets) != 2 or offsets[1] - offsets[0] != length:
        raise InputError(f"{path}: {name} of shape {tuple(shape)} does not have {length:,} bytes")
    return StoredTensor(Path(path), dtype, tuple(shape), data + offsets[0], length)


def write_tensors(path, tensors):
    """Write a safetensors file with `tensors`, {name: tensor}, atomically.

    Copies one tensor at a time to the CPU.
    """
    header, total = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        length = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": CODE_OF_DTYPE[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [total, total + length],
        }
        total += length
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)

    def write(partial):
        with open(partial, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors.values():
                plain = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
                file.write(memoryview(plain.numpy()))

    replace_file(path, write)
