"""Opens every file that a run reads: a regular file of a bounded size, or one sentence.

A named pipe or a terminal would be waited for without end, a device such as /dev/zero has no end,
and what one rank takes from either is gone for the others.
"""

import json
import math
import os
import stat

MEBIBYTE = 2**20
LARGEST = 1024 * MEBIBYTE  # of what is read as a whole, unless a reader says less
LARGEST_NUMBER = 1e300


class InputError(ValueError):
    """A file that cannot be read; the text names it and says why, and fits behind a flag."""


def open_input(path):
    """A regular file, opened to be read as bytes. Raises InputError for all else."""
    try:
        file = open(path, "rb", opener=open_at_once)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise InputError(f"{path} is no regular file")
    return file


def open_at_once(path, flags):
    """Open without waiting for the other end of a named pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_bytes(path, most=LARGEST):
    """The content of a regular file of at most `most` bytes. Raises InputError for all else."""
    content = bytearray()
    with open_input(path) as file:
        try:
            while block := file.read(MEBIBYTE):
                content += block
                if len(content) > most:
                    raise InputError(f"{path} has more than {most:,} bytes")
        except OSError as error:
            raise InputError(f"{path} cannot be read ({error.strerror})") from None
    return bytes(content)


def read_text(path, most=LARGEST):
    """The same as text, in UTF-8 whatever the locale; a byte order mark is left out."""
    try:
        return read_bytes(path, most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no text in UTF-8 (byte {error.start})") from None


def read_json(path, most=LARGEST):
    """The value in a JSON file."""
    return parse_json(read_text(path, most), path)


def parse_json(text, name):
    """The value of JSON text. NaN and Infinity, which Python would take, are no JSON."""
    try:
        return json.loads(text, parse_constant=reject_constant)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is no JSON ({error})") from None


def reject_constant(constant):
    raise ValueError(f"{constant} is no number")


def is_number(value, least=-math.inf, most=math.inf):
    """Whether a value from JSON is a finite number in that range."""
    return type(value) in (int, float) and least <= value <= most and abs(value) <= LARGEST_NUMBER


def is_count(value, most=2**53):
    """Whether a value from JSON is a whole number from 0 to `most`."""
    return type(value) is int and 0 <= value <= most
