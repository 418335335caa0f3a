# SPDX-License-Identifier: Apache-2.0
"""One matrix in two places: the embedding of the first stage is the head of the last."""

from pipeline.collectives import Summing, open_groups

COPIES = ("transformer.wte.weight", "lm_head.weight")


class TiedMatrix:
    """The copies of the matrix on this rank, if it has any.

    The tracer gives each stage its own copy and reports nothing; each copy then learns from its own
    gradient only. Copies that start equal stay equal if both take the sum of the two gradients.
    `ends` are the ranks of the first and of the last stage, one of the job's groups.
    """

    def __init__(self, job, stage, ends):
        self.job, self.ends = job, ends
        named = dict(stage.submod.named_parameters())
        self.copies = [named[name] for name in COPIES if name in named]

    def add_gradients(self):
        """Give both copies the sum of their gradients. Between a step and its update."""
        if len(self.copies) == 2:  # one rank has both
            total = self.copies[0].grad + self.copies[1].grad
            for copy in self.copies:
                copy.grad = total.clone()
        elif self.copies:
            gradient = [self.copies[0].grad]
            Summing(self.job, gradient, self.ends, "its gradient of the tied matrix").wait()


def tie_ends(job, stage):
    """Return the TiedMatrix, with a group of the end stages' ranks. Every rank calls it."""
    ends = tuple(sorted({0, job.num_ranks - 1}))
    open_groups(job, [ends])
    return TiedMatrix(job, stage, ends)
