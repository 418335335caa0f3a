# SPDX-License-Identifier: Apache-2.0
"""A folder of tokens, written once by one process and read by every rank as it needs them.

    FOLDER/tokens.json        what is in the folder; its checksum, and one of each file
    FOLDER/tokenizer.json     what made the tokens, unless they are bytes
    FOLDER/training.bin       tokens, two or four bytes each, little-endian, without a header
    FOLDER/held_out.bin
    FOLDER/training-ends.bin  where each document ends, eight bytes each; held_out-ends.bin

The files are mapped into memory: the system reads only the pages that are used, shares them among
all ranks of a machine, and frees them when memory is short. So a rank's own memory does not grow
with the text, and the first batch does not wait until the whole text is read.
"""

import hashlib
import os
import sys
from pathlib import Path

import torch

from extensions.pretraining.packing import PackedDocuments
from extensions.pretraining.tokens import Corpus, read_tokenizer
from files.inputs import (
    MEBIBYTE,
    InputError,
    is_count,
    is_number,
    open_input,
    read_bytes,
    read_json,
)
from files.outputs import to_json
from pipeline.data import DataError

TOKENS_FILE, TOKENIZER = "tokens.json", "tokenizer.json"
TOKEN_PARTS = "training", "held_out"
TOKEN_FILES = *TOKEN_PARTS, *(f"{part}-ends" for part in TOKEN_PARTS)
DTYPE_OF_WIDTH = {2: torch.uint16, 4: torch.int32}  # bytes of a token -> how torch maps it
MOST_TOKENS = {2: 2**16, 4: 2**31}
LARGEST_TOKENS_FILE = 16 * MEBIBYTE
LEAST_BYTES = 1e-6  # per token
CHECKED_AT_ONCE = 2**22  # tokens compared with the vocabulary in one piece
CHECKED_AT_OPENING = 2**30  # tokens per part: 0.25 s per rank where the file is in memory


class MappedTokens:
    """The tokens of a file; a slice is a tensor of int64.

    `tokens` is a one-dimensional tensor that is mapped from the file `path`. Each read first checks
    that nobody has written to the file: other tokens would be trained on in silence, and a program
    that reads beyond the end of a file that has become shorter is killed by the system. A file that
    was put in its place does no harm, because the mapped one stays.
    """

    def __init__(self, tokens, path):
        self.tokens, self.path, self.opened = tokens, path, path.stat()

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, wanted):
        now = self.path.stat() if self.path.is_file() else None
        if (
            now
            and os.path.samestat(now, self.opened)
            and now.st_mtime_ns != self.opened.st_mtime_ns
        ):
            raise SystemExit(
                f"{self.path} was changed since it was opened; make the tokens again with "
                "prepare_data.py"
            )
        return self.tokens[wanted].to(torch.int64)


def is_token_folder(path):
    """Whether `path` is a folder of tokens. Raises DataError for any other folder."""
    if path is None or not os.path.isdir(path):
        return False
    if not os.path.isfile(os.path.join(path, TOKENS_FILE)):
        raise DataError(f"--data: {path} has no {TOKENS_FILE}; make tokens with prepare_data.py")
    return True


def load_tokens(folder, vocabulary, seq_len, packed=False, tokenizer_of_model=None):
    """Return the Corpus in a folder from prepare_data.py, mapped into memory. Raises DataError.

    With `packed` it is a PackedDocuments, which also has the ends of its documents.
    `tokenizer_of_model` is the path of the tokenizer.json that a saved model was trained with, if
    there is one: the tokens have to be those of that tokenizer.

    It checks the names, lengths and sizes of the files, and that the first CHECKED_AT_OPENING
    tokens of each part are in the vocabulary; `check_folder` checks the whole content.
    """
    folder = Path(folder)
    try:
        description = read_tokens_file(folder)
        tokens = {part: map_part(folder, description, part) for part in TOKEN_PARTS}
        ends = tuple(
            map_ends(folder, description, part, len(tokens[part])) for part in TOKEN_PARTS if packed
        )
    except InputError as error:
        raise DataError(f"--data: {error}; make the folder anew with prepare_data.py") from None
    if description["num_tokens"] > vocabulary:
        raise DataError(
            f"--vocabulary {vocabulary} is less than the {description['num_tokens']} tokens in "
            f"{folder}; use at least {description['num_tokens']}, or, with a saved "
            "model, tokens of its own tokenizer"
        )
    for part in TOKEN_PARTS:
        if len(tokens[part]) < seq_len + 1:
            raise DataError(
                f"--data: {folder} has {len(tokens[part])} {part.replace('_', '-')} tokens, and "
                f"--seq-len {seq_len} needs one more than itself; use a smaller one"
            )
    tokenizer = None
    if description["tokenizer"]:
        tokenizer = read_tokenizer(folder / TOKENIZER)
        try:
            compare_tokenizer(folder, description)
        except InputError as error:
            raise DataError(f"--data: {error}; make the folder anew with prepare_data.py") from None
    if tokenizer_of_model is not None:
        check_tokenizer(folder, tokenizer, tokenizer_of_model)
    corpus = (
        tokens["training"], tokens["held_out"], tokenizer, description["num_tokens"],
        description["bytes_per_token"],
    )  # fmt: skip
    if packed:
        return PackedDocuments(*corpus, f"{description['checksum']} packed", ends)
    return Corpus(*corpus, description["checksum"])


def compare_tokenizer(folder, description):
    """Raise InputError if a folder's tokenizer.json is not the one that its tokens.json describes."""
    # An older version did not write its checksum.
    if description.get("tokenizer_sha256") not in (None, digest_of_tokenizer(folder)):
        raise InputError(f"{Path(folder) / TOKENIZER} is not what was written")


def digest_of_tokenizer(folder):
    """Return the checksum of a folder's tokenizer.json, or None if its tokens are bytes."""
    path = Path(folder) / TOKENIZER
    return hashlib.sha256(read_bytes(path)).hexdigest() if path.exists() else None


def check_tokenizer(folder, tokenizer, path):
    """Raise DataError unless every token of a folder means what it means in the tokenizer `path`."""
    names = {number: name for name, number in read_tokenizer(path).get_vocab().items()}
    if tokenizer is None:
        own = "each token is a byte"
    else:
        vocabulary = tokenizer.get_vocab().items()
        other = min(
            (number for name, number in vocabulary if names.get(number) != name), default=-1
        )
        if other < 0:
            return
        own = f"token {other} is {tokenizer.id_to_token(other)[:40]!r} there"
        own += f" and {names[other][:40]!r} here" if other in names else " and nothing here"
    raise DataError(
        f"--data: {folder} was made with another tokenizer than {path} ({own}); make the folder anew "
        f"with prepare_data.py --tokenizer {path}"
    )


def read_tokens_file(folder):
    """Return the content of tokens.json. Raises InputError unless it is complete and valid."""
    path = folder / TOKENS_FILE
    found = read_json(path, LARGEST_TOKENS_FILE)
    if not isinstance(found, dict) or found.get("checksum") != checksum_of_tokens_file(found):
        raise InputError(f"{path} has been changed or is not whole")
    width, files = found.get("bytes_per_number"), found.get("files")
    whole = (
        is_count(width)
        and width in DTYPE_OF_WIDTH
        and is_count(found.get("num_tokens"), MOST_TOKENS[width])
        and is_number(found.get("bytes_per_token"), LEAST_BYTES)
        and isinstance(found.get("tokenizer"), bool)
        and isinstance(files, dict)
        and set(files) == set(TOKEN_FILES)
        and all(map(is_entry, files.values()))
    )
    if not whole:
        raise InputError(f"{path} does not describe tokens")
    return found


def is_entry(entry):
    """Return whether a value from JSON has the length and the checksum of a file."""
    return (
        isinstance(entry, dict)
        and is_count(entry.get("numbers"))
        and entry["numbers"] > 0
        and isinstance(entry.get("sha256"), str)
    )


def checksum_of_tokens_file(description):
    rest = {name: value for name, value in description.items() if name != "checksum"}
    return hashlib.sha256(to_json(rest, sort_keys=True).encode()).hexdigest()


def place_of_tokens(folder, name):
    """Return the path of the file of that name, one of TOKEN_FILES."""
    return Path(folder) / f"{name}.bin"


def map_part(folder, description, part):
    """Return the MappedTokens of "training" or "held_out"."""
    path = place_of_tokens(folder, part)
    tokens = map_file(
        path, description["files"][part], DTYPE_OF_WIDTH[description["bytes_per_number"]]
    )
    check_ids(path, tokens[:CHECKED_AT_OPENING], description["num_tokens"])
    return MappedTokens(tokens, path)


def check_ids(path, tokens, num_tokens):
    """Raise InputError if one of the `tokens`, mapped from the file `path`, is not a token."""
    for part in tokens.split(CHECKED_AT_ONCE):
        # Read as unsigned numbers, negative ones are larger than every token.
        largest = int(part.numpy().view(f"u{part.itemsize}").max())
        if largest >= num_tokens:
            raise InputError(f"{path} has the token {largest}, and there are {num_tokens} tokens")


def map_ends(folder, description, part, length):
    """Return the ends of the documents of a part of `length` tokens, as PackedDocuments has them."""
    path = place_of_tokens(folder, f"{part}-ends")
    ends = map_file(path, description["files"][f"{part}-ends"], torch.int64)
    if ends[0] < 0 or ends[-1] > length or bool((ends[1:] < ends[:-1]).any()):
        raise InputError(f"{path} does not say where documents end")
    return ends


def map_file(path, entry, dtype):
    """Return the numbers of one file as a tensor that is mapped into memory."""
    wanted = entry["numbers"] * dtype.itemsize
    if sys.byteorder != "little":
        raise InputError(f"{path} is little-endian, and this machine is not")
    with open_input(path) as file:
        size = os.fstat(file.fileno()).st_size
    if size != wanted:
        raise InputError(f"{path} has {size:,} bytes instead of {wanted:,}")
    try:
        storage = torch.UntypedStorage.from_file(str(path), False, size)
    except UnicodeEncodeError:
        raise InputError(f"the name {path} is not UTF-8, so torch cannot map the file") from None
    except RuntimeError as error:  # more than the system grants at once
        reason = str(error).rpartition(": ")[2]
        raise InputError(
            f"{path} of {size:,} bytes cannot be mapped into memory ({reason})"
        ) from None
    return torch.empty(0, dtype=dtype).set_(storage)
