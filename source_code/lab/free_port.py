"""Finds a port at which ranks of this machine can meet."""

import secrets
import socket

from pipeline.slurm import FIRST_PORT, PORTS


def free_port():
    """A port of this machine that no process has, for ranks that are about to meet there.

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
