# SPDX-License-Identifier: Apache-2.0
"""The text, the tokens, the batches.

Tokens are bytes. The last tenth of the text is held out. A batch is drawn from (seed, step) alone,
so every rank can make the batch of any step by itself, also after a restart.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import torch

DEFAULT_TEXT = Path(__file__).with_name("field_guide.txt")
DEFAULT_SHA256 = "cc916d82a80c1af5682c9e436e9ca1cf3d7c3e012e3f088d737b99cd18600dc0"


class DataError(ValueError):
    """A text cannot be used for training; the message says what to do."""


@dataclass(frozen=True)
class Text:
    """The training part and the held-out part of a text: byte tokens, int64, one-dimensional."""

    training: torch.Tensor
    held_out: torch.Tensor

    def batch(self, step, batch_size, seq_len, seed=0):
        """Inputs and targets of `step`, both (batch_size, seq_len); targets are one token later."""
        # A CPU generator takes the low 32 bits of its seed: the golden ratio spreads the seeds
        # over them, so that no two share the batches of their first steps.
        generator = torch.Generator().manual_seed((seed * 2654435769 + step) % 2**32)
        last_start = len(self.training) - seq_len - 1
        starts = torch.randint(last_start + 1, (batch_size,), generator=generator)
        rows = torch.stack([self.training[start : start + seq_len + 1] for start in starts])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def load_text(path=None, seq_len=32):
    """Read a text file, or the course's own text when `path` is None. Raises DataError."""
    source = DEFAULT_TEXT if path is None else Path(path)
    try:
        content = source.read_bytes().removeprefix(b"\xef\xbb\xbf")  # files of Windows begin so
    except OSError as error:
        raise DataError(
            f"--data: {source} cannot be read ({error.strerror}); name a text file"
        ) from None
    if path is None and hashlib.sha256(content).hexdigest() != DEFAULT_SHA256:
        raise DataError(
            f"{source.name} has been changed, so no expected loss holds; restore it, "
            "or pass your own text with --data"
        )
    check_is_text(content, source)
    return split_text(content, seq_len, source)


def check_is_text(content, source):
    """Raise DataError if `content` is not plain text, whose bytes would be trained on silently."""
    try:
        is_text = "\0" not in content.decode()
    except UnicodeDecodeError:
        is_text = False
    if not is_text:
        raise DataError(
            f"--data: {source} is not text in UTF-8; convert it, or name the text from which it was "
            "made"
        )
    if begins_json(content):
        raise DataError(
            f"--data: {source} has JSON, and its braces would be learnt, too; make tokens of its texts "
            "with the course's prepare_data.py, which reads JSON lines, and name the folder of tokens"
        )


def begins_json(content):
    """Return whether bytes begin a JSON object with a name, or an array of such objects."""
    return re.match(rb'(\xef\xbb\xbf)?\s*(\[\s*)?\{\s*"', content) is not None


def split_text(content, seq_len, source):
    """Return a Text from bytes. Raises DataError, with the name `source`, if it is too short."""
    shortest = 10 * (seq_len + 1)  # so that the held-out tenth still has one sequence
    if len(content) < shortest:
        raise DataError(
            f"--data: {source} has {len(content)} bytes, and --seq-len {seq_len} needs at least "
            f"{shortest}; use a longer text or a smaller --seq-len"
        )
    tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    cut = len(tokens) - len(tokens) // 10
    return Text(tokens[:cut], tokens[cut:])
