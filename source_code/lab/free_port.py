"""Finds a port at which ranks of this machine can meet."""

import secrets
import socket

from pipeline.slurm import FIRST_PORT, PORTS


def free_port():
    """A port of this machine that no process has, for ranks that are about to meet there.

    Raises OSError.
    """
    with hold_free_port() as holder:
        return holder.getsockname()[1]


def hold_free_port():
    """A socket that has such a port, so that no other program gets it before the ranks listen.

    On Linux a rank can listen there nevertheless: its socket lets others use the address, as this
    one does from now on, and this one never listens. A port that the system hands out would not do:
    it hands out the same one again. Raises OSError.
    """
    for attempt in range(100):
        holder = socket.socket()
        try:
            holder.bind(("", FIRST_PORT + secrets.randbelow(PORTS)))
        except OSError:
            holder.close()
            if attempt == 99:
                raise
            continue
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return holder
