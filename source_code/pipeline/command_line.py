"""What a process is told when it starts: its rank by the launcher, its flags by the user.

Bad input is rejected on every rank before the first message: one sentence, exit status 2.
"""

import argparse
import math
import os
import re
import socket
import sys
import time

HEAD_START = 5.0  # seconds: a launcher ends all ranks once one has failed, so one must be first
FIRST_PORT, PORTS = 10_000, 20_000  # below those that the system hands out


class Parser(argparse.ArgumentParser):
    """Rejects bad flags in one sentence. `checks` are called with the parsed arguments."""

    def __init__(self, **options):
        formatter = argparse.ArgumentDefaultsHelpFormatter
        super().__init__(allow_abbrev=False, formatter_class=formatter, **options)
        self.checks = []

    def error(self, message):
        reject(message.removeprefix("argument ") + "; --help lists the flags")


def reject(sentence):
    """End this process with one sentence, printed once per node."""
    if ranks_from_environment()[2] == 0:
        print(" ".join(sentence.split()), file=sys.stderr, flush=True)
    else:
        time.sleep(HEAD_START)
    sys.exit(2)


def positive_integer(text):
    """A flag's value as a count."""
    if not re.fullmatch(r"\s*\+?\d+\s*", text) or int(text) < 1:
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
    if "RANK" in env:
        local = int(env.get("LOCAL_RANK", env["RANK"])), int(env.get("LOCAL_WORLD_SIZE", 1))
        rank, nodes = int(env["RANK"]), env.get("GROUP_WORLD_SIZE", "1")
        by_slurm = nodes == env.get("SLURM_STEP_NUM_NODES") == env.get("SLURM_STEP_NUM_TASKS")
        if nodes != "1" and by_slurm and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # torchrun sorts nodes by name as text, pp10 before pp9. Neighbours in the pipeline
            # should be neighbours in the machine, so SLURM's order counts.
            rank = int(env["SLURM_NODEID"]) * local[1] + local[0]
        return rank, int(env["WORLD_SIZE"]), *local
    if int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        # The most ranks of any node: "4(x2),3" are two nodes of four ranks and one of three.
        counts = [int(n.split("(")[0]) for n in env["SLURM_STEP_TASKS_PER_NODE"].split(",")]
        local = int(env["SLURM_LOCALID"]), max(counts)
        return int(env["SLURM_PROCID"]), int(env["SLURM_STEP_NUM_TASKS"]), *local
    return 0, 1, 0, 1


def set_meeting_point(rank, num_ranks):
    """Set what torchrun would have set. Under srun, ranks meet on the first node of the step."""
    env = os.environ
    if "SLURM_JOB_ID" in env and "SLURM_STEP_NODELIST" in env:
        # The port follows from job and step: all ranks know it, and no two jobs share one.
        number = int(env["SLURM_JOB_ID"]) + 7919 * (1 + int(env.get("SLURM_STEP_ID", 0)))
        env.setdefault("MASTER_PORT", str(FIRST_PORT + number % PORTS))
        env.setdefault("MASTER_ADDR", resolvable(first_node(env["SLURM_STEP_NODELIST"])))
    env.setdefault("RANK", str(rank))
    env.setdefault("WORLD_SIZE", str(num_ranks))


def resolvable(name):
    """`name` itself, if it leads to an address from here; else this process ends."""
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        reject(
            f"the ranks would meet on node {name}, and that name leads nowhere from "
            f"{socket.gethostname()}; export MASTER_ADDR with that node's address"
        )
    return name


def first_node(nodes):
    """The first name of SLURM's short form of a list: "pp[03-10,12],gpu1" begins with pp03."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])+", nodes)[0]
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first)
