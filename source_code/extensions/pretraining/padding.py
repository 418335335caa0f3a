"""Rows of unequal length: padding, and a loss that counts every real token once.

A batch is a rectangle, and texts are not. What fills a row up is padding: its target is PADDING,
which no loss counts. The loss of a batch is the sum over its real tokens divided by their number,
in the whole batch: over all micro-batches and all replicas. A mean of each micro-batch's mean is
something else as soon as they have unequally many: a token in a short micro-batch then weighs more.
So the number has to be known before the first micro-batch's loss is computed.
"""

from dataclasses import dataclass

from torch.nn import functional as F

from pipeline.data import Text

PADDING = -100  # as a target; the number that torch's cross_entropy leaves out unless told
FULL_STOP = ord(".")


def count_real_tokens(targets):
    """How many targets are no padding, in a sequence of tensors."""
    return sum(int((rows != PADDING).sum()) for rows in targets)


class ShareOfLoss:
    """A loss function: a micro-batch's share of the loss of the whole batch.

    `real_tokens` is the number of real tokens of the whole batch; set it before each step. Called
    with scores (..., vocabulary) and targets (...), it returns nats. The shares of all micro-batches
    add up to the mean over the batch, and so do their gradients; one of nothing but padding adds 0.
    """

    def __init__(self):
        self.real_tokens = None

    def __call__(self, scores, targets):
        scores, targets = scores.flatten(0, -2), targets.flatten()
        total = F.cross_entropy(scores, targets, ignore_index=PADDING, reduction="sum")
        return total / self.real_tokens


@dataclass(frozen=True)
class Sentences(Text):
    """A text whose rows end with their first full stop; what comes after it is padding."""

    def batch(self, step, batch_size, seq_len, seed=0):
        """As that of Text, with PADDING as the target of everything behind the first full stop."""
        inputs, targets = super().batch(step, batch_size, seq_len, seed)
        stops = (targets == FULL_STOP).long()
        behind = stops.cumsum(1) - stops > 0
        return inputs, targets.masked_fill(behind, PADDING)
