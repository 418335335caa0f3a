# SPDX-License-Identifier: Apache-2.0
"""Writes files: each whole or not at all, and JSON that every program can read."""

import errno
import json
import math
import os
import secrets
import stat
import sys
from pathlib import Path

MOST_LINKS = 40  # followed one after the other, as in Linux
not_written = []  # flags of outputs that could not be written; if any, the run ends with status 1
no_links = set()  # places that `can_be_written` has found without a link, for this run's outputs


def write_whole(path, text):
    """Write a text file so that it is either the old one or the new one, never half of it."""
    # The text may contain a file name, which need not be valid UTF-8.
    content = text.encode("utf-8", errors="backslashreplace")
    replace_file(path, lambda partial: partial.write_bytes(content))


def replace_file(path, write):
    """Write a file by `write(partial)`, sync it, and rename it atomically to its name.

    A crash leaves the old file or the new one, never a part of either.
    """
    path = place_of(path)
    if os.path.lexists(path) and not path.is_file():  # /dev/null must not become a file
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    partial = new_file_beside(path)
    try:
        write(partial)
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
        if is_held(path):
            raise OSError(errno.EBUSY, "another run is writing it", str(path))
        os.replace(partial, path)
    except OSError as error:
        if str(error.filename or partial) == str(partial):  # a write names no file
            error.filename = str(path)  # the one that a user knows
        raise
    finally:
        partial.unlink(missing_ok=True)


def is_held(path):
    """Return whether a running job writes this file, a log, and has locked it until its end."""
    try:
        import fcntl

        with open(path, "rb") as file:  # a shared lock: all ranks of a run may look at once
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):  # there is no such file, or there are no locks
        pass
    return False


def place_of(path):
    """Return the path at which an output is written: its links are followed, so that they stay.

    A link that was made at its place since `can_be_written` looked there is not followed: the
    output replaces it.

    Raises OSError for a link in a folder that others may write to, whoever made the link: it may
    lead to any file of this user. What others put there later is replaced, not followed. On the
    way to the file's folder, only links that others made are rejected: a link to another disk is
    usual.
    """
    path = Path(path)
    for folder in path.absolute().parents:
        if os.path.islink(folder) and others_may_write(folder.parent):
            if os.lstat(folder).st_uid not in (os.geteuid(), 0, folder.parent.stat().st_uid):
                raise OSError(errno.EACCES, "it is a link of another user", str(folder))
    for _ in range(MOST_LINKS):
        path = Path(os.path.realpath(path.parent)) / path.name
        if not os.path.islink(path) or path in no_links:
            return path
        if others_may_write(path.parent):
            raise OSError(errno.EACCES, "it is a link in a folder of others", str(path))
        path = path.parent / os.readlink(path)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def others_may_write(folder):
    """Return whether users other than this one and root may make files in a folder.

    The owner and the mode of the folder say so. On Windows they do not: the function returns False.
    """
    found = os.stat(folder)
    by_mode = found.st_mode & (stat.S_IWOTH | stat.S_IWGRP)
    return os.name != "nt" and bool(by_mode or found.st_uid not in (os.geteuid(), 0))


def new_file_beside(path):
    """Make an empty file in the folder of `path`, and return its path.

    Its name cannot be guessed, and the file is new: in a folder that everybody may write to,
    somebody could have put a link at a known name, and the link would be followed.
    """
    beside = Path(path).with_name(f".{Path(path).name}.{secrets.token_hex(4)}")
    try:
        os.close(os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    return beside


def can_be_written(path):
    """Return whether a file can be created or replaced at `path`, links resolved."""
    try:
        real = place_of(path)
    except OSError:
        return False
    if not os.path.basename(path):
        return False
    if os.path.exists(real) and not (os.path.isfile(real) and os.access(real, os.W_OK)):
        return False
    if os.path.exists(real) and is_kept_for_its_owner(real):
        return False
    # Permissions are not enough to decide (root, read-only mounts, /proc), so try it.
    try:
        os.remove(new_file_beside(real))
    except OSError:
        return False
    no_links.add(real)
    return True


def is_kept_for_its_owner(path):
    """Return whether a file may not be replaced: another user's, where all may make files."""
    folder = os.stat(os.path.dirname(path))
    owners = os.stat(path).st_uid, folder.st_uid, 0
    return os.name != "nt" and bool(folder.st_mode & stat.S_ISVTX) and os.geteuid() not in owners


def write_output(flag, path, text):
    """Write an output of a run; on an error print a sentence and let the run continue."""
    try:
        write_whole(path, text)
    except OSError as error:
        say_not_written(flag, path, error)


def say_not_written(flag, path, error):
    """Print to standard error which output is missing, and note that the run ends with status 1."""
    sentence = f"{flag} {path} was not written ({error.strerror}); nothing else is lost"
    print(sentence, file=sys.stderr, flush=True)
    not_written.append(flag)


def sentence_of(error):
    """Return the text of an error, for an OSError its reason and the file's path."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error)


def to_json(value, **options):
    """Return `value` as JSON, with null for NaN and infinity, which JSON does not have."""
    return json.dumps(without_not_finite(value), allow_nan=False, **options)


def json_line(row):
    """Return `row`, a dictionary, as one line of JSON."""
    return to_json(row) + "\n"


def without_not_finite(value):
    """Return the same value with None in place of numbers that are not finite."""
    if isinstance(value, dict):
        return {name: without_not_finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_not_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
