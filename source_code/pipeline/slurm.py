"""What SLURM says in the environment where srun, not torchrun, has started the ranks."""

import os
import re
import socket

FIRST_PORT, PORTS = 10_000, 20_000  # below those that the system hands out


class NoMeetingPoint(ValueError):
    """The ranks cannot meet where the environment says; the text says what to set."""


def ranks_from_slurm():
    """(rank, number of ranks, rank on this node, ranks on this node) of a step of srun."""
    env = os.environ
    # The most ranks of any node: "4(x2),3" are two nodes of four ranks and one of three.
    counts = [int(n.split("(")[0]) for n in env["SLURM_STEP_TASKS_PER_NODE"].split(",")]
    ranks = int(env["SLURM_PROCID"]), int(env["SLURM_STEP_NUM_TASKS"])
    return *ranks, int(env["SLURM_LOCALID"]), max(counts)


def rank_in_node_order(rank, local_rank, local_ranks):
    """torchrun's `rank`, or the one that follows SLURM's order of the nodes.

    torchrun sorts nodes by name as text, pp10 before pp9. Neighbours in the pipeline should be
    neighbours in the machine, so SLURM's order counts.
    """
    env, nodes = os.environ, os.environ.get("GROUP_WORLD_SIZE", "1")
    one_per_node = nodes == env.get("SLURM_STEP_NUM_NODES") == env.get("SLURM_STEP_NUM_TASKS")
    # Rank 0 must be where the store is, unless torchrun itself keeps the store.
    if nodes == "1" or not one_per_node or env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return rank
    return int(env["SLURM_NODEID"]) * local_ranks + local_rank


def set_meeting_point():
    """Ranks meet on the first node of the step, at a port that follows from job and step."""
    env = os.environ
    number = int(env["SLURM_JOB_ID"]) + 7919 * (1 + int(env.get("SLURM_STEP_ID", 0)))
    env.setdefault("MASTER_PORT", str(FIRST_PORT + number % PORTS))
    if "MASTER_ADDR" not in env:
        env["MASTER_ADDR"] = resolvable(first_node(env["SLURM_STEP_NODELIST"]))


def resolvable(name):
    """`name` itself, if it leads to an address from here. Raises NoMeetingPoint."""
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        raise NoMeetingPoint(
            f"the ranks would meet on node {name}, and that name leads nowhere from "
            f"{socket.gethostname()}; export MASTER_ADDR with that node's address"
        ) from None
    return name


def first_node(nodes):
    """The first name of SLURM's short form of a list: "pp[03-10,12],gpu1" begins with pp03."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])+", nodes)[0]
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first)
