# SPDX-License-Identifier: Apache-2.0
"""Epochs: every row of a text once, before any row comes a second time.

A batch still follows from (seed, step) alone. So a run may stop in the middle of an epoch and go on
with another number of ranks. If the rows of an epoch do not fill its last batch, the first rows of
the next epoch do.
"""

from functools import lru_cache

import torch

from pipeline.command_line import ranks_from_environment


class InEpochs:
    """A Corpus whose rows are shuffled in each epoch, in place of rows drawn with repeats.

    Everything but `batch` is that of `corpus`, which has `num_rows(seq_len)` and `rows_at`.
    """

    def __init__(self, corpus):
        self.corpus = corpus

    def __getattr__(self, name):
        return getattr(self.corpus, name)

    def batch(self, step, batch_size, seq_len, seed=0):
        """Return inputs and targets of `step`, both (batch_size, at most seq_len)."""
        count = self.corpus.num_rows(seq_len)
        first = step * batch_size
        places = [divmod(number, count) for number in range(first, first + batch_size)]
        rows = [shuffled(count, epoch, seed)[place] for epoch, place in places]
        return self.corpus.rows_at(rows, seq_len)


@lru_cache(maxsize=2)  # a batch may end one epoch and begin the next
def shuffled(count, epoch, seed):
    """Return the order of `count` rows in an epoch, int64."""
    generator = torch.Generator().manual_seed((seed * 2654435769 + epoch) % 2**32)
    return torch.randperm(count, generator=generator).numpy()


def take_epochs(arguments):
    """With --shuffle let the text give each row once per epoch; rank 0 says how long an epoch is."""
    a = arguments
    if not a.shuffle:
        return
    a.text = InEpochs(a.text)
    epoch = a.text.num_rows(a.seq_len) / a.batch_size
    if ranks_from_environment()[0] == 0:
        print(
            f"an epoch has {epoch:.1f} steps, and --steps {a.steps} are {a.steps / epoch:.2f} epochs"
        )
