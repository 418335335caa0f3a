# SPDX-License-Identifier: Apache-2.0
"""How many weights some layers of a model have. Single layers are laid out, without memory."""

from dataclasses import replace
from functools import cache

import torch

from extensions.real_models.saved_part import SavedPart, SavedSettings
from pipeline.model import ModelPart


def count_weights(config, first=0, last=None):
    """(number of weights, number of tensors) of layers `first` to `last` - 1, by default of all.

    The first layer includes the embedding, the last one the last norm and the head.
    """
    last = config.layers if last is None else last
    sizes = [sizes_of(config, place) for place in range(3)]
    weights = [sum(size.numel() for size in part) for part in sizes]
    tensors = [len(part) for part in sizes]
    return tuple(
        (last - first) * layer
        + (with_embedding - layer if first == 0 else 0)
        + (with_head - layer if last == config.layers else 0)
        for with_embedding, layer, with_head in (weights, tensors)
    )


@cache
def sizes_of(config, place=1):
    """The sizes of the weights of layer `place` of three; layer 1 is without embedding and head."""
    part = SavedPart if isinstance(config, SavedSettings) else ModelPart
    with torch.device("meta"):
        weights = part(replace(config, layers=3), place, place + 1).parameters()
        return [weight.shape for weight in weights]
