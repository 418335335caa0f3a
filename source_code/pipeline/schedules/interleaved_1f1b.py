# SPDX-License-Identifier: Apache-2.0
"""Interleaved 1F1B: several stages (chunks) per rank, in loops.

Chunk c of rank i is stage c * num_ranks + i. A micro-batch passes all ranks once for each chunk.
That makes each step of the pipeline shorter, and with it the bubble. A micro-batch now crosses
num_ranks * num_chunks - 1 boundaries instead of num_ranks - 1, so the messages are more than
num_chunks times as many.
"""

from pipeline.schedule import Action, Schedule, ScheduleError
from pipeline.schedules.order import require_positive, require_several_chunks


def interleaved_1f1b(num_ranks, num_microbatches, num_chunks=2, ahead=2, more=0):
    """1F1B with several chunks per rank (Megatron-LM: Narayanan et al. 2021, section 2.2.2).

    Micro-batches go through the chunks in groups: all of a group through one chunk, then all
    through the next. In the paper a group has one micro-batch per rank, so the number of
    micro-batches is a multiple of the number of ranks. Larger groups work too, as in
    torch.distributed.pipelining, as long as all are equally large. `ahead` is the number of
    forwards in the warm-up for each later rank: 2 in Megatron-LM, so that messages travel while
    ranks work. With 1 a rank holds fewer activations, and the step is as short if messages take no
    time. With `more` = 1 every rank runs one more forward in its warm-up, so that a forward and the
    backward after it can run together (see pairs.py).
    """
    require_positive(num_ranks, num_microbatches)
    require_several_chunks("interleaved-1f1b", num_chunks, "1f1b")
    if not 0 <= ahead <= 2:  # with 3 some sizes deadlock
        raise ScheduleError(f"interleaved-1f1b takes 0 to 2 forwards ahead, not {ahead}")
    if more not in (0, 1):
        raise ScheduleError(f"interleaved-1f1b takes 0 or 1 forward more, not {more}")
    num_groups = max(1, num_microbatches // num_ranks)
    if num_microbatches % num_groups:
        least = num_groups * num_ranks
        raise ScheduleError(
            f"interleaved-1f1b takes micro-batches in groups of {num_ranks} or more, all equally "
            f"large, and {num_microbatches} do not divide into {num_groups} groups; "
            f"use {least} or {least + num_ranks}"
        )
    group = num_microbatches // num_groups
    passages = num_chunks * num_microbatches  # of a micro-batch through a chunk
    orders = []
    for rank in range(num_ranks):
        warm_up = (num_chunks - 1) * group + ahead * (num_ranks - 1 - rank) + more
        warm_up = min(passages, warm_up)
        forwards, backwards = [], []
        for passage in range(passages):
            chunk, microbatch = _chunk_and_microbatch(passage, group, num_chunks)
            forwards.append(Action(chunk * num_ranks + rank, "F", microbatch))
            back = num_chunks - 1 - chunk
            backwards.append(Action(back * num_ranks + rank, "B", microbatch))
        # Warm-up: all chunks but the last for one group, and some more for each rank behind.
        order = forwards[:warm_up]
        # Steady: one forward, one backward.
        for forward, backward in zip(forwards[warm_up:], backwards):
            order.append(forward)
            order.append(backward)
        # Cool-down: the backwards that are left.
        order += backwards[passages - warm_up :]
        orders.append(tuple(order))
    return Schedule("interleaved-1f1b", tuple(orders))


def _chunk_and_microbatch(passage, group, num_chunks):
    """Return chunk and micro-batch of the n-th passage; a group passes chunk after chunk."""
    number_of_group, within = divmod(passage, group * num_chunks)
    chunk, member = divmod(within, group)
    return chunk, number_of_group * group + member
