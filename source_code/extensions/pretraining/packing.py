# SPDX-License-Identifier: Apache-2.0
"""Rows that hold several documents, and a mask that separates the documents.

Documents of unequal length need padding, which wastes computation; packed one after the other they
need none. Without a mask, the tokens of a document would attend to the unrelated document before it
(Llama 3 uses such a mask in its training, too: 2407.21783, section 3.2).

The last token of a document has no next token. Its target is PADDING, which no loss counts. Every
rank has the targets of its micro-batches, so every stage derives the mask from these marks, and no
mask is sent.
"""

from dataclasses import dataclass
from functools import partial

import torch

from extensions.pretraining.padding import PADDING
from extensions.pretraining.tokens import Corpus
from pipeline.model import token_loss


@dataclass(frozen=True)
class PackedDocuments(Corpus):
    """A Corpus whose documents lie one behind the other, in rows without padding.

    `ends` has, for the training part and the held-out part, the end of each document: the index of
    the first token after it, int64, ascending.
    """

    ends: tuple = ()

    def batch(self, step, batch_size, seq_len, seed=0):
        """As that of Text; the target of a document's last token is PADDING."""
        generator = torch.Generator().manual_seed((seed * 2654435769 + step) % 2**32)
        last_start = len(self.training) - seq_len - 1
        starts = torch.randint(last_start + 1, (batch_size,), generator=generator).tolist()
        return self.rows(self.training, self.ends[0], starts, seq_len)

    def rows_at(self, indices, seq_len):
        starts = [index * seq_len for index in indices]
        return self.rows(self.training, self.ends[0], starts, seq_len)

    def windows(self, seq_len, most):
        count = min(most, (len(self.held_out) - 1) // seq_len)
        starts = range(0, count * seq_len, seq_len)
        return self.rows(self.held_out, self.ends[1], starts, seq_len)

    def rows(self, tokens, ends, starts, seq_len):
        """Return inputs and targets, each (len(starts), seq_len), cut from `tokens` at `starts`."""
        rows = torch.stack([tokens[start : start + seq_len + 1] for start in starts])
        inputs, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        for row, start in zip(targets, starts):
            first, behind = torch.searchsorted(ends, torch.tensor([start + 1, start + seq_len + 1]))
            row[ends[first:behind] - 1 - start] = PADDING
        return inputs, targets


def document_mask(targets):
    """Return a mask, True where a position may attend: to itself and before, in its document.

    `targets` is (rows, length) with PADDING at the end of each document; the mask is (rows, 1,
    length, length).
    """
    ends = (targets == PADDING).long()
    document = ends.cumsum(1) - ends
    same = document[:, :, None] == document[:, None, :]
    return same.tril()[:, None]


def keep_documents_apart(stage):
    """Make `stage` compute each micro-batch's mask from its targets, also when it recomputes."""
    part = stage.part
    name = "run_piece" if hasattr(stage, "run_piece") else "run_forward"
    run = getattr(stage, name)

    def run_masked(first, x, targets):
        if targets is not None:  # None: a text is generated
            stage.part = partial(part, mask=document_mask(targets))
        try:
            return run(first, x, targets)
        finally:
            stage.part = part

    setattr(stage, name, run_masked)


def masked_loss(model, inputs, targets):
    """Return the loss of a whole `model` with this mask, for training in one process."""
    return token_loss(model(inputs, document_mask(targets)), targets)
