# SPDX-License-Identifier: Apache-2.0
"""Rows of unequal length: padding, and a loss that counts every real token once.

The rows of a batch have one length, and texts differ in length. Shorter rows are filled with
padding, whose target is PADDING, which no loss counts. The loss of a batch is the sum over its real
tokens divided by their number in the whole batch: over all micro-batches and all replicas. The mean
of the micro-batches' means differs from it when they have unequal numbers of real tokens: a token
in a short micro-batch would weigh more. So the number must be known before the first loss.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from pipeline.data import Text

PADDING = -100  # as a target; the default ignore_index of torch's cross_entropy
FULL_STOP = ord(".")
MOST_NUMBERS = 2**24  # of scores in one piece: 64 MiB in float32


def count_real_tokens(targets):
    """Return how many targets in a sequence of tensors are not padding."""
    return sum(int((rows != PADDING).sum()) for rows in targets)


class ShareOfLoss:
    """A loss function: a micro-batch's share of the loss of the whole batch.

    `real_tokens` is the number of real tokens of the whole batch; set it before each step. Called
    with scores (..., vocabulary) and targets (...), it returns nats. The shares of all
    micro-batches add up to the mean over the batch, and so do their gradients; a micro-batch of
    padding alone adds 0.
    """

    def __init__(self):
        self.real_tokens = None

    def __call__(self, scores, targets):
        return SummedLoss.apply(scores.flatten(0, -2), targets.flatten()) / self.real_tokens


class SummedLoss(torch.autograd.Function):
    """The sum of the cross-entropies of scores (tokens, vocabulary), computed in pieces.

    At 8,192 tokens and a vocabulary of 32,000 the scores are the largest tensor of a training run: a
    gigabyte in float32. Sums in bfloat16 are too inexact, so cross_entropy would need a float32
    copy, and would keep a second one, the log-probabilities, until the backward. Here the forward
    keeps only the scores themselves, and float32 copies exist for one piece at a time.
    """

    @staticmethod
    def forward(context, scores, targets):
        context.save_for_backward(scores, targets)
        total = 0
        for some, of_them in pieces(scores, targets):
            total = total + F.cross_entropy(some, of_them, ignore_index=PADDING, reduction="sum")
        return total

    @staticmethod
    def backward(context, gradient):
        """Return softmax minus the one-hot target for each token that is not padding."""
        scores, targets = context.saved_tensors
        of_scores, done = torch.empty_like(scores), 0
        for some, of_them in pieces(scores, targets):
            real = of_them != PADDING
            slope = some.softmax(-1)
            slope[torch.arange(len(some), device=some.device), of_them.where(real, 0)] -= 1
            of_scores[done : done + len(some)] = slope.mul_((real * gradient)[:, None])
            done += len(some)
        return of_scores, None


def pieces(scores, targets):
    """Yield pieces of the scores, in float32 or float64, with their targets."""
    count = max(1, MOST_NUMBERS // scores.shape[-1])
    width = torch.promote_types(scores.dtype, torch.float32)
    for some, of_them in zip(scores.split(count), targets.split(count)):
        yield some.to(width), of_them


@dataclass(frozen=True)
class Sentences(Text):
    """A text whose rows end with their first full stop; padding follows it."""

    def batch(self, step, batch_size, seq_len, seed=0):
        """As that of Text, with PADDING as the target of everything behind the first full stop."""
        inputs, targets = super().batch(step, batch_size, seq_len, seed)
        stops = (targets == FULL_STOP).long()
        behind = stops.cumsum(1) - stops > 0
        return inputs, targets.masked_fill(behind, PADDING)
