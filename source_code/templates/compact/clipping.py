"""Clips the gradients of a model that lies on many ranks by the norm of all of them."""

import itertools
import math

import torch.distributed as dist


def clip_gradients(job, parameters, largest_norm):
    """Scale the gradients of all ranks so that their common norm is at most `largest_norm`."""
    squares = [None] * job.num_ranks
    dist.all_gather_object(squares, [weight.grad.pow(2).sum().item() for weight in parameters])
    norm = math.sqrt(math.fsum(itertools.chain(*squares)))  # the same in whatever order
    for weight in parameters:
        weight.grad *= min(1.0, largest_norm / (norm + 1e-6))
