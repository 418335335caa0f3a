"""What a process is told when it starts: its rank by the launcher, its flags by the user."""

import argparse
import math
import os
import sys
import time


class Parser(argparse.ArgumentParser):
    """Rejects bad flags in one sentence. `checks` are called with the parsed arguments.

    Of `description`, a script's docstring, the first line is shown; python -OO has none.
    """

    def __init__(self, description=None, **options):
        title = (description or "").partition("\n")[0]
        formatter = argparse.ArgumentDefaultsHelpFormatter
        super().__init__(
            description=title, allow_abbrev=False, formatter_class=formatter, **options
        )
        self.checks = []

    def parse_args(self, *words):
        """Parse; an empty text, as of a shell's variable that is not set, is never "not given"."""
        arguments = super().parse_args(*words)
        for action in self._actions:
            if getattr(arguments, action.dest, None) == "":
                name = (*action.option_strings, action.metavar, action.dest)[0]
                reject(f"{name} is empty text; give it a value, or leave it out")
        return arguments

    def error(self, message):
        reject(message.removeprefix("argument ") + "; --help lists the flags")


def reject(sentence):
    """End this process with status 2 and one sentence, printed once per node."""
    if ranks_from_environment()[2] == 0:
        print(" ".join(sentence.split()), file=sys.stderr, flush=True)
    else:
        time.sleep(5.0)  # a launcher ends all ranks with the first: that one has to speak
    sys.exit(2)


def positive_integer(text):
    """A flag's value as a count."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not '{text}'")
    if int(text) >= 2**31:
        raise argparse.ArgumentTypeError(f"must be at most {2**31 - 1}, not '{text}'")
    return int(text)


def positive_number(text):
    """A flag's value as a number, above zero and finite."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, not '{text}'")
    return value


def ranks_from_environment():
    """(rank, number of ranks, rank on this node, ranks on this node), from torchrun or srun."""
    env = os.environ
    on_slurm = "SLURM_STEP_NUM_TASKS" in env
    if "RANK" in env:
        rank, local_rank = int(env["RANK"]), int(env.get("LOCAL_RANK", env["RANK"]))
        local = local_rank, int(env.get("LOCAL_WORLD_SIZE", 1))
        if on_slurm:
            from pipeline.slurm import rank_in_node_order

            rank = rank_in_node_order(rank, *local)
        return rank, int(env["WORLD_SIZE"]), *local
    if on_slurm and int(env["SLURM_STEP_NUM_TASKS"]) > 1:
        from pipeline.slurm import ranks_from_slurm

        return ranks_from_slurm()
    return 0, 1, 0, 1
