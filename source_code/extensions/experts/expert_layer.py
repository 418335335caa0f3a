# SPDX-License-Identifier: Apache-2.0
"""A feed-forward network of experts: each token uses a few of them, and one that all share.

A router gives each token a probability per expert. The token goes to the `top` experts with the
largest ones, and their results are added up, each times its probability (Shazeer et al. 2017,
1701.06538; Fedus et al. 2021, 2101.03961). The shared expert computes every token (DeepSeek-AI
2024, 2401.06066). Padding goes to no routed expert.

Everything that depends on several tokens, the capacity and the auxiliary loss, is counted within
one sequence. So the result is the same however a batch is cut into micro-batches and replicas.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from pipeline.model import FeedForward, ModelPart, linear, materialise


@dataclass(frozen=True)
class Routing:
    """The settings of all expert layers.

    An expert takes at most ceil(`capacity` x top x length / experts) tokens of a sequence, and the
    rest of them go without it; None drops no token. `auxiliary` is the factor of the auxiliary loss
    in the loss of the batch.
    """

    experts: int = 4
    top: int = 2
    capacity: float | None = None
    auxiliary: float = 0.01


class Pairs(NamedTuple):
    """Which token goes to which expert, sorted by expert; each has one entry per pair."""

    token: torch.Tensor
    expert: torch.Tensor
    weight: torch.Tensor


class Experts(nn.Module):
    """The feed-forward network of a layer: (batch, length, dim) to the same shape.

    `real` (batch, length) is False for padding; set it before each forward. Afterwards `auxiliary`
    is the auxiliary loss of the layer, summed over the sequences. `counts` adds up how many tokens
    of this rank have gone to each of all experts.
    """

    def __init__(self, config, routing, group):
        super().__init__()
        self.routing, self.group = routing, group
        self.router = linear(config.dim, routing.experts)
        self.shared = FeedForward(config)
        own = group.own(routing.experts)
        self.experts = nn.ModuleDict({str(number): FeedForward(config) for number in own})
        self.real, self.auxiliary, self.counts = None, None, 0

    def forward(self, x):
        probabilities = self.router(x).softmax(-1)
        pairs = self.choose(probabilities)
        counts = pairs.expert.bincount(minlength=self.routing.experts)
        self.counts = self.counts + counts
        mixed = self.compute(x.flatten(0, 1)[pairs.token], counts) * pairs.weight[:, None]
        routed = torch.zeros_like(x).flatten(0, 1).index_add(0, pairs.token, mixed)
        return self.shared(x) + routed.view_as(x)

    def choose(self, probabilities):
        """Return the Pairs for probabilities (batch, length, experts), and set `auxiliary`."""
        routing = self.routing
        weights, chosen = probabilities.topk(routing.top, -1)
        takes = torch.zeros_like(probabilities).scatter(-1, chosen, 1) * self.real[..., None]
        self.auxiliary = imbalance(probabilities, takes, self.real, routing.top).sum()
        if routing.capacity is not None:
            most = math.ceil(routing.capacity * routing.top * takes.shape[1] / routing.experts)
            takes = takes * (takes.cumsum(1) <= most)
        kept = takes.gather(-1, chosen).flatten() > 0
        token = torch.arange(kept.numel() // routing.top, device=kept.device)
        pairs = token.repeat_interleave(routing.top), chosen.flatten(), weights.flatten()
        token, expert, weight = (each[kept] for each in pairs)
        order = expert.argsort(stable=True)
        return Pairs(token[order], expert[order], weight[order])

    def compute(self, rows, counts):
        """Return the experts' results for rows that are sorted by expert, `counts[e]` for expert e."""
        group, own = self.group, len(self.experts)
        sent = counts.view(group.size, own).sum(1).tolist()
        arriving = group.exchange_counts(counts)  # (ranks, own experts)
        received = arriving.sum(1).tolist()
        arrived = group.exchange(rows, sent, received)  # sorted by rank, then by expert
        pieces = arrived.split(arriving.flatten().tolist())
        results = [None] * len(pieces)
        for place, expert in enumerate(self.experts.values()):
            computed = expert(torch.cat(pieces[place::own]))
            results[place::own] = computed.split(arriving[:, place].tolist())
        return group.exchange(torch.cat(results), received, sent)


def imbalance(probabilities, takes, real, top):
    """The auxiliary loss of each sequence: 1 for equal probabilities, at most E / top.

    It is the sum over the experts of f x P: f is the expert's share of the tokens over that of a
    balanced router, and P its mean probability (DeepSeek-AI 2024, 2412.19437, equations 17 to 20).
    Only P has a gradient. Returns (batch,).
    """
    tokens = real.sum(1, keepdim=True).clamp(min=1)
    share = takes.sum(1) * probabilities.shape[-1] / (top * tokens)
    mean = (probabilities * real[..., None]).sum(1) / tokens
    return (share * mean).sum(-1)


def build_expert_part(config, first, last, routing, group, seed, dtype, device):
    """Build layers `first` to `last` - 1 with this rank's experts and their starting weights."""
    with torch.device("meta"):
        part = ModelPart(config, first, last)
        for layer in part.layers.values():
            layer.feed_forward = Experts(config, routing, group)
    return materialise(part, config, seed, dtype, device)


def expert_layers(part):
    """The Experts of a part, by the number of their layer in the whole model."""
    return {int(number): layer.feed_forward for number, layer in part.layers.items()}


def is_routed(name):
    """Return whether the parameter `name` belongs to a routed expert, which few ranks have."""
    return ".experts." in name
