# SPDX-License-Identifier: Apache-2.0
"""DualPipeV: forwards and backwards in pairs, from both ends of a V.

As in ZB-V, rank i has stage i and, counted from the end, stage i again: a micro-batch turns round
on the last rank without a message, and the first rank has the loss. `down` is a rank's stage on the
way to the turn, `up` the one after it.
"""

from pipeline.schedule import Schedule, ScheduleError
from pipeline.schedules.order import Order, require_positive


def dualpipe_v(num_ranks, num_microbatches):
    """DualPipe (DeepSeek-AI 2024, arXiv 2412.19437) cut in half by Sea AI Lab, 2025.

    Forward and backward come in pairs, which DeepSeek runs at once, so that the messages of one
    overlap with the computation of the other. Here a pair is two actions, one after the other.
    """
    require_positive(num_ranks, num_microbatches)
    if num_microbatches < 2 * num_ranks:
        raise ScheduleError(
            f"dualpipe-v needs at least two micro-batches per rank, {2 * num_ranks} for {num_ranks} "
            f"ranks, not {num_microbatches}; use more micro-batches or fewer ranks"
        )
    orders = []
    for rank in range(num_ranks):
        orders.append(tuple(_dualpipe_v_order(rank, num_ranks, num_microbatches).actions))
    return Schedule("dualpipe-v", tuple(orders))


def _dualpipe_v_order(rank, num_ranks, num_microbatches):
    """The eight steps of DeepSeek's repository, for one rank."""
    down, up = rank, 2 * num_ranks - 1 - rank
    behind = num_ranks - 1 - rank  # ranks from here to the turn
    order = Order()
    # 1 and 2, warm-up: forwards on the way down, then both ways in turn.
    for _ in range(2 * behind):
        order.forward(down)
    for _ in range(rank + 1):
        order.forward(down)
        order.forward(up)
    # 3: whole backwards on the way up, the gradient first, each followed by a forward.
    for _ in range(behind):
        order.backward_for_input(up)
        order.backward_for_weights()
        order.forward(up)
    # 4, steady: a forward on one way with a backward on the other.
    for _ in range(num_microbatches - 2 * num_ranks + rank + 1):
        order.forward(down)
        order.backward(up)
        order.forward(up)
        order.backward(down)
    # 5: the same without forwards on the way down, which have come to an end.
    for _ in range(behind):
        order.backward(up)
        order.forward(up)
        order.backward(down)
    # 6, cool-down: backwards on both ways, in the second half gradients only.
    for number, way in enumerate([up, down] * (rank + 1)):
        if number <= rank:
            order.backward(way)
        else:
            order.backward_for_input(way)
    # 7 and 8: the deferred weight gradients, between the last gradients and at the end.
    for _ in range(behind):
        order.backward_for_weights()
        order.backward_for_input(down)
    order.remaining_backwards_for_weights()
    return order
