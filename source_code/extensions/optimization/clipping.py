# SPDX-License-Identifier: Apache-2.0
"""Clips the gradients of a model on many ranks by the norm of the whole model's gradient.

Clipping scales a gradient that is too long to the allowed length and keeps its direction. The
length is that of the whole model's gradient. If each rank clipped by the norm of its own stage,
each stage would be scaled by another factor: the direction would change, and the update would
depend on the number of ranks. The squares are added exactly and rounded once, so the sum has the
same digits for every order of the ranks.
"""

import hashlib
import math

import torch
import torch.distributed as dist


def squares_of(named_parameters):
    """Return the sum of squares of each parameter's gradient, by name.

    For a gradient in shards on several ranks (a DTensor) it is the sum over all shards, so those
    ranks must call this together. The host waits for the device once, not once per parameter.
    """
    with_gradient = {name: p.grad for name, p in named_parameters if p.grad is not None}
    if not with_gradient:
        return {}
    squares = [whole_sum(gradient.pow(2).sum()).double() for gradient in with_gradient.values()]
    return dict(zip(with_gradient, torch.stack(squares).tolist()))


def whole_sum(total):
    """Return a sum over all shards; `item()` of a DTensor would give this rank's part only."""
    return total.full_tensor() if hasattr(total, "full_tensor") else total


def clip_gradients(job, named_parameters, largest_norm):
    """Scale the gradients of all ranks so that their common norm is at most `largest_norm`.

    `named_parameters` are this rank's, with names of the whole model. Every rank must call it.
    Returns the norm before clipping, the same number on every rank; without a largest norm, None.
    """
    if largest_norm is None:
        return None
    squares = {number_of(name): value for name, value in squares_of(named_parameters).items()}
    if job.num_ranks > 1:
        with job.waiting_for_all("its share of the gradient's norm"):
            squares = gather_numbers(job, squares)
    norm = norm_of(squares)
    scale_gradients(named_parameters, norm, largest_norm)
    return norm


def number_of(name):
    """Return a 63-bit hash of a name, the same on every rank."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


def gather_numbers(job, own):
    """Merge the dictionaries {integer: float} of all ranks, exchanged as tensors."""
    count = torch.tensor([len(own)])
    dist.all_reduce(count, dist.ReduceOp.MAX)
    rows = torch.zeros(2, int(count), dtype=torch.int64)  # the floats as the 64 bits that they are
    rows[0, : len(own)] = torch.tensor(list(own), dtype=torch.int64)
    values = torch.tensor(list(own.values()), dtype=torch.float64)
    rows[1, : len(own)] = values.view(torch.int64)
    parts = [torch.empty_like(rows) for _ in range(job.num_ranks)]
    dist.all_gather(parts, rows)
    pairs = (zip(part[0].tolist(), part[1].view(torch.float64).tolist()) for part in parts)
    return {number: value for part in pairs for number, value in part}  # the padding is 0: 0.0


def norm_of(squares):
    """Return the norm from the sums of squares by name; infinite if their sum overflows."""
    try:
        return math.sqrt(math.fsum(squares.values()))  # sum() rounds otherwise from Python 3.12 on
    except OverflowError:  # fsum() raises where sum() gives inf
        return math.inf


@torch.no_grad()
def scale_gradients(named_parameters, norm, largest_norm):
    """Scale by largest_norm / norm if that is below 1, as torch.nn.utils.clip_grad_norm_ does."""
    scale = min(1.0, largest_norm / (norm + 1e-6))
    for _, parameter in named_parameters:
        if parameter.grad is not None:  # None: frozen, or not used
            parameter.grad *= scale
