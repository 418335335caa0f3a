# SPDX-License-Identifier: Apache-2.0
"""Cuts a model into stages of even work, where the head counts as a number of layers.

The work is the multiplications of one token's forward: one for each weight of a matrix, and those
of attention. The embedding is a look-up without multiplications. A backward is twice a forward for
layers and head alike, so the forwards decide the cut.
"""

import math

from extensions.pretraining.weight_count import sizes_of
from pipeline.model import cut_evenly


def head_in_layers(config):
    """The work of a ModelConfig's head, in layers. Attention computes half of all pairs."""
    products = sum(size.numel() for size in sizes_of(config) if len(size) > 1)
    attention = config.seq_len * config.heads * config.head_dim
    return config.vocabulary * config.dim / (products + attention)


def cut_by_work(config, num_stages):
    """The number of layers of each stage that minimizes the work of the slowest, head included.

    None if there are fewer layers than stages.
    """
    return best_cut(config.layers, num_stages, head=head_in_layers(config))


def best_cut(layers, num_stages, embedding=0.0, head=0.0):
    """The number of layers of each stage that minimizes the work of the slowest stage.

    `embedding` and `head` are the work of the two ends, in layers. An even cut is preferred if no
    other is faster. Each stage has at least one layer. None if there are fewer layers than stages.
    """
    if layers < num_stages:
        return None
    best = [last - first for first, last in cut_evenly(layers, num_stages)]
    work = slowest(best, embedding, head)
    for last in range(1, layers - num_stages + 2) if num_stages > 1 else ():
        if last + head >= work:
            break
        most = min((layers - last) // (num_stages - 1), math.ceil(work - embedding) - 1)
        for first in range(most, 0, -1) if num_stages > 2 else [layers - last]:
            inner = cut_evenly(layers - first - last, num_stages - 2) if num_stages > 2 else []
            if inner and inner[0][1] >= work:
                break
            # Larger stages come last, because the first stages hold the most micro-batches.
            cut = [first, *(end - begin for begin, end in reversed(inner)), last]
            if slowest(cut, embedding, head) < work:
                best, work = cut, slowest(cut, embedding, head)
    return best


def slowest(cut, embedding, head):
    """The work of the slowest stage, in layers."""
    work = [float(layers) for layers in cut]
    work[0] += embedding
    work[-1] += head
    return max(work)
