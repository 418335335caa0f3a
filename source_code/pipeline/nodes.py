"""Nodes: on which one a rank is, where the ranks of a job meet, and how slow the network plays.

torchrun and SLURM say in the environment what a rank has to know. `ranks_from_environment`
(distributed.py) reads its number; here is what only a job on several nodes needs.
"""

import os
import re
import secrets
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

DELAY_VARIABLE = "PIPELINE_NODE_DELAY"  # ms that a message between nodes takes longer
PRETENDED_VARIABLE = "PIPELINE_RANKS_PER_NODE"  # on one machine: play nodes of so many ranks
FIRST_PORT, PORTS = 10_000, 20_000  # below those that the system hands out


class NodesError(ValueError):
    """The environment does not fit; the text says what to set."""


def node_name(rank):
    """The node of this rank: SLURM's name for it, else the machine's own."""
    pretended = os.environ.get(PRETENDED_VARIABLE)
    if pretended is not None:
        if not pretended.isdigit() or int(pretended) < 1:
            raise NodesError(
                f"{PRETENDED_VARIABLE} must be a whole number of at least 1, not '{pretended}'"
            )
        return f"node{rank // int(pretended)}"
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def rank_in_node_order(rank, local_rank, local_ranks):
    """`rank` by torchrun's count, or the one that follows SLURM's order of the nodes.

    torchrun numbers its nodes in the order of their addresses as text, where pp10 comes before
    pp9. Neighbours in the pipeline should be neighbours in the machine, so SLURM's order counts.
    """
    env = os.environ
    nodes = env.get("GROUP_WORLD_SIZE", "1")
    if nodes == "1" or nodes != env.get("SLURM_STEP_NUM_NODES"):
        return rank
    if env.get("SLURM_STEP_NUM_TASKS") != nodes:  # not one torchrun a node
        return rank
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # rank 0 must keep the store
        return rank
    return int(env["SLURM_NODEID"]) * local_ranks + local_rank


def set_meeting_point():
    """Under srun alone: set MASTER_ADDR and MASTER_PORT, which torchrun would have set.

    Ranks meet on the first node of the step, at a port that follows from the numbers of job and
    step, so that all of them know it and no two jobs of a node share one. Raises NodesError.
    """
    env = os.environ
    if "SLURM_JOB_ID" in env and "SLURM_STEP_NODELIST" in env:
        if "MASTER_ADDR" not in env:
            env["MASTER_ADDR"] = resolvable(first_node(env["SLURM_STEP_NODELIST"]))
        number = int(env["SLURM_JOB_ID"]) + 7919 * (1 + int(env.get("SLURM_STEP_ID", 0)))
        env.setdefault("MASTER_PORT", str(FIRST_PORT + number % PORTS))


def free_port():
    """A port of this machine that nobody has, for ranks that are about to meet there.

    One that the system hands out would not do: until the ranks are there it hands it out again.
    Raises OSError.
    """
    for attempt in range(100):
        port = FIRST_PORT + secrets.randbelow(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
                return port
            except OSError:
                if attempt == 99:
                    raise


def first_node(nodes):
    """The first name of SLURM's short form of a list: "pp[03-10,12],gpu1" begins with pp03."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])+", nodes)[0]
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first)


def resolvable(name):
    """`name` itself, if it leads to an address from here. Raises NodesError."""
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        raise NodesError(
            f"the ranks would meet on node {name}, and that name leads nowhere from "
            f"{socket.gethostname()}; export MASTER_ADDR with that node's address"
        ) from None
    return name


def node_delay():
    """Seconds that a message between nodes takes longer, to see a slow network on one machine."""
    text = os.environ.get(DELAY_VARIABLE, "0")
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = -1.0
    if not 0 <= milliseconds < 60_000:
        raise NodesError(f"{DELAY_VARIABLE} must be 0 to 60000 milliseconds, not '{text}'")
    return milliseconds / 1000


@contextmanager
def pretended_nodes(ranks_per_node, delay):
    """Let what is started inside play nodes of so many ranks, `delay` milliseconds apart.

    Without a delay nothing is pretended.
    """
    wanted = {PRETENDED_VARIABLE: str(ranks_per_node), DELAY_VARIABLE: str(delay)} if delay else {}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class SlowLink:
    """Starts sends to one rank `seconds` late and in order, and does not hold the sender up."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.postman = ThreadPoolExecutor(max_workers=1, thread_name_prefix="slow link")

    def send(self, start):
        """Call `start()`, which returns the transport's work, later; returns what to wait for."""
        return _Late(self.postman.submit(_start_at, time.monotonic() + self.seconds, start))


def _start_at(moment, start):
    time.sleep(max(0.0, moment - time.monotonic()))
    return start()


class _Late:
    def __init__(self, started):
        self.started = started

    def wait(self):
        self.started.result().wait()
