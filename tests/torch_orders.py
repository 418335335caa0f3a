"""The orders that torch.distributed.pipelining generates, in the text form."""

from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops


def torch_order(name, num_ranks, num_microbatches, num_chunks):
    """The order of torch's class of that name as text: one row per rank, without messages.

    A cell with two actions at once stays as torch writes it.
    """
    orders = get_schedule_ops(name, num_ranks, num_microbatches, num_chunks)
    return "".join(
        ",".join(str(action) for action in order if action is not None and action.is_compute_op)
        + "\n"
        for order in orders
    )
