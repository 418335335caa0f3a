# SPDX-License-Identifier: Apache-2.0
"""Writes a folder of tokens, and compares one with its checksums; token_files.py says what is in it."""

import hashlib
import os
from array import array
from pathlib import Path

import torch

from extensions.pretraining.token_files import (
    DTYPE_OF_WIDTH,
    TOKEN_PARTS,
    TOKENS_FILE,
    checksum_of_tokens_file,
    compare_tokenizer,
    digest_of_tokenizer,
    map_part,
    place_of_tokens,
    read_tokens_file,
)
from files.inputs import MEBIBYTE, InputError, open_input
from files.outputs import to_json, write_whole


def check_folder(folder):
    """Compare every file with its checksum. Raises InputError that names the first damaged file."""
    folder = Path(folder)
    description = read_tokens_file(folder)
    for part in TOKEN_PARTS:
        map_part(folder, description, part)
    for name, entry in description["files"].items():
        path, digest = place_of_tokens(folder, name), hashlib.sha256()
        with open_input(path) as file:
            while block := file.read(MEBIBYTE):
                digest.update(block)
        if digest.hexdigest() != entry["sha256"]:
            raise InputError(f"{path} is not what was written")
    compare_tokenizer(folder, description)
    return description


class TokenWriter:
    """Writes the two files of one part: its tokens, of `width` bytes, and where documents end.

    `claimed` is the NewFolder that they lie in. Raises ClaimError as its `check` does.
    """

    def __init__(self, claimed, part, width):
        self.claimed, self.part, self.width = claimed, part, width
        self.made = []  # names of files
        self.entries = {}  # those of tokens.json, by the name of the file
        self.file, self.digest, self.ends, self.total = None, hashlib.sha256(), array("q"), 0

    def write(self, tokens):
        """Append a list of tokens."""
        if self.file is None:
            self.file = self.open(self.part)
        content = torch.tensor(tokens, dtype=torch.int64).to(DTYPE_OF_WIDTH[self.width])
        content = content.view(torch.uint8).numpy().tobytes()
        self.file.write(content)
        self.digest.update(content)
        self.total += len(tokens)

    def end_document(self):
        """Note that a document ends here."""
        self.ends.append(self.total)

    def open(self, name):
        path = place_of_tokens(self.claimed.folder, name)
        self.claimed.check("--out", path.name)
        file = open(path, "xb")
        self.made.append(path.name)
        return file

    def write_beside(self, name, text):
        """Write a file of the whole folder."""
        self.claimed.check("--out", name)
        self.made.append(name)
        write_whole(self.claimed.folder / name, text)

    def close(self):
        """Close the file of the tokens, if there are any, and write the ends of the documents."""
        if self.file is None:
            return
        self.close_file(self.file, self.part, self.total, self.digest)
        name, content = f"{self.part}-ends", self.ends.tobytes()
        file = self.open(name)
        file.write(content)
        self.close_file(file, name, len(self.ends), hashlib.sha256(content))

    def close_file(self, file, name, count, digest):
        file.flush()
        os.fsync(file.fileno())
        file.close()
        self.entries[name] = {"numbers": count, "sha256": digest.hexdigest()}


def write_tokens_file(folder, writers, width, num_tokens, bytes_per_token, tokenizer):
    """Write tokens.json last, which makes the folder valid; `writers` has a writer per part."""
    files = {name: entry for one in writers.values() for name, entry in one.entries.items()}
    description = {
        "bytes_per_number": width, "num_tokens": num_tokens, "bytes_per_token": bytes_per_token,
        "tokenizer": tokenizer, "tokenizer_sha256": digest_of_tokenizer(folder), "files": files,
    }  # fmt: skip
    description["checksum"] = checksum_of_tokens_file(description)
    writers[TOKEN_PARTS[0]].write_beside(TOKENS_FILE, to_json(description, indent=1) + "\n")
    return description
