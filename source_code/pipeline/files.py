"""Writes files: each whole or not at all, and lines of JSON that every program can read."""

import errno
import json
import math
import os
from pathlib import Path


def write_whole(path, text):
    """Write a file so that it is either the old one or the new one, never half of it."""
    path = Path(path).resolve()  # a link stays a link
    if path.exists() and not path.is_file():  # /dev/null must not become a file
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    os.replace(partial, path)


def json_line(row):
    """`row`, a dictionary, as one line. JSON has no NaN and no infinity: null stands for them."""
    row = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
    return json.dumps(row, allow_nan=False) + "\n"
