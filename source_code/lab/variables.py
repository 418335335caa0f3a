"""The environment variables by which whoever starts a run talks to its lab."""

import os
from contextlib import contextmanager

LAUNCHER_VARIABLE = "PIPELINE_LAUNCHER"  # process id of a launcher on this machine
FLIGHT_VARIABLE = "PIPELINE_FLIGHT_RECORDER"  # a folder for what each rank sent last
DELAY_VARIABLE = "PIPELINE_NODE_DELAY"  # ms that a message between nodes takes longer
PRETENDED_VARIABLE = "PIPELINE_RANKS_PER_NODE"  # on one machine: play nodes of so many ranks


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
