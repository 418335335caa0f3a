# SPDX-License-Identifier: Apache-2.0
"""A stage that keeps the keys and values of all tokens that have passed it.

Attention needs the query of the current token, and the keys and values of all tokens before it. A
stage that keeps keys and values computes each token once. Without them each new token would need
the computation of the whole text before it.
"""

import torch

from pipeline.model import rotate


class CachedStage:
    """Runs the layers of `part` on passes, with a cache of `slots` x `length` tokens per group.

    The cache is one tensor (layers, 2, groups x slots, kv_heads, length, head_dim). Its size is
    2 x layers x tokens x kv_heads x head_dim x the bytes of one element.
    """

    def __init__(self, part, rank, num_ranks, groups, slots, length):
        self.part, self.num_ranks, self.rank, self.slots = part, num_ranks, rank, slots
        self.is_first, self.is_last = part.is_first, part.is_last
        part.requires_grad_(False)  # nothing is kept for a backward
        config, weight = part.config, next(part.parameters())
        size = len(part.layers), 2, groups * slots, config.kv_heads, length, config.head_dim
        self.cache = torch.zeros(size, dtype=weight.dtype, device=weight.device)
        self.index = rank

    def forward(self, chain, inputs, one):
        """Run the layers on the Pass `one` of chain number `chain`.

        `inputs` are the tokens (n) on the first stage, else activations (n, dim). Returns
        activations (n, dim); on the last stage it returns the scores (rows that choose,
        vocabulary).
        """
        part = self.part
        x = part.embedding(inputs) if self.is_first else inputs
        for number, layer in enumerate(part.layers.values()):
            x = x + self.attend(number, layer.attention, layer.attention_norm(x), one)
            x = x + layer.feed_forward(layer.feed_forward_norm(x))
        if not self.is_last:
            return x
        ends = torch.tensor([row.end - row.start for row in one.rows]).cumsum(0) - 1
        chooses = torch.tensor([row.chooses for row in one.rows])
        return part.head(part.norm(x[ends[chooses].to(x.device)]))

    def attend(self, number, attention, x, one):
        """Attention of layer `number` over x (n, dim): each row by itself, over its own past."""

        def in_heads(projected):  # (n, width) -> (heads, n, head_dim)
            return projected.unflatten(-1, (-1, attention.head_dim)).transpose(0, 1)

        queries, keys, values = map(
            in_heads, (attention.query(x), attention.key(x), attention.value(x))
        )
        mixed, first = [], 0
        for row in one.rows:
            here = slice(first, first + row.end - row.start)
            rotary = self.part.cosine[row.start : row.end], self.part.sine[row.start : row.end]
            past = self.cache[number, :, one.group * self.slots + row.slot]
            past[0, :, row.start : row.end] = rotate(keys[:, here], *rotary)
            past[1, :, row.start : row.end] = values[:, here]
            query = rotate(queries[:, here], *rotary)
            positions = torch.arange(row.end, device=x.device)
            mask = positions <= positions[row.start :, None]
            seen = attention.mix(
                query[None], past[None, 0, :, : row.end], past[None, 1, :, : row.end], mask
            )
            mixed.append(seen[0].transpose(0, 1).flatten(-2))
            first = here.stop
        return attention.output(torch.cat(mixed))

    def take_turn(self, one):
        """Set `index` to the schedule's stage that runs on this rank in a Pass; return self."""
        self.index = one.depth * self.num_ranks + self.rank
        return self
