"""The inputs of a process at its start: its rank from the launcher, its flags from the user."""

import argparse
import json
import math
import os
import re
import sys
import time
from contextlib import suppress
from pathlib import Path

LONGEST_WORD = 500  # letters of a word in a sentence of ours; a longer one is a slip
MOST_DIGITS = 30  # Python converts no more than 4300, and no size has more than ten


class LauncherError(ValueError):
    """The environment lacks this rank's number or the meeting point; the text says what to set."""


class Parser(argparse.ArgumentParser):
    """Rejects bad flags in one sentence. `checks` are called with the parsed arguments.

    --help shows the first line of `description`, a script's docstring; python -OO has none.
    """

    def __init__(self, description=None, **options):
        title = (description or "").partition("\n")[0]
        formatter = argparse.ArgumentDefaultsHelpFormatter
        super().__init__(
            description=title, allow_abbrev=False, formatter_class=formatter, **options
        )
        self.checks = []

    def parse_args(self, *words):
        """Parse flags; reject an empty value, such as that of a shell variable that is not set."""
        arguments = super().parse_args(*words)
        for action in self._actions:
            value = getattr(arguments, action.dest, None)
            if value == "" or (isinstance(value, list) and "" in value):
                name = (*action.option_strings, action.metavar, action.dest)[0]
                reject(f"{name} is empty text; give it a value, or leave it out")
        return arguments

    def error(self, message):
        reject(message.removeprefix("argument ") + "; --help lists the flags")


def reject(sentence):
    """End this process with status 2 and one sentence, printed once per node."""
    try:
        first = read_ranks()[2] == 0
    except LauncherError:
        first = True
    if first:
        sentence = " ".join(map(shortened, sentence.split()))
        print(sentence, file=sys.stderr, flush=True)
        tell_launcher(sentence)
    else:
        time.sleep(
            5.0
        )  # a launcher ends all ranks when the first one ends, so the first one prints the error
    sys.exit(2)


def tell_launcher(sentence):
    """Let torchrun, which prints half a page when a rank fails, end it with this sentence."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        reason = {"message": sentence, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):  # whoever reads the sentence has seen it on standard error
            Path(file).write_text(json.dumps({"message": reason}))


def shortened(word):
    """Return a word of a sentence; of one that is longer than any path, its beginning."""
    return word if len(word) <= LONGEST_WORD else f"{word[:40]}... ({len(word):,} letters)"


def positive_integer(text):
    """Convert a flag's value to a whole number of at least 1."""
    digits = text.strip()
    if not digits.isdecimal() or not digits.strip("0"):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not '{text}'")
    if len(digits) > MOST_DIGITS or int(digits) >= 2**31:
        raise argparse.ArgumentTypeError(f"must be at most {2**31 - 1}, not '{text}'")
    return int(digits)


def positive_number(text):
    """Convert a flag's value to a finite number above zero."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, not '{text}'")
    return value


def ranks_from_environment():
    """Return (rank, ranks, rank on this node, ranks on this node) from torchrun or srun."""
    try:
        return read_ranks()
    except LauncherError as error:
        reject(str(error))


def read_ranks():
    """Return the same. Raises LauncherError if the environment has no valid rank."""
    on_slurm = "SLURM_STEP_NUM_TASKS" in os.environ
    if "RANK" in os.environ:
        num_ranks = whole_number("WORLD_SIZE", least=1)
        rank = whole_number("RANK", most=num_ranks - 1)
        local_rank = whole_number("LOCAL_RANK", rank, most=num_ranks - 1)
        local = local_rank, whole_number("LOCAL_WORLD_SIZE", 1, 1, num_ranks)
        if on_slurm:
            from pipeline.slurm import rank_in_node_order

            rank = rank_in_node_order(rank, *local, num_ranks, whole_number)
        return rank, num_ranks, *local
    if on_slurm and whole_number("SLURM_STEP_NUM_TASKS", least=1) > 1:
        from pipeline.slurm import ranks_from_slurm

        return ranks_from_slurm(whole_number)
    return 0, 1, 0, 1


def meeting_point():
    """Return (address, port) at which the ranks meet. Raises LauncherError."""
    try:
        if "SLURM_STEP_NODELIST" in os.environ:
            from pipeline.slurm import set_meeting_point

            set_meeting_point(whole_number)
        address = os.environ.get("MASTER_ADDR", "")
        address.encode("idna")
    except ValueError as error:
        raise LauncherError(f"the ranks have no place to meet: {error}") from None
    if not address:
        raise LauncherError(
            "MASTER_ADDR is not set, so the ranks cannot meet; start them with torchrun"
        )
    return address, whole_number("MASTER_PORT", most=65535)


def whole_number(name, default=None, least=0, most=2**31 - 1):
    """Return the environment variable `name` as a whole number, or `default`.

    Raises LauncherError if it is not a whole number in the given range.
    """
    text = os.environ.get(name)
    if text is None and default is not None:
        text = str(default)
    if re.fullmatch(r"\s*[0-9]{1,18}\s*", text or "") and least <= int(text) <= most:
        return int(text)
    found = "is not set" if text is None else f"is {text[:40]!r}"
    raise LauncherError(
        f"{name} {found}, and has to be a whole number from {least} to {most}; start the ranks with "
        "torchrun or srun"
    )
