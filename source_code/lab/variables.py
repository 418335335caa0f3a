# SPDX-License-Identifier: Apache-2.0
"""The environment variables with which the program that starts a run pretends slow nodes."""

import os
from contextlib import contextmanager

DELAY_VARIABLE = "PIPELINE_NODE_DELAY"  # ms that a message between nodes takes longer
OCCUPANCY_VARIABLE = "PIPELINE_NODE_OCCUPANCY"  # ms for which such a message occupies its link
PRETENDED_VARIABLE = "PIPELINE_RANKS_PER_NODE"  # pretend nodes of so many ranks, on one machine


@contextmanager
def pretended_nodes(ranks_per_node, delay=0, occupancy=0):
    """A context in which started programs pretend to run on nodes of `ranks_per_node` ranks.

    Each message between nodes first occupies its link for `occupancy` milliseconds and then travels
    for `delay` milliseconds (simulator.py says what shares a link). If both are 0, nothing is
    pretended.
    """
    wanted = {}
    if delay or occupancy:
        wanted[PRETENDED_VARIABLE] = str(ranks_per_node)
        wanted[DELAY_VARIABLE], wanted[OCCUPANCY_VARIABLE] = str(delay), str(occupancy)
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
