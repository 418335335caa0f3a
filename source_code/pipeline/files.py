"""Writes files: each whole or not at all, and JSON that every program can read."""

import errno
import json
import math
import os
import sys
from pathlib import Path

not_written = []  # the flags of outputs that could not be written: the run then ends with status 1


def write_whole(path, text):
    """Write a file so that it is either the old one or the new one, never half of it."""
    path = Path(os.path.realpath(path))  # a link stays a link
    if os.path.lexists(path) and not path.is_file():  # /dev/null must not become a file
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # The name of a file, which may be in the text, need not be one in UTF-8.
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_output(flag, path, text):
    """Write what a run leaves: a disk that is full costs this file and a sentence, not the run."""
    try:
        write_whole(path, text)
    except OSError as error:
        say_not_written(flag, path, error)


def say_not_written(flag, path, error):
    """Say on standard error what is missing, and note that the run does not end well."""
    sentence = f"{flag} {path} was not written ({error.strerror}); nothing else is lost"
    print(sentence, file=sys.stderr, flush=True)
    not_written.append(flag)


def to_json(value, **options):
    """`value` as JSON, which has no NaN and no infinity: null stands for them."""
    return json.dumps(without_not_finite(value), allow_nan=False, **options)


def json_line(row):
    """`row`, a dictionary, as one line."""
    return to_json(row) + "\n"


def without_not_finite(value):
    """The same value with None in place of numbers that are not finite."""
    if isinstance(value, dict):
        return {name: without_not_finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_not_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
