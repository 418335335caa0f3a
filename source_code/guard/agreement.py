# SPDX-License-Identifier: Apache-2.0
"""Compares what must be equal on all ranks before the first message: flags, text, torch, code."""

import ctypes
import hashlib
import json
import os
import socket
import sys
import time
import zlib
from pathlib import Path

import torch

from files.inputs import InputError, open_input

PACKAGES = ("pipeline", "files", "guard", "lab", "extensions", "planning", "broken")
MOST_FILES = 1000  # compared of a folder
SAMPLES, SAMPLE = 64, 4096  # pieces read of a file, and bytes per piece


class Disagreement(Exception):
    """Ranks were started differently; the text names one rank, the setting, and both values."""


class Missing(Exception):
    """Some ranks have not joined; `ranks` has their numbers."""

    def __init__(self, ranks):
        super().__init__(ranks_text(ranks))
        self.ranks = ranks


def agree(store, rank, num_ranks, settings, timeout, arrived=None):
    """Wait until all ranks have joined. Returns {rank: process id} of those on this machine.

    `settings` are compared by name, with the number of ranks, torch's version and the code. The
    numbers of the ranks that have joined are added to the set `arrived`. Raises Disagreement for
    the first rank whose settings differ from those of rank 0, with the same text on all ranks, and
    Missing after `timeout` seconds.
    """
    mine = {"the number of ranks": num_ranks, "torch": torch.__version__, "the code": version()}
    place = socket.gethostname(), os.getpid()
    store.set(f"settings/{rank}", json.dumps([*place, {**mine, **settings}]))
    found, deadline = {}, time.monotonic() + timeout
    missing = set(range(num_ranks))
    while missing:
        for other in sorted(missing):
            if store.check([f"settings/{other}"]):
                found[other] = json.loads(store.get(f"settings/{other}"))
                if arrived is not None:
                    arrived.add(other)
        missing -= set(found)
        if 0 in found and len({each[2]["the number of ranks"] for each in found.values()}) > 1:
            break  # the counts differ, so not all ranks will join
        if missing and time.monotonic() > deadline:
            raise Missing(sorted(missing))
        time.sleep(0.02 if missing else 0)
    first = found[0][2]
    for other in sorted(found):
        if found[other][2] != first:
            raise Disagreement(difference_text(other, found[other][2], first))
    return {other: each[1] for other, each in found.items() if each[0] == place[0]}


def difference_text(rank, settings, others):
    """The sentence about `rank`, whose settings differ from those of rank 0."""
    names = [n for n in {**others, **settings} if settings.get(n) != others.get(n)]
    parts = [f"{name} is {settings.get(name)} there and {others.get(name)} here" for name in names]
    more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
    return (
        f"rank {rank} was started differently from rank 0 (here): {', '.join(parts[:3])}{more}; give "
        "all ranks the same command, text, torch and copy of the course"
    )


def ranks_text(ranks):
    """Ranks in words, such as "rank 2" or "ranks 1, 3"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def version():
    """The version of this code: the first 12 digits of a SHA-256 of the packages and the script."""
    root = Path(__file__).resolve().parents[1]
    files = [file for package in PACKAGES for file in sorted((root / package).rglob("*.py"))]
    files += [path for path in [Path(sys.argv[0])] if path.is_file()]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def settings_of(arguments, read=None):
    """{name: value} of what must be equal on all ranks: the flags, the text, and the files that the
    flags in `read`, {flag: attribute}, name: each node may have its own copies.

    --device may differ. --data may also differ, since a node may have another path; the content of
    the text is compared. Of --checkpoints, the ranks compare which checkpoint the training continues.
    """
    plain = (str, int, float, list, tuple, type(None))
    own = {name: value for name, value in vars(arguments).items() if isinstance(value, plain)}
    for name in ("device", "data", "num_ranks"):
        own.pop(name, None)
    newest = own.pop("from_checkpoint", None)
    settings = {"--" + name.replace("_", "-"): value for name, value in own.items()}
    settings["the newest checkpoint in --checkpoints"] = newest
    if getattr(arguments, "text", None) is not None:
        settings["the text"] = checksum_of(arguments.text)
        if getattr(arguments.text, "fingerprint", ""):  # which the folder's files may not have
            settings["the content of --data"] = digest_of(arguments.data)
    for flag, name in (read or {}).items():
        if flag != "--checkpoints" and isinstance(own.get(name), str):
            settings[f"the content of {flag}"] = digest_of(own[name])
    return json.loads(json.dumps(settings))  # as other ranks read it: a tuple becomes a list


def digest_of(path):
    """A digest of a file, or of the files in a folder, in milliseconds even for a large model.

    It covers each file's name and size, and its content at SAMPLES places: all of a short file.
    """
    digest = hashlib.sha256()
    folder = os.path.isdir(path)
    names = sorted(os.listdir(path))[:MOST_FILES] if folder else [""]
    for name in names:
        try:
            with open_input(os.path.join(path, name) if folder else path) as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(f"{name!r} {size}".encode())
                for number in range(SAMPLES):
                    file.seek(max(0, size - SAMPLE) * number // (SAMPLES - 1))
                    digest.update(file.read(SAMPLE))
        except (InputError, OSError):  # a folder in it, or what the run itself cannot read
            continue
    return digest.hexdigest()[:12]


def checksum_of(text):
    """A checksum of all tokens; for tokens in files, the fingerprint stored in their folder."""
    if getattr(text, "fingerprint", ""):
        return text.fingerprint[:12]
    checksum = 0
    for tokens in (text.training, text.held_out):
        size = tokens.nbytes
        content = (ctypes.c_char * size).from_address(tokens.data_ptr()) if size else b""
        checksum = zlib.crc32(content, checksum)
    return f"{checksum:08x}"
