"""Clips the gradients of a model that lies on many ranks by the norm of all of them.

Clipping turns a gradient that is too long into one of the allowed length and the same direction.
The length is that of the whole model's gradient. A rank that clips by the norm of its own stage
shortens each stage by a factor of its own: the direction changes, and no number of ranks gives the
update of another. The squares are added exactly and rounded once, so that the sum has the same
digits in whatever order the ranks bring their parts.
"""

import hashlib
import math

import torch
import torch.distributed as dist


def squares_of(named_parameters):
    """The sum of squares of each parameter's gradient, by name.

    Of a gradient that lies in shards on several ranks (a DTensor) it is that of all shards, so those
    ranks must call this together. The device is waited for once, not once per parameter.
    """
    with_gradient = {name: p.grad for name, p in named_parameters if p.grad is not None}
    if not with_gradient:
        return {}
    squares = [whole_sum(gradient.pow(2).sum()).double() for gradient in with_gradient.values()]
    return dict(zip(with_gradient, torch.stack(squares).tolist()))


def whole_sum(total):
    """A sum over all shards: `item()` of a sharded one would be that of this rank's shard."""
    return total.full_tensor() if hasattr(total, "full_tensor") else total


def clip_gradients(job, named_parameters, largest_norm):
    """Scale the gradients of all ranks so that their common norm is at most `largest_norm`.

    `named_parameters` are this rank's, with names of the whole model. Every rank must call it.
    Returns the norm before clipping, the same number on every rank; None clips nothing.
    """
    squares = {number_of(name): value for name, value in squares_of(named_parameters).items()}
    if job.num_ranks > 1:
        with job.waiting_for_all("its share of the gradient's norm"):
            squares = gather_numbers(job, squares)
    norm = norm_of(squares)
    if largest_norm is not None:
        scale_gradients(named_parameters, norm, largest_norm)
    return norm


def number_of(name):
    """A number of 63 bits that stands for a name, the same on every rank."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


def gather_numbers(job, own):
    """The dictionaries {integer: float} of all ranks as one, exchanged as tensors."""
    count = torch.tensor([len(own)])
    dist.all_reduce(count, dist.ReduceOp.MAX)
    rows = torch.zeros(2, int(count), dtype=torch.int64)  # the floats as the 64 bits that they are
    rows[0, : len(own)] = torch.tensor(list(own), dtype=torch.int64)
    values = torch.tensor(list(own.values()), dtype=torch.float64)
    rows[1, : len(own)] = values.view(torch.int64)
    parts = [torch.empty_like(rows) for _ in range(job.num_ranks)]
    dist.all_gather(parts, rows)
    pairs = (zip(part[0].tolist(), part[1].view(torch.float64).tolist()) for part in parts)
    return {number: value for part in pairs for number, value in part}  # 0 stands for none: 0.0


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
