# SPDX-License-Identifier: Apache-2.0
"""The inputs of a process at its start: its rank from the launcher, its flags from the user."""

import argparse
import math
import os

MOST_DIGITS = 30  # Python converts no more than 4300, and no size has more than ten


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default value of each flag that has one."""

    def _get_help_string(self, action):
        has_none = action.default is None or action.default is False
        return action.help if has_none else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Ends with one sentence about a bad flag. `checks` are called with the parsed arguments.

    `reads` and `writes` are the flags whose values are paths of files or folders that a run reads
    and writes; whoever adds such a flag adds its name to one of them. `description` is a script's
    docstring, whose first line --help shows; python -OO removes it.
    """

    def __init__(self, description=None, **options):
        title = (description or "").partition("\n")[0]
        super().__init__(description=title, allow_abbrev=False, formatter_class=Help, **options)
        self.checks, self.reads, self.writes = [], [], []

    def parse_known_args(self, *words):
        """Parse flags; reject an empty value, such as that of a shell variable that is not set.

        For `--` in place of a value, as in --data=--, argparse returns an empty list.
        """
        arguments, rest = super().parse_known_args(*words)
        for action in self._actions:
            value = getattr(arguments, action.dest, None)
            nothing = value == [] and action.nargs != "*"
            if nothing or value == "" or (isinstance(value, list) and ("" in value or [] in value)):
                name = (*action.option_strings, action.metavar or action.dest)[0]
                raise SystemExit(f"{name} is empty text; give it a value, or leave it out")
        return arguments, rest

    def error(self, message):
        raise SystemExit(message.removeprefix("argument ") + "; --help lists the flags")


def whole_number(text, least=0):
    """Convert a flag's value to a whole number of at least `least`, 0 or 1."""
    digits = text.strip()
    if not (digits.isascii() and digits.isdecimal()) or (least and not digits.strip("0")):
        raise argparse.ArgumentTypeError(
            f"must be a whole number of at least {least}, not '{text}'"
        )
    if len(digits) > MOST_DIGITS or int(digits) >= 2**31:
        raise argparse.ArgumentTypeError(f"must be at most {2**31 - 1}, not '{text}'")
    return int(digits)


def positive_integer(text):
    """Convert a flag's value to a whole number of at least 1."""
    return whole_number(text, 1)


def positive_number(text):
    """Convert a flag's value to a finite number above zero."""
    if not 0 < (value := number_in(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, not '{text}'")
    return value


def number_from_zero(text):
    """Convert a flag's value to a finite number of at least zero."""
    if not 0 <= (value := number_in(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, not '{text}'")
    return value


def number_in(text):
    """Return the number that a text is, or NaN; float() takes digits of any script, and 1_0 for 10."""
    try:
        return float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        return math.nan


def check_same(flag, given, file, has):
    """Reject a flag's number that differs from the one in `file`, which takes precedence."""
    if given not in (None, has):
        raise SystemExit(f"{flag} {given} contradicts {file}, which has {has}; leave the flag out")


def ranks_from_environment():
    """Return (rank, ranks, rank on this node, ranks on this node), which the launcher has set."""
    rank = int(os.environ.get("RANK", 0))
    local = os.environ.get("LOCAL_RANK", rank), os.environ.get("LOCAL_WORLD_SIZE", 1)
    return rank, int(os.environ.get("WORLD_SIZE", 1)), *map(int, local)


def restarts_from_environment():
    """Return how often torchrun has restarted the ranks; 0 if they do not meet in its store."""
    of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) if of_launcher else 0
