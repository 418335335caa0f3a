# SPDX-License-Identifier: Apache-2.0
"""Reads a rank's number and the meeting point from the environment, set by torchrun or srun."""

import os
import re
from contextlib import contextmanager

from guard.slurm import rank_in_node_order, ranks_from_slurm, set_meeting_point

NAMES = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
MOST_RANKS = 1_000_000  # ten times those of the largest training so far; more are a slip


class LauncherError(ValueError):
    """The environment lacks this rank's number or the meeting point; the text says what to set."""


@contextmanager
def ranks_set():
    """A context that sets torchrun's variables for a job of several ranks, also under srun."""
    try:
        ranks = read_ranks()
    except LauncherError as error:
        raise SystemExit(str(error)) from None
    before = {name: os.environ.get(name) for name in NAMES}
    if ranks[1] > 1:
        os.environ.update(zip(NAMES, map(str, ranks)))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def read_ranks():
    """Return (rank, ranks, rank on this node, ranks on this node) from torchrun or srun.

    Raises LauncherError if the environment has no valid rank.
    """
    on_slurm = "SLURM_STEP_NUM_TASKS" in os.environ
    if "RANK" in os.environ or not on_slurm:
        one = None if "RANK" in os.environ else 1
        num_ranks = whole_number("WORLD_SIZE", one, least=1, most=MOST_RANKS)
        rank = whole_number("RANK", 0 if num_ranks == 1 else None, most=num_ranks - 1)
        local_rank = whole_number("LOCAL_RANK", rank, most=num_ranks - 1)
        local = local_rank, whole_number("LOCAL_WORLD_SIZE", 1, 1, num_ranks)
        if on_slurm:
            rank = rank_in_node_order(rank, *local, num_ranks, whole_number)
        return rank, num_ranks, *local
    if whole_number("SLURM_STEP_NUM_TASKS", least=1, most=MOST_RANKS) > 1:
        return ranks_from_slurm(whole_number)
    return 0, 1, 0, 1


def meeting_point():
    """Return (address, port) at which the ranks meet. Raises LauncherError."""
    try:
        if "SLURM_STEP_NODELIST" in os.environ:
            set_meeting_point(whole_number)
        address = os.environ.get("MASTER_ADDR", "")
        address.encode("idna")
    except UnicodeError:
        raise LauncherError(
            f"MASTER_ADDR is {address[:80]!r}, which cannot be a name; export the name or the address "
            "of the node of rank 0"
        ) from None
    except ValueError as error:
        raise LauncherError(f"the ranks have no place to meet: {error}") from None
    if not address:
        raise LauncherError(
            "MASTER_ADDR is not set, so the ranks cannot meet; start them with torchrun"
        )
    return address, whole_number("MASTER_PORT", least=1, most=65535)


def whole_number(name, default=None, least=0, most=2**31 - 1):
    """Return the environment variable `name` as a whole number, or `default`.

    Raises LauncherError if it is not a whole number in the given range.
    """
    text = os.environ.get(name)
    if text is None and default is not None:
        text = str(default)
    if re.fullmatch(r"\s*[0-9]{1,18}\s*", text or "") and least <= int(text) <= most:
        return int(text)
    found = "is not set" if text is None else f"is {text[:40]!r}"
    raise LauncherError(
        f"{name} {found}, and has to be a whole number from {least} to {most}; start the ranks with "
        "torchrun or srun"
    )
