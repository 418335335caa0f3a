# SPDX-License-Identifier: Apache-2.0
"""Opens every file that a run reads, which must be a regular file of a bounded size.

A read from a named pipe or a terminal may block for ever, and a device such as /dev/zero has no
end. Data that one rank reads from them is no longer available to other ranks.
"""

import errno
import json
import math
import os
import stat
from contextlib import contextmanager

MEBIBYTE = 2**20
LARGEST = 1024 * MEBIBYTE  # bytes read as a whole, unless a caller sets a lower limit
LARGEST_NUMBER = 1e300
MOST_LEVELS = 100  # of JSON in JSON: what recurses into the value stays within Python's limit
MOST_DIMENSIONS = 8  # of a tensor; a product of thousands of sizes would take minutes


class InputError(ValueError):
    """A file cannot be used; the text names it and says why, and can follow a flag's name."""


@contextmanager
def open_input(path):
    """A context with a regular file to read bytes from.

    Raises InputError for anything else, and if a read fails, as on a damaged disk.
    """
    try:
        file = open(path, "rb", opener=open_at_once)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from None
    except ValueError:  # a character that no name of a file can have
        raise InputError(f"{str(path)!r} cannot be the name of a file") from None
    with file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise InputError(f"{path} is not a regular file")
        try:
            yield file
        except OSError as error:
            raise InputError(f"{path} cannot be read ({error.strerror})") from None


def printable(name):
    """The name of a file as it is printed: quoted if it has control characters of a terminal."""
    return name if name.isprintable() else ascii(name)


def open_at_once(path, flags):
    """Open without waiting for the other end of a named pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_as_it_is(path, most):
    """Return at most `most` bytes of a regular file in a folder that others write to. Raises OSError.

    Whoever looks first and opens then may open something else, such as a pipe or another's link.
    """
    names = "O_NONBLOCK", "O_NOFOLLOW", "O_BINARY"  # a system lacks some of them
    flags = sum(getattr(os, name, 0) for name in names)
    with open(os.open(path, os.O_RDONLY | flags), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file any more", str(path))
        return file.read(most)


def memory_of_machine():
    """Return the bytes of this machine's memory, infinite on systems that do not say.

    In a container that may not ask, the number of pages is -1.
    """
    try:
        pages = os.sysconf("SC_PHYS_PAGES")
        return os.sysconf("SC_PAGE_SIZE") * pages if pages > 0 else math.inf
    except (AttributeError, OSError, ValueError):
        return math.inf


def read_bytes(path, most=LARGEST):
    """Return the content of a regular file of at most `most` bytes, else raise InputError."""
    content = bytearray()
    with open_input(path) as file:
        while block := file.read(MEBIBYTE):
            content += block
            if len(content) > most:
                raise InputError(f"{path} has more than {most:,} bytes")
    return bytes(content)


def read_text(path, most=LARGEST):
    """Return such a file's text, as UTF-8 in every locale, without a byte order mark."""
    try:
        return read_bytes(path, most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not text in UTF-8 (byte {error.start})") from None


def read_json(path, most=LARGEST):
    """Return the value in a JSON file. Raises InputError."""
    return parse_json(read_text(path, most), path)


def parse_json(text, name):
    """Return the value of JSON text; reject NaN and Infinity, which Python would accept."""
    try:
        value = json.loads(text, parse_constant=reject_constant)
    except (ValueError, RecursionError) as error:
        fault = str(error).partition("; use sys.")[0]  # Python's own advice helps no reader here
        raise InputError(f"{name} is not JSON ({fault})") from None
    level = [[value]]
    for _ in range(MOST_LEVELS + 1):
        parts = (whole.values() if isinstance(whole, dict) else whole for whole in level)
        level = [part for whole in parts for part in whole if isinstance(part, (dict, list))]
        if not level:
            return value
    raise InputError(f"{name} has JSON of more than {MOST_LEVELS} levels")


def reject_constant(constant):
    raise ValueError(f"{constant} is not a number")


def shown(value):
    """Return a value as JSON, cut short; for a text, also say that it is in quotes."""
    text = json.dumps(value)[:40]
    return f"{text} in quotes" if isinstance(value, str) else text


def is_number(value, least=-math.inf, most=math.inf):
    """Return whether a value from JSON is a finite number in that range."""
    return type(value) in (int, float) and least <= value <= most and abs(value) <= LARGEST_NUMBER


def is_count(value, most=2**53):
    """Return whether a value from JSON is a whole number from 0 to `most`."""
    return type(value) is int and 0 <= value <= most


def is_shape(value):
    """Return whether a value from a file is a list of the sizes of a tensor, whose product is a count."""
    if not isinstance(value, (list, tuple)) or len(value) > MOST_DIMENSIONS:
        return False
    return all(map(is_count, value)) and is_count(math.prod(value))


def is_file_name(value):
    """Return whether a value from JSON can be the name of a file in a folder."""
    return (
        isinstance(value, str)
        and os.path.basename(value) == value != ""
        and value not in (".", "..")
        and value.isprintable()  # no NUL and no lone surrogate
        and len(value.encode()) <= 255
    )
