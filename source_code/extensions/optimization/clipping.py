"""Clips the gradients of a model that lies on many ranks by the norm of all of them.

Clipping turns a gradient that is too long into one of the allowed length and the same direction.
The length is that of the whole model's gradient. A rank that clips by the norm of its own stage
shortens each stage by a factor of its own: the direction changes, and no number of ranks gives the
update of another. The squares are added exactly and rounded once, so that the sum has the same
digits in whatever order the ranks bring their parts.
"""

import math

import torch
import torch.distributed as dist


def squares_of(named_parameters):
    """The sum of squares of each parameter's gradient, by name.

    Of a gradient that lies in shards on several ranks (a DTensor) it is that of all shards, so those
    ranks must call this together.
    """
    with_gradient = ((name, p.grad) for name, p in named_parameters if p.grad is not None)
    return {name: whole(gradient.pow(2).sum()).item() for name, gradient in with_gradient}


def whole(total):
    """A sum over all shards: `item()` of a sharded one would be that of this rank's shard."""
    return total.full_tensor() if hasattr(total, "full_tensor") else total


def clip_gradients(job, named_parameters, largest_norm):
    """Scale the gradients of all ranks so that their common norm is at most `largest_norm`.

    `named_parameters` are this rank's, with names of the whole model. Every rank must call it.
    Returns the norm before clipping, the same number on every rank; None clips nothing.
    """
    squares = [squares_of(named_parameters)]
    if job.num_ranks > 1:
        squares *= job.num_ranks
        with job.waiting_for_all("its share of the gradient's norm"):
            dist.all_gather_object(squares, squares[job.rank])
    norm = norm_of({name: value for part in squares for name, value in part.items()})
    if largest_norm is not None:
        scale_gradients(named_parameters, norm, largest_norm)
    return norm


def norm_of(squares):
    """The norm from the sums of squares by name; infinite where their sum overflows."""
    try:
        return math.sqrt(math.fsum(squares.values()))  # sum() rounds otherwise from Python 3.12 on
    except OverflowError:  # fsum() raises where sum() gives inf
        return math.inf


@torch.no_grad()
def scale_gradients(named_parameters, norm, largest_norm):
    """Scale by largest_norm / norm where that shortens, as torch.nn.utils.clip_grad_norm_ does."""
    scale = min(1.0, largest_norm / (norm + 1e-6))
    for _, parameter in named_parameters:
        if parameter.grad is not None:  # frozen, or not used
            parameter.grad *= scale
