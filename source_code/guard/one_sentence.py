# SPDX-License-Identifier: Apache-2.0
"""Ends a program with the sentence of a SystemExit: printed once per node, with status 2."""

import json
import os
import shutil
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from guard.files import not_written
from guard.inputs import InputError
from guard.launcher import LauncherError, read_ranks

LONGEST_WORD = 500  # letters of a word in a sentence of ours; a longer one is a slip
LONGEST = 3000  # letters of a sentence; a longer one has a name of many words
WAIT = 5.0  # a launcher ends all ranks when the first one ends, so the first one prints


@contextmanager
def in_one_sentence():
    """A context, and the decorator of a main(), in which SystemExit(sentence) ends a program so."""
    try:
        check_that_it_ends()
        check_current_folder()
        yield
    except SystemExit as end:
        if not isinstance(end.code, str):
            raise SystemExit(end.code or int(bool(not_written))) from None  # after --help, too
        say(end.code)
        raise SystemExit(2) from None
    except MemoryError:
        say("there is too little memory; use smaller sizes, or raise a limit (ulimit -v)")
        raise SystemExit(2) from None


@contextmanager
def naming_files(path=None, fix="mend that, and start again"):
    """A context in which a file that cannot be read or written ends a program with one sentence.

    It names the file `path`, or else the one at which the system failed, and ends with the `fix`. A
    file with something else than it should have is an InputError, whose text names it.
    """
    program = Path(sys.argv[0]).name
    try:
        yield
    except InputError as error:
        raise SystemExit(f"{program}: {error}; {fix}") from None
    except OSError as error:
        copied_to = error.filename2  # a copy fails at where it goes, more often than at its source
        file, why = path or copied_to or error.filename or "a file", error.strerror or error
        if isinstance(error, shutil.Error):  # of a folder: (from, to, reason) of each file
            _, file, why = error.args[0][0]
        raise SystemExit(f"{program}: {file} cannot be used ({why}); {fix}") from None


def check_that_it_ends():
    """End at once with PYTHONINSPECT, with which Python would ask for commands at the end.

    No rank would end then, and the status would be lost. With `python -i` that is what was asked for.
    """
    if sys.flags.inspect and os.environ.get("PYTHONINSPECT"):
        say("PYTHONINSPECT is set, so that Python asks for commands at the end; unset it")
        os._exit(2)


def check_current_folder():
    """Reject a current folder that is gone, as after `git switch`: no path in it can be resolved."""
    try:
        os.getcwd()
    except OSError as error:
        raise SystemExit(
            f"the current folder cannot be used ({error.strerror}); change to one that is there"
        ) from None


def say(sentence):
    """Print a sentence on the first rank of this node; the others wait to be ended."""
    try:
        first = read_ranks()[2] == 0 or is_started_by_hand()
    except LauncherError:
        first = True
    if not first:
        return time.sleep(WAIT)
    sentence = shortened(sentence)
    print(sentence, file=sys.stderr, flush=True)
    tell_launcher(sentence)


def is_started_by_hand():
    """Return whether the rank's number is all there is: the first rank may be on another node."""
    return "RANK" in os.environ and "LOCAL_RANK" not in os.environ


def tell_launcher(sentence):
    """Let torchrun, which prints half a page when a rank fails, end it with this sentence."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        reason = {"message": sentence, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):  # whoever reads the sentence has seen it on standard error
            Path(file).write_text(json.dumps({"message": reason}))


def shortened(sentence):
    """Return a sentence on one line, without most of what is longer than any name in it."""
    words = (
        word if len(word) <= LONGEST_WORD else f"{word[:40]}... ({len(word):,} letters)"
        for word in sentence.split()
    )
    line = " ".join(words)
    return line if len(line) <= LONGEST else f"{line[:200]} ... {line[-500:]}"
