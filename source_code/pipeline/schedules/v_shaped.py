"""Two stages a rank, placed in a V: rank i has stage i and, counted from the end, stage i again.

The first rank has both ends of the model, so it has the loss, and a micro-batch turns round on the
last rank without a message. `down` is a rank's stage on the way to the turn, `up` the one after it.
"""

from pipeline.schedule import Schedule, ScheduleError, validate
from pipeline.schedules.order import Order, require_positive


def zb_v(num_ranks, num_microbatches, num_chunks=2):
    """Zero bubble with the memory of 1F1B (Zero Bubble: Qi et al. 2023, arXiv 2401.10241, section 6).

    The handcrafted order, without a bubble on any rank when F, I and W take equally long; the
    paper's automatic scheduler searches for others. It is written for 2 * num_ranks - 1
    micro-batches at least; with fewer, the actions of those that do not exist are left out.
    """
    _require_two_chunks("zb-v", num_ranks, num_microbatches, num_chunks)
    written = max(num_microbatches, 2 * num_ranks - 1)
    orders = []
    for rank in range(num_ranks):
        down, up = rank, 2 * num_ranks - 1 - rank
        order = Order()
        # Warm-up: forwards until the first comes back from the turn, then both ways in turn,
        for _ in range(2 * (num_ranks - rank) - 1):
            order.forward(down)
        for _ in range(rank):
            order.forward(up)
            order.forward(down)
        # and backwards on the way up until the first one comes for the way down.
        for _ in range(num_ranks - rank):
            order.forward(up)
            order.backward_for_input(up)
            order.backward_for_weights()
        # Steady: forward and whole backward on the way down, then on the way up.
        for _ in range(written - num_ranks):
            if order.taken[down, "F"] < written:
                order.forward(down)
            order.backward_for_input(down)
            order.backward_for_weights()
            order.forward(up)
            order.backward_for_input(up)
            order.backward_for_weights()
        # Cool-down: gradients first, so that no other rank waits; the weights fill the end.
        for _ in range(rank):
            order.backward_for_input(down)
            order.backward_for_input(up)
        for _ in range(num_ranks - rank):
            order.backward_for_input(down)
            order.backward_for_weights(down)
        for _ in range(rank):
            order.backward_for_weights(up)
        order.remaining_backwards_for_weights()
        orders.append(tuple(a for a in order.actions if a.microbatch < num_microbatches))
    return validate(Schedule("zb-v", tuple(orders)))


def dualpipe_v(num_ranks, num_microbatches, num_chunks=2):
    """DualPipe cut in half (DeepSeek-AI 2024, arXiv 2412.19437, and its repository's DualPipeV).

    Forward and backward come in pairs, which DeepSeek runs at once, so that the messages of one
    hide behind the computing of the other. Here a pair is two actions, one after the other.
    """
    _require_two_chunks("dualpipe-v", num_ranks, num_microbatches, num_chunks)
    if num_microbatches < 2 * num_ranks:
        raise ScheduleError(
            f"dualpipe-v needs at least two micro-batches a rank, {2 * num_ranks} for {num_ranks} "
            f"ranks, not {num_microbatches}; use more micro-batches or fewer ranks"
        )
    orders = []
    for rank in range(num_ranks):
        orders.append(tuple(_dualpipe_v_order(rank, num_ranks, num_microbatches).actions))
    return validate(Schedule("dualpipe-v", tuple(orders)))


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
    # 6, cool-down: backwards on both ways, in the second half gradients only,
    in_full = rank + 1
    for way in [up, down] * (rank + 1):
        if in_full > 0:
            order.backward(way)
        else:
            order.backward_for_input(way)
        in_full -= 1
    # 7 and 8: and the weights' parts that this has left, between the last gradients and at the end.
    for _ in range(behind):
        order.backward_for_weights()
        order.backward_for_input(down)
    order.remaining_backwards_for_weights()
    return order


def _require_two_chunks(name, num_ranks, num_microbatches, num_chunks):
    require_positive(num_ranks, num_microbatches)
    if num_chunks != 2:
        raise ScheduleError(
            f"{name} has 2 chunks a rank, one on each side of the V, not {num_chunks}"
        )
