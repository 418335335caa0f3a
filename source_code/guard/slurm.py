# SPDX-License-Identifier: Apache-2.0
"""Reads SLURM's environment variables if srun, not torchrun, has started the ranks.

`whole_number(name, default, least, most)` is the function of launcher.py that reads a variable.
"""

import os
import re
import socket

FIRST_PORT, PORTS = 10_000, 20_000  # below those that the system hands out


def ranks_from_slurm(whole_number):
    """Return (rank, ranks, rank on this node, ranks on this node) of a job step of srun."""
    num_ranks = whole_number("SLURM_STEP_NUM_TASKS", least=1)
    rank = whole_number("SLURM_PROCID", most=num_ranks - 1)
    local_rank = whole_number("SLURM_LOCALID", most=num_ranks - 1)
    # The most ranks of any node: "4(x2),3" are two nodes of four ranks and one of three.
    counts = re.findall(r"\d+(?=[(,]|$)", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    local_ranks = max([int(count[:9]) for count in counts], default=1)
    return rank, num_ranks, local_rank, max(1, min(local_ranks, num_ranks))


def rank_in_node_order(rank, local_rank, local_ranks, num_ranks, whole_number):
    """Return torchrun's `rank`, or under SLURM the rank by SLURM's order of the nodes.

    torchrun sorts nodes by name as text, pp10 before pp9. Neighbours in the pipeline should be
    neighbours in the machine, so SLURM's order is used.
    """
    env, nodes = os.environ, os.environ.get("GROUP_WORLD_SIZE", "1")
    one_per_node = nodes == env.get("SLURM_STEP_NUM_NODES") == env.get("SLURM_STEP_NUM_TASKS")
    # Rank 0 must be where the store is, unless torchrun itself keeps the store.
    if nodes == "1" or not one_per_node or env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return rank
    last_node = (num_ranks - 1 - local_rank) // local_ranks
    return whole_number("SLURM_NODEID", most=last_node) * local_ranks + local_rank


def set_meeting_point(whole_number):
    """Set MASTER_ADDR to the first node of the step, MASTER_PORT by job and step, unless set.

    Raises ValueError, which says what to set, if that node's name cannot be resolved.
    """
    env = os.environ
    if "MASTER_PORT" not in env:
        number = whole_number("SLURM_JOB_ID") + 7919 * (
            1 + whole_number("SLURM_STEP_ID", 0, most=2**32 - 1)
        )
        env["MASTER_PORT"] = str(FIRST_PORT + number % PORTS)
    if "MASTER_ADDR" not in env:
        name = first_node(env["SLURM_STEP_NODELIST"])
        try:
            socket.getaddrinfo(name, None)
        except (OSError, UnicodeError):
            raise ValueError(
                f"the ranks would meet on node {name}, but {socket.gethostname()} cannot resolve "
                "that name; export MASTER_ADDR with that node's address"
            ) from None
        env["MASTER_ADDR"] = name


def first_node(nodes):
    """Return the first name in SLURM's short form of a list: pp03 of "pp[03-10,12],gpu1"."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodes)[0]
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first)
