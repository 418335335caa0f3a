# SPDX-License-Identifier: Apache-2.0
"""A folder of tokens, written once by one process and read by every rank where it needs them.

    FOLDER/tokens.json         what is in the folder; its checksum, and one of each file
    FOLDER/tokenizer.json      what made the tokens, unless they are bytes
    FOLDER/training-00000.bin  tokens, two or four bytes each, little-endian, without a header
    FOLDER/held_out-00000.bin
    FOLDER/training-ends.bin   where each document ends, eight bytes each; held_out-ends.bin

The files are mapped into memory: the system reads only the pages that are used, shares them among
all ranks of a machine, and frees them when memory is short. So a rank's own memory does not grow
with the text, and the first batch does not wait until the whole text is read.
"""

import hashlib
import os
import sys
from array import array
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch

from extensions.pretraining.packing import PackedDocuments
from extensions.pretraining.tokens import Corpus, read_tokenizer
from guard.files import to_json, write_whole
from guard.inputs import (
    MEBIBYTE,
    InputError,
    is_count,
    is_file_name,
    is_number,
    open_input,
    read_json,
)
from pipeline.data import DataError

TOKENS_FILE, TOKENIZER = "tokens.json", "tokenizer.json"
TOKEN_PARTS = "training", "held_out"
DTYPE_OF_WIDTH = {2: torch.uint16, 4: torch.int32}  # bytes of a token -> how torch maps it
MOST_TOKENS = {2: 2**16, 4: 2**31}
LARGEST_TOKENS_FILE = 16 * MEBIBYTE
MOST_SHARDS = 10_000  # files of a part; each is mapped into memory
LEAST_BYTES = 1e-6  # per token
CHECKED_AT_ONCE = 2**22  # tokens, which are compared with the vocabulary
CHECKED_AT_OPENING = 2**30  # tokens per part: 0.25 s per rank where the file is in memory


class MappedTokens:
    """The tokens of several files, one after the other; a slice is a tensor of int64.

    `shards` are one-dimensional tensors, each mapped from a file.
    """

    def __init__(self, shards):
        self.shards = shards
        self.ends = list(accumulate(map(len, shards)))

    def __len__(self):
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, wanted):
        start, stop, step = wanted.indices(len(self))
        if step != 1:
            raise IndexError("tokens are read in one run")
        parts = []
        for shard, end in zip(self.shards, self.ends):
            first = end - len(shard)
            part = shard[max(start - first, 0) : max(stop - first, 0)]
            if len(part):
                parts.append(part.to(torch.int64))
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class MappedCorpus(Corpus):
    """A Corpus whose tokens stay in their files. `fingerprint` identifies the text."""

    fingerprint: str = ""


@dataclass(frozen=True)
class MappedDocuments(PackedDocuments):
    """A PackedDocuments whose tokens and ends of documents stay in their files."""

    fingerprint: str = ""


def is_token_folder(path):
    return path is not None and os.path.isfile(os.path.join(path, TOKENS_FILE))


def load_tokens(folder, vocabulary, seq_len, packed=False, tokenizer_of_model=None):
    """Return the MappedCorpus in a folder from prepare_data.py. Raises DataError.

    With `packed` it is a MappedDocuments, which also has the ends of its documents.
    `tokenizer_of_model` is the path of the tokenizer.json that a saved model was trained with, if
    there is one: the tokens have to be those of that tokenizer.

    The names, lengths and sizes of the files are checked, and that every token of the first
    CHECKED_AT_OPENING of a part is in the vocabulary; `check_folder` compares all of their content.
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
            f"{folder}; use at least {description['num_tokens']}"
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
    if tokenizer_of_model is not None:
        check_tokenizer(folder, tokenizer, tokenizer_of_model)
    corpus = (
        tokens["training"], tokens["held_out"], tokenizer, description["num_tokens"],
        description["bytes_per_token"],
    )  # fmt: skip
    if packed:
        return MappedDocuments(*corpus, ends, f"{description['checksum']} packed")
    return MappedCorpus(*corpus, description["checksum"])


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
    ends = found.get("ends", {})
    whole = (
        is_count(width)
        and width in DTYPE_OF_WIDTH
        and is_count(found.get("num_tokens"), MOST_TOKENS[width])
        and is_number(found.get("bytes_per_token"), LEAST_BYTES)
        and isinstance(found.get("tokenizer"), bool)
        and isinstance(files, dict)
        and set(files) == set(TOKEN_PARTS)
        and all(
            isinstance(shards, list) and len(shards) <= MOST_SHARDS and all(map(is_shard, shards))
            for shards in files.values()
        )
        and isinstance(ends, dict)
        and all(map(is_shard, ends.values()))
    )
    if not whole:
        raise InputError(f"{path} does not describe tokens")
    return found


def is_shard(shard):
    """Return whether a value from JSON has the name, number of tokens and checksum of a file."""
    return (
        isinstance(shard, dict)
        and isinstance(shard.get("file"), str)
        and is_file_name(shard["file"])
        and is_count(shard.get("tokens"))
        and isinstance(shard.get("sha256"), str)
    )


def checksum_of_tokens_file(description):
    rest = {name: value for name, value in description.items() if name != "checksum"}
    return hashlib.sha256(to_json(rest, sort_keys=True).encode()).hexdigest()


def map_part(folder, description, part):
    """Return the MappedTokens of "training" or "held_out"."""
    dtype = DTYPE_OF_WIDTH[description["bytes_per_number"]]
    shards = [shard for shard in description["files"][part] if shard["tokens"]]
    mapped, left = [], CHECKED_AT_OPENING
    for shard in shards:
        mapped.append(map_file(folder, shard, dtype))
        check_ids(folder / shard["file"], mapped[-1][:left], description["num_tokens"])
        left = max(0, left - len(mapped[-1]))
    return MappedTokens(mapped)


def check_ids(path, tokens, num_tokens):
    """Raise InputError if one of the `tokens`, mapped from the file `path`, is not a token."""
    for part in tokens.split(CHECKED_AT_ONCE):
        # Without a sign, so that the largest number also stands for the negative ones.
        largest = int(part.numpy().view(f"u{part.itemsize}").max())
        if largest >= num_tokens:
            raise InputError(f"{path} has the token {largest}, and there are {num_tokens} tokens")


def map_ends(folder, description, part, length):
    """Return the ends of the documents of a part of `length` tokens, as PackedDocuments has them."""
    shard = description.get("ends", {}).get(part)
    if shard is None:
        raise InputError(f"{folder} does not say where its documents end")
    ends = map_file(folder, shard, torch.int64)
    if not len(ends) or ends[0] < 0 or ends[-1] > length or bool((ends[1:] < ends[:-1]).any()):
        raise InputError(f"{folder / shard['file']} does not say where documents end")
    return ends


def map_file(folder, shard, dtype):
    """Return the numbers of one file as a tensor that is mapped into memory."""
    path, wanted = folder / shard["file"], shard["tokens"] * dtype.itemsize
    if sys.byteorder != "little":
        raise InputError(f"{folder} is little-endian, and this machine is not")
    with open_input(path) as file:
        size = os.fstat(file.fileno()).st_size
    if size != wanted:
        raise InputError(f"{path} has {size:,} bytes instead of {wanted:,}")
    if not size:
        return torch.empty(0, dtype=dtype)
    storage = torch.UntypedStorage.from_file(str(path), False, size)
    return torch.empty(0, dtype=dtype).set_(storage)


def check_folder(folder):
    """Compare every file with its checksum. Raises InputError that names the first damaged file."""
    folder = Path(folder)
    description = read_tokens_file(folder)
    for part in TOKEN_PARTS:
        map_part(folder, description, part)
        ends = description.get("ends", {})
        for shard in [*description["files"][part], *([ends[part]] if part in ends else [])]:
            digest = hashlib.sha256()
            with open_input(folder / shard["file"]) as file:
                while block := file.read(MEBIBYTE):
                    digest.update(block)
            if digest.hexdigest() != shard["sha256"]:
                raise InputError(f"{folder / shard['file']} is not what was written")
    return description


class TokenWriter:
    """Writes the files of one part, each with at most `most` tokens of `width` bytes."""

    def __init__(self, folder, part, width, most):
        self.folder, self.part, self.width, self.most = Path(folder), part, width, most
        self.made = []  # names of files
        self.shards, self.file, self.ends, self.total = [], None, array("q"), 0

    def write(self, tokens):
        """Append a list of tokens."""
        while tokens:
            if self.file is None:
                self.open()
            part, tokens = tokens[: self.most - self.count], tokens[self.most - self.count :]
            content = torch.tensor(part, dtype=torch.int64).to(DTYPE_OF_WIDTH[self.width])
            content = content.view(torch.uint8).numpy().tobytes()
            self.file.write(content)
            self.digest.update(content)
            self.count += len(part)
            self.total += len(part)
            if self.count == self.most:
                self.close()

    def end_document(self):
        """Note that a document ends here."""
        self.ends.append(self.total)

    def write_ends(self):
        """Write the ends of the documents. Returns the entry for tokens.json."""
        name, content = f"{self.part}-ends.bin", self.ends.tobytes()
        with open(self.folder / name, "xb") as file:
            self.made.append(name)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        digest = hashlib.sha256(content).hexdigest()
        return {"file": name, "tokens": len(self.ends), "sha256": digest}

    def open(self):
        if len(self.shards) == MOST_SHARDS:
            raise DataError(
                f"--shard-tokens {self.most}: the {self.part.replace('_', '-')} part has more than "
                f"{MOST_SHARDS:,} times as many tokens; use a larger number"
            )
        name = f"{self.part}-{len(self.shards):05}.bin"
        self.file, self.name = open(self.folder / name, "xb"), name
        self.made.append(name)
        self.digest, self.count = hashlib.sha256(), 0

    def close(self):
        """Close the file that is being written, if there is one."""
        if self.file is not None:
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
            shard = {"file": self.name, "tokens": self.count, "sha256": self.digest.hexdigest()}
            self.shards.append(shard)
            self.file = None


def write_tokens_file(folder, writers, width, num_tokens, bytes_per_token, tokenizer):
    """Write tokens.json last, which makes the folder valid; `writers` has a writer per part."""
    files = {part: writer.shards for part, writer in writers.items()}
    ends = {part: writer.write_ends() for part, writer in writers.items()}
    description = {
        "bytes_per_number": width, "num_tokens": num_tokens, "bytes_per_token": bytes_per_token,
        "tokenizer": tokenizer, "files": files, "ends": ends,
    }  # fmt: skip
    description["checksum"] = checksum_of_tokens_file(description)
    write_whole(Path(folder) / TOKENS_FILE, to_json(description, indent=1) + "\n")
    return description
