"""The generators: each writes down one schedule of the field, as data.

Every generator takes the number of ranks and of micro-batches, and some the number of chunks (the
stages of one rank). It returns a valid `Schedule`, or raises ScheduleError with what it allows.
"""

from pipeline.schedule import ScheduleError
from pipeline.schedules.looped import interleaved_1f1b, looped_bfs
from pipeline.schedules.no_flush import (
    noam,
    pipedream,
    pipedream_round_robin,
    round_robin_warm_up,
)
from pipeline.schedules.straight import gpipe, naive, one_f_one_b
from pipeline.schedules.v_shaped import dualpipe_v, zb_v
from pipeline.schedules.zero_bubble import zb_h1, zb_h2

__all__ = [
    "CHUNKED",
    "GENERATORS",
    "build_schedule",
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
    "zb_h1",
    "zb_h2",
    "zb_v",
]

GENERATORS = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "pipedream": pipedream,
    "interleaved-1f1b": interleaved_1f1b,
    "looped-bfs": looped_bfs,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "dualpipe-v": dualpipe_v,
}

# Those that take a number of chunks, 2 unless given. In a V there are always 2.
CHUNKED = ("interleaved-1f1b", "looped-bfs", "zb-v", "dualpipe-v")


def build_schedule(name, num_ranks, num_microbatches, num_chunks=None):
    """The schedule of that name (a key of GENERATORS).

    `num_chunks` is the number of stages a rank, for a name in CHUNKED; None is its default. Raises
    ScheduleError with a sentence that says what the schedule allows.
    """
    sizes = [num_ranks, num_microbatches]
    if name in CHUNKED and num_chunks is not None:
        sizes.append(num_chunks)
    elif num_chunks not in (None, 1):
        raise ScheduleError(
            f"{name} has one stage a rank, not {num_chunks} chunks; "
            f"use one of {', '.join(CHUNKED)} for several"
        )
    return GENERATORS[name](*sizes)
