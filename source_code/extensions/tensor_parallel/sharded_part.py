# SPDX-License-Identifier: Apache-2.0
"""A stage's layers, split so that each rank of a tensor group has a part of every matrix.

    query, key, value, gate, up    split by rows, the outputs: each rank has some heads, and some
                                   of the feed-forward network's width
    output, down                   split by columns, the inputs: their results are parts of a sum
    embedding, head                split by rows, the vocabulary
    norms                          whole on every rank

The parameters have the names of the model on one rank; joined over the group, they are its weights.
"""

import torch
from torch import nn

from extensions.pretraining.padding import PADDING
from extensions.tensor_parallel.tensor_group import maximum
from pipeline.model import ModelPart, rotary_tables, starting_weight

SPLIT_DIMENSIONS = {  # by the name of the module
    "query": 0, "key": 0, "value": 0, "gate": 0, "up": 0, "embedding": 0, "head": 0,
    "output": 1, "down": 1,
}  # fmt: skip


def split_dimension(name):
    """Return the dimension in which the parameter `name` is split, or None."""
    return SPLIT_DIMENSIONS.get(name.split(".")[-2])


class ShardedPart(ModelPart):
    """A ModelPart over a TensorGroup, which `build_sharded_part` sets.

    Takes tokens (batch, length) or activations, and returns activations, or from the last part
    this rank's scores (batch, length, vocabulary / t). Activations are (batch, length, dim), with
    the sequence split (batch, length / t, dim).
    """

    def forward(self, x):
        """Run the part: around attention and feed-forward network, enter and leave the group."""
        group = self.group
        length = x.shape[1] * (1 if self.is_first or not group.splits_sequence else group.size)
        rotary = self.cosine[:length], self.sine[:length]
        if self.is_first:
            x = self.embed(x)
        for layer in self.layers.values():
            whole = group.enter(layer.attention_norm(x))
            x = x + group.leave(layer.attention(whole, rotary))
            whole = group.enter(layer.feed_forward_norm(x))
            x = x + group.leave(layer.feed_forward(whole))
        return self.head(group.enter(self.norm(x))) if self.is_last else x

    def embed(self, tokens):
        """Embed tokens; each rank has some rows of the table, and adds zeros for other tokens."""
        return self.group.leave(
            look_up(self.embedding, tokens, self.group.index * len(self.embedding.weight))
        )


def look_up(embedding, tokens, first):
    """Look up `tokens` in a table that starts with token `first`; zeros for missing rows."""
    own, elsewhere = own_rows_of(tokens, first, len(embedding.weight))
    return embedding(own).masked_fill(elsewhere[..., None], 0)


def score_of_target(scores, targets, first):
    """Return each target's score from scores (..., rows), which start with token `first`.

    It is 0 if the scores do not include the target, so the sum over all ranks is its score.
    """
    own, elsewhere = own_rows_of(targets, first, scores.shape[-1])
    found = scores.gather(-1, own[..., None]).squeeze(-1)
    return found.masked_fill(elsewhere, 0)


def own_rows_of(tokens, first, count):
    """Return each token's index among `count` rows from `first` on, and which are missing."""
    own = tokens - first
    elsewhere = (own < 0) | (own >= count)
    return own.masked_fill(elsewhere, 0), elsewhere


class ShareOfSplitLoss:
    """Like padding.ShareOfLoss, for scores of which each rank of `group` has a part.

    The cross-entropy of a token is log(sum of exp(scores)) - score of the target. Three small
    collectives bring the parts together: the largest score, the sum, and the target's score.
    """

    def __init__(self, group):
        self.group, self.real_tokens = group, None

    def __call__(self, scores, targets):
        group, width = self.group, scores.shape[-1]
        scores, targets = scores.flatten(0, -2), targets.flatten()
        largest = maximum(group, scores.detach().max(dim=-1).values)
        total = group.sum((scores - largest[:, None]).exp().sum(-1))
        of_target = group.sum(score_of_target(scores, targets, group.index * width))
        losses = total.log() + largest - of_target
        return losses[targets != PADDING].sum() / self.real_tokens


def build_sharded_part(config, first, last, group, seed, dtype, device):
    """Build layers `first` to `last` - 1 with this rank's part of the starting weights."""
    with torch.device("meta"):
        part = ShardedPart(config, first, last)
    for path, module in part.named_modules():
        for name, layout in list(module.named_parameters(recurse=False)):
            weight = starting_weight(f"{path}.{name}", layout.shape, seed)
            dimension = split_dimension(f"{path}.{name}")
            if dimension is not None:
                weight = weight.chunk(group.size, dimension)[group.index].contiguous()
            setattr(module, name, nn.Parameter(weight.to(device, dtype), layout.requires_grad))
    part.cosine, part.sine = rotary_tables(config)
    part.group = group
    return part.to(device, dtype)
