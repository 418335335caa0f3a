# SPDX-License-Identifier: Apache-2.0
"""Embedding and head with the same weights, at the two ends of a pipeline (Press and Wolf 2017).

Each end has a copy and a gradient of its own, and the gradient of the weights is their sum: one sum
over the first and the last rank, after all backwards and before the update. The copies start equal
and get equal updates, so they stay equal. The norm of the whole gradient counts them once.
"""

from torch import nn

from pipeline.collectives import Summing
from pipeline.model import build_part, starting_weight
from pipeline.stage import Stage
from pipeline.training import share_of_loss


def build_end_stage(arguments, index, cut, device):
    """Build stage `index` of a line; with --tied the embedding starts with the head's weights."""
    a = arguments
    part = build_tied_part(a, *cut[index], device)
    return Stage(part, index, len(cut), share_of_loss(a.microbatches))


def build_tied_part(arguments, first, last, device):
    """Build layers `first` to `last` - 1; with --tied a part with both ends has one matrix."""
    a = arguments
    part = build_part(a.config, first, last, a.seed, a.torch_dtype, device)
    if a.tied and part.is_first:
        weight = starting_weight("head.weight", (a.vocabulary, a.dim), a.seed)
        part.embedding.weight = nn.Parameter(weight.to(device, a.torch_dtype))
    if a.tied and part.is_first and part.is_last:
        part.head.weight = part.embedding.weight
    return part


def build_tied_model(arguments, device="cpu"):
    """Build the whole model in one part."""
    return build_tied_part(arguments, 0, arguments.layers, device)


def sum_tied_gradients(job, part, ends):
    """Replace the gradients of embedding and head, on the ranks `ends`, by their sum."""
    if job.rank in ends and len(ends) > 1:
        weight = part.embedding.weight if job.rank == ends[0] else part.head.weight
        Summing(job, [weight.grad], ends, "its gradient of the tied weights").wait()
