# SPDX-License-Identifier: Apache-2.0
"""The stages of a rank that has its layers and its rows of the embedding and of the head.

The cross-entropy of a token is log(sum of exp(scores)) - score of the target. A rank has the scores
of its rows only, and computes three numbers per token: its largest score, the sum of
exp(score - largest), and the target's score or zero (Yeung et al. 2024, 2411.05288, section 4). The
loss combines those of all ranks, so the scores themselves are never sent.
"""

import torch
from torch import nn

from extensions.tensor_parallel.sharded_part import look_up, score_of_target
from pipeline.model import ModelPart, cut_evenly, linear, materialise, starting_weight
from pipeline.stage import Stage


class EmbeddingRows(nn.Module):
    """Rows `first` to `last` - 1 of the embedding: tokens (batch, length) to (batch, length, dim)."""

    def __init__(self, config, first, last):
        super().__init__()
        self.first = first
        self.embedding = nn.Embedding.from_pretrained(torch.empty(last - first, config.dim), False)

    def forward(self, tokens):
        return look_up(self.embedding, tokens, self.first)


class HeadRows(nn.Module):
    """Rows `first` to `last` - 1 of the head: (batch, length, dim) to (batch, length, rows)."""

    def __init__(self, config, first, last):
        super().__init__()
        self.first = first
        self.head = linear(config.dim, last - first)

    def forward(self, x):
        return self.head(x)


class JoinedLoss(nn.Module):
    """Computes each token's loss from the sums of all ranks, (ranks, 3, batch, length)."""

    def forward(self, found):
        largest_of_rank, total, of_target = found.unbind(1)
        largest_of_rank = largest_of_rank.detach()
        largest = largest_of_rank.max(0).values
        total = (total * (largest_of_rank - largest).exp()).sum(0)
        return total.log() + largest - of_target.sum(0)


class ScoresStage(Stage):
    """A Stage whose forward is the pass S of the paper and whose backward is its pass T."""

    def run_forward(self, microbatch, inputs, targets):
        found = softmax_sums(self.part(inputs), targets, self.part.first)
        self.held[microbatch] = inputs, found
        return found


def softmax_sums(scores, targets, first):
    """Return (3, batch, length) from scores (batch, length, rows) of the tokens from `first` on.

    These are the largest score, as a constant, the sum of exp(score - largest), and the target's
    score, 0 if its row is elsewhere. They are at least float32: a sum in bfloat16 is too coarse.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    largest = scores.detach().max(-1).values
    total = (scores - largest[..., None]).exp().sum(-1)
    return torch.stack([largest, total, score_of_target(scores, targets, first)])


def build_spread_stages(arguments, schedule, rank, cut, device):
    """Build the stages of `rank` by index (fan.py); with --tied both ends share one matrix."""
    a, p = arguments, schedule.num_ranks
    first, last = cut_evenly(a.vocabulary, p)[rank]
    embedding = build_rows(EmbeddingRows, "embedding", a, first, last, device)
    head = build_rows(HeadRows, "head", a, first, last, device)
    if a.tied:
        embedding.embedding.weight = head.head.weight
    stages = {
        rank: Stage(build_layers(a, *cut[rank], device), rank, schedule.num_stages, None),
        p + rank: ScoresStage(head, p + rank, schedule.num_stages, None),
        2 * p + 1 + rank: Stage(embedding, 2 * p + 1 + rank, schedule.num_stages, None),
    }
    if rank == p - 1:
        stages[2 * p] = Stage(JoinedLoss(), 2 * p, schedule.num_stages, mean_over(a.microbatches))
    for index, stage in stages.items():  # the stages are not one line in the order of their numbers
        stage.is_first, stage.is_last = index > 2 * p, index == 2 * p
    return stages


def build_rows(module, name, arguments, first, last, device):
    """Build rows `first` to `last` - 1 of the embedding or the head, with starting weights."""
    a = arguments
    with torch.device("meta"):
        part = module(a.config, first, last)
    whole = starting_weight(f"{name}.weight", (a.vocabulary, a.dim), a.seed)
    rows = whole[first:last].to(device, a.torch_dtype, copy=True)
    getattr(part, name).weight = nn.Parameter(rows)
    return part


def build_layers(arguments, first, last, device):
    """Build layers `first` to `last` - 1 without embedding and head; the last part has the norm."""
    a = arguments
    with torch.device("meta"):
        part = ModelPart(a.config, first, last)
    if part.is_first:
        part.embedding = nn.Identity()
    if part.is_last:
        part.head = nn.Identity()
    return materialise(part, a.config, a.seed, a.torch_dtype, device)


def mean_over(microbatches):
    """Return the function from a micro-batch's token losses to its share of the mean loss."""
    return lambda losses, targets: losses.mean() / microbatches
