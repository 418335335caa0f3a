# SPDX-License-Identifier: Apache-2.0
"""Makes each batch during the step before it, and only on the ranks that need it.

The first stage needs the inputs and the last stage the targets. A rank with neither needs only the
length of the rows and the number of tokens in the loss. For a plain text both follow from the
flags, so such a rank draws nothing. If rows have padding or several documents, every rank draws.
"""

from concurrent.futures import ThreadPoolExecutor

import torch

from extensions.pretraining.padding import count_real_tokens
from pipeline.data import Text


def needed_on(schedule, rank, packed=False):
    """Return whether this rank needs inputs and whether it needs targets, also for masks."""
    stages = schedule.stages_of(rank)
    return 0 in stages, packed or schedule.num_stages - 1 in stages


class Batches:
    """The batches of a training run of `arguments`, on one rank.

    `cut(batch)` returns the passes of a batch: pairs of dictionaries from a micro-batch to its
    inputs and to its targets. `needed` is the result of `needed_on`.
    """

    def __init__(self, arguments, cut, needed, device):
        self.arguments, self.cut, self.needed, self.device = arguments, cut, needed, device
        whole_rows = type(arguments.text).batch is Text.batch
        self.draws = any(needed) or not whole_rows
        self.maker = ThreadPoolExecutor(1)
        self.coming = {}  # number -> what `make` will return

    def take(self, number):
        """Return the passes of batch `number`, and the number of tokens in its loss."""
        for wanted in (number, number + 1):
            if wanted not in self.coming and wanted < max(self.arguments.steps, number + 1):
                self.coming[wanted] = self.maker.submit(self.make, wanted)
        passes, real_tokens = self.coming.pop(number).result()
        return [self.on_device(one) for one in passes], real_tokens

    def make(self, number):
        """Return what `take` does, in host memory; pinned for a GPU, for asynchronous copies."""
        a = self.arguments
        shape = a.batch_size, a.seq_len
        if not self.draws:
            nothing = torch.zeros((), dtype=torch.int64).expand(shape)
            return self.cut((nothing, nothing)), a.batch_size * a.seq_len
        batch = a.text.batch(number, *shape, a.seed)
        passes = self.cut(batch)
        if self.device.type == "cuda":
            passes = [
                tuple(
                    {m: tokens.pin_memory() for m, tokens in part.items()} if wanted else part
                    for part, wanted in zip(one, self.needed)
                )
                for one in passes
            ]
        real_tokens = count_real_tokens([batch[1]])
        if not real_tokens:  # the loss would be 0 / 0
            raise SystemExit(
                f"--data: no token of batch {number} has a next one in its document; use a larger "
                "--seq-len or --batch-size"
            )
        return passes, real_tokens

    def on_device(self, one):
        """Return a pass with the needed tensors on this rank's device, copied asynchronously."""
        return tuple(
            {m: tokens.to(self.device, non_blocking=True) for m, tokens in part.items()}
            if wanted
            else part
            for part, wanted in zip(one, self.needed)
        )
