"""How bad input is refused: on every rank before the first message.

One sentence that names the flag and the fix, printed once, and exit status 2.
"""

import argparse
import math
import sys
import time

REFUSED = 2
HEAD_START = 5.0  # seconds
LARGEST_COUNT = 2**31 - 1


def refuse(sentence):
    """Leave with one sentence, printed once on each node, and a non-zero exit on every rank."""
    from pipeline.distributed import ranks_from_environment  # imports torch: a second

    if ranks_from_environment()[2] == 0:
        print(" ".join(sentence.split()), file=sys.stderr, flush=True)
    else:
        # A launcher ends all ranks once one has failed: the one that speaks has to be the first.
        time.sleep(HEAD_START)
    sys.exit(REFUSED)


class Parser(argparse.ArgumentParser):
    """An argument parser that refuses in one sentence, without the usage text."""

    def __init__(self, **options):
        super().__init__(
            allow_abbrev=False,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            **options,
        )

    def error(self, message):
        refuse(message.removeprefix("argument ") + "; --help lists the flags")


def positive_integer(text):
    """A flag's value as a count; argparse turns the error into the refusal."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not '{text}'")
    if value > LARGEST_COUNT:
        raise argparse.ArgumentTypeError(f"must be at most {LARGEST_COUNT}, not '{text}'")
    return value


def schedule_option(text):
    """An --option NAME=VALUE of a schedule's generator, as (name, whole number)."""
    name, _, value = text.partition("=")
    try:
        return name, int(value)
    except ValueError:
        form = "NAME=VALUE with a whole number, as in depth=2"
        raise argparse.ArgumentTypeError(f"must be {form}, not '{text}'") from None


def positive_number(text):
    """A flag's value as a number, above zero and finite."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, not '{text}'")
    return value
