# SPDX-License-Identifier: Apache-2.0
"""Writes a folder of tokens, and compares one with its checksums; token_files.py says what is in it."""

import hashlib
import os
from array import array
from pathlib import Path

import torch

from extensions.pretraining.token_files import (
    DTYPE_OF_WIDTH,
    MOST_SHARDS,
    TOKEN_PARTS,
    TOKENS_FILE,
    checksum_of_tokens_file,
    map_part,
    read_tokens_file,
)
from guard.files import to_json, write_whole
from guard.inputs import MEBIBYTE, InputError, open_input
from pipeline.data import DataError


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
