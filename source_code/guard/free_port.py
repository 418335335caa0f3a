# SPDX-License-Identifier: Apache-2.0
"""Finds a free port on which ranks of this machine can meet."""

import secrets
import socket

from guard.slurm import FIRST_PORT, PORTS


def free_port():
    """A port of this machine that no process uses, for ranks that will meet there.

    Raises OSError if there is none.
    """
    with hold_free_port() as holder:
        return holder.getsockname()[1]


def hold_free_port():
    """A socket bound to a free port, so that no other program gets it before the ranks listen.

    On Linux a rank can still listen there: both sockets have SO_REUSEADDR, and this one never
    listens. The port is not chosen by the system, which may give the same port to another program.
    Raises OSError if no free port is found.
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
