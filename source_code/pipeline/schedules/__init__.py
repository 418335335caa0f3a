# SPDX-License-Identifier: Apache-2.0
"""The generators: each returns one published schedule as data; SCHEDULES has a row for each.

A new schedule is one file here, its import below and one row. Every generator but
`pipedream_round_robin`, which has no row, takes the number of ranks and of micro-batches, some the
number of chunks (the stages of one rank), and the options that its row names. It returns a legal
`Schedule`, or raises ScheduleError with what it allows.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pipeline.schedule import ScheduleError
from pipeline.schedules.controllable_memory import v_half, v_min
from pipeline.schedules.dualpipe_v import dualpipe_v
from pipeline.schedules.gpipe import gpipe
from pipeline.schedules.interleaved_1f1b import interleaved_1f1b
from pipeline.schedules.looped_bfs import looped_bfs
from pipeline.schedules.naive import naive
from pipeline.schedules.one_f_one_b import one_f_one_b
from pipeline.schedules.pipedream import (
    noam,
    pipedream,
    pipedream_round_robin,
    round_robin_warm_up,
)
from pipeline.schedules.zb_v import zb_v
from pipeline.schedules.zero_bubble_h import zb_h1, zb_h2

__all__ = [
    "SCHEDULES",
    "Generator",
    "build_schedule",
    "chunked_schedules",
    "dualpipe_v",
    "gpipe",
    "interleaved_1f1b",
    "looped_bfs",
    "naive",
    "noam",
    "one_f_one_b",
    "pipedream",
    "pipedream_round_robin",
    "round_robin_warm_up",
    "synchronous_schedules",
    "v_half",
    "v_min",
    "zb_h1",
    "zb_h2",
    "zb_v",
]

MOST_ACTIONS = 2_000_000  # two gigabytes and half a minute; half as many in a V, whose order
# is found step by step


@dataclass(frozen=True)
class Generator:
    """A function that makes a schedule, and its options.

    `make(num_ranks, num_microbatches)` returns the Schedule. If a rank has several stages, `chunks`
    is their default number, which a third argument replaces unless `fixed_chunks` is True. A
    synchronous schedule updates the weights once, after its last action. `options` are the names
    of further integer arguments of `make`.
    """

    make: Callable
    chunks: int | None = None
    fixed_chunks: bool = False
    synchronous: bool = True
    options: tuple[str, ...] = ()


SCHEDULES = {
    "naive": Generator(naive),
    "gpipe": Generator(gpipe),
    "1f1b": Generator(one_f_one_b, options=("depth",)),
    "pipedream": Generator(pipedream, synchronous=False, options=("microbatches_per_update",)),
    "interleaved-1f1b": Generator(interleaved_1f1b, chunks=2, options=("ahead", "more")),
    "looped-bfs": Generator(looped_bfs, chunks=2),
    "zb-h1": Generator(zb_h1),
    "zb-h2": Generator(zb_h2),
    "zb-v": Generator(zb_v, chunks=2, fixed_chunks=True),
    "v-half": Generator(v_half, chunks=2, fixed_chunks=True),
    "v-min": Generator(v_min, chunks=2, fixed_chunks=True),
    "dualpipe-v": Generator(dualpipe_v, chunks=2, fixed_chunks=True),
}


def synchronous_schedules():
    """Return the names of the synchronous schedules, in the order of SCHEDULES."""
    return [name for name, generator in SCHEDULES.items() if generator.synchronous]


def chunked_schedules():
    """Return the names of the schedules with several stages per rank."""
    return [name for name, generator in SCHEDULES.items() if generator.chunks]


def build_schedule(name, num_ranks, num_microbatches, chunks=None, /, **options):
    """The schedule of that name, a key of SCHEDULES.

    `chunks` is the number of stages per rank; None is the schedule's own. `options` are integers,
    by the names in the schedule's row. Raises ScheduleError with a sentence that says what the
    schedule allows.
    """
    generator = SCHEDULES[name]
    for option in options:
        if option not in generator.options:
            has = f"it has {', '.join(generator.options)}" if generator.options else "it has none"
            raise ScheduleError(f"{name} has no option '{option}'; {has}")
    actions = 2 * num_ranks * num_microbatches * (chunks or generator.chunks or 1)
    most = MOST_ACTIONS
    if generator.fixed_chunks:  # each rank has two stages; a V is first made for 2p micro-batches
        actions = 6 * num_ranks * max(num_microbatches, 2 * num_ranks)
        most //= 2
    if actions > most:
        raise ScheduleError(
            f"it is made of {actions:,} actions, and {most:,} are the most; use fewer ranks, "
            "micro-batches or chunks"
        )
    sizes = [num_ranks, num_microbatches]
    if generator.fixed_chunks:
        if chunks not in (None, generator.chunks):
            raise ScheduleError(
                f"{name} has {generator.chunks} chunks per rank, one on each side of the V, not {chunks}"
            )
    elif generator.chunks and chunks is not None:
        sizes.append(chunks)
    elif chunks not in (None, 1):
        several = ", ".join(chunked_schedules())  # none in some copies
        advice = f"use one of {several} for several" if several else "leave --chunks out"
        raise ScheduleError(f"{name} has one stage per rank, not {chunks} chunks; {advice}")
    return generator.make(*sizes, **options)
