# SPDX-License-Identifier: Apache-2.0
"""Ends a program with the sentence of a SystemExit and status 2."""

import json
import os
import shutil
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from files.inputs import InputError
from files.outputs import not_written, write_whole
from guard.launcher import LauncherError, read_ranks
from guard.printing import keep_running_unheard

LONGEST_WORD = 500  # letters of a word that is printed whole; a longer one comes from a slip
LONGEST = 3000  # letters of a sentence that is printed whole; a longer one contains a long name
WAIT = 5.0  # seconds for the launcher to end the other ranks after the first, which prints


@contextmanager
def in_one_sentence():
    """A context, or a decorator of main(), in which SystemExit(sentence) prints the sentence.

    The program goes on when its output cannot be written, see `keep_running_unheard`.
    """
    keep_running_unheard()
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

    The sentence names the file `path`, or the one at which the system failed, and ends with the
    `fix`. A file with wrong content raises InputError, whose text names the file.
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
    """End at once if PYTHONINSPECT is set: Python would ask for commands at the end.

    No rank would end then, and the status would be lost. With `python -i` the user wants that.
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
            f"the current folder cannot be used ({error.strerror}); change to one that exists"
        ) from None


def say(sentence):
    """Print a sentence: on the first rank of a node at once, on others after a wait.

    A launcher ends the others during the wait. A rank that still runs after it prints the sentence,
    too: it was started by hand, or has failed alone.
    """
    try:
        first = read_ranks()[2] == 0
    except LauncherError:
        first = True
    if not first:
        time.sleep(WAIT)
    sentence = shortened(sentence)
    print(sentence, file=sys.stderr, flush=True)
    tell_launcher(sentence)


def tell_launcher(sentence):
    """Make this sentence the end of the half page that torchrun prints when a rank fails."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        reason = {"message": sentence, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):  # the sentence is on standard error already
            write_whole(file, json.dumps({"message": reason}))


def shortened(sentence):
    """Return a sentence on one line, with words and a line that are too long cut short.

    Letters that are not printed, such as those that command a terminal, become escapes.
    """
    sentence = "".join(
        letter if letter.isprintable() or letter.isspace() else ascii(letter)[1:-1]
        for letter in sentence
    )
    words = (
        word if len(word) <= LONGEST_WORD else f"{word[:40]}... ({len(word):,} letters)"
        for word in sentence.split()
    )
    line = " ".join(words)
    return line if len(line) <= LONGEST else f"{line[:200]} ... {line[-500:]}"
