# SPDX-License-Identifier: Apache-2.0
"""Checks the paths of a run: inputs are files or folders, and outputs overwrite no other path."""

import os
from contextlib import suppress
from pathlib import Path

from files.claims import content_of
from files.inputs import memory_of_machine
from files.outputs import can_be_written, is_held

LONGEST_FILE_NAME = 245  # bytes: a disk takes 255, and the name of an unfinished copy has 10 more


def check_paths(parser, arguments):
    """Check the values of the flags that a Parser's `reads` and `writes` list, once parsed.

    Each input is a file or a folder, each output can be written, and no output overwrites another
    path of the run or lies in it.
    """
    read, written = attributes_of(parser, parser.reads), attributes_of(parser, parser.writes)
    check_paths_apart(arguments, written, read)
    for flag, name in read.items():
        check_input(flag, getattr(arguments, name))
    for action in parser._actions:
        flag, path = (action.option_strings or [None])[0], getattr(arguments, action.dest, None)
        if path and flag in written and action.metavar == "FILE":
            check_file(flag, path)


def attributes_of(parser, flags):
    """{flag: attribute of its value} of `flags`; a positional argument is listed by its metavar."""
    dests = {name: each.dest for each in parser._actions for name in each.option_strings}
    dests |= {each.metavar: each.dest for each in parser._actions if not each.option_strings}
    return {flag: dests[flag] for flag in flags}


def check_paths_apart(arguments, written, read):
    """Reject an output on or in another path of the run, or around it; links are resolved.

    `written` are the flags of all outputs, `read` those of all inputs, with the attributes that
    have their paths.
    """
    taken = {}  # flag -> path of what no later output may overwrite
    for flag, name in {**read, **written}.items():
        path = getattr(arguments, name, None)
        if not path:
            continue
        for other in taken if flag in written else []:
            check_apart(flag, path, other, taken[other])
        taken[flag] = path


def check_apart(flag, path, other, other_path):
    """Reject two paths if one is the other or lies in it."""
    real, other_real = Path(os.path.realpath(path)), Path(os.path.realpath(other_path))
    if real == other_real or same_file(real, other_real):
        raise SystemExit(f"{flag} and {other} name the same file {path}; give each its own")
    if real.is_relative_to(other_real):
        raise SystemExit(f"{flag} {path} lies in {other} {other_path}; name a place outside of it")
    if other_real.is_relative_to(real):
        raise SystemExit(f"{other} {other_path} lies in {flag} {path}; name a place outside of it")


def same_file(path, other):
    """Return whether two existing paths lead to one file, as two hard links do."""
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False


def check_input(flag, path):
    """Reject what is neither file nor folder, an empty file, and one larger than the memory.

    A read from a named pipe may wait for ever, and so may one from /proc, whose files have no size.
    """
    if path and os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise SystemExit(f"{flag} {path} is not a regular file; name a file or a folder")
    size = os.path.getsize(path) if path and os.path.isfile(path) else None
    if size == 0:
        raise SystemExit(f"{flag} {path} has 0 bytes; name a file that has some")
    if size and size > memory_of_machine():
        raise SystemExit(
            f"{flag} {path} has {size:,} bytes, more than the memory; use a smaller one"
        )


def check_new_folder(flag, folder):
    """Reject a folder that is not empty, or that cannot be created; None is none to check."""
    if folder is None:
        return
    whole = os.path.abspath(folder)
    parent = os.path.dirname(whole)
    if not os.path.isdir(parent):
        raise SystemExit(f"{flag} {folder}: the folder {parent} does not exist; make it first")
    if os.path.lexists(whole) and (not os.path.isdir(whole) or content_of(whole)):
        raise SystemExit(f"{flag} {folder}: something is already there; name a new folder")
    if not can_be_written(os.path.join(whole if os.path.isdir(whole) else parent, ".model")):
        raise SystemExit(f"{flag} {folder} cannot be written; name a folder of yours")


def check_file(flag, path):
    """Reject a file that cannot be created or replaced."""
    folder, name = os.path.split(os.path.abspath(path))
    if path == "-":  # which other programs take for standard output
        raise SystemExit(
            f"{flag} - is not standard output here; name a file, or write ./- for a file of that name"
        )
    if len(os.fsencode(name)) > LONGEST_FILE_NAME:
        raise SystemExit(
            f"{flag}: the file's name has more than {LONGEST_FILE_NAME} bytes; shorten it"
        )
    if not os.path.isdir(folder):
        raise SystemExit(f"{flag} {path}: the folder {folder} does not exist; make it first")
    if not can_be_written(path):
        raise SystemExit(f"{flag} {path} cannot be written; name a file in a folder of yours")
    if is_printed_into(path):
        raise SystemExit(f"{flag} {path} is where this program prints; name another file")
    if is_held(path):
        raise SystemExit(f"{flag} {path}: another run is writing it; name another file")


def is_printed_into(path):
    """Return whether standard output or error goes into a file, which an output would replace."""
    with suppress(OSError):
        found = os.stat(path)
        return any(os.path.samestat(found, os.fstat(number)) for number in (1, 2))
    return False
