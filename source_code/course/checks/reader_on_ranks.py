# SPDX-License-Identifier: Apache-2.0
"""Runs a lesson's program with a reader's functions on real ranks, for its check."""

from contextlib import contextmanager

from course.building.examining import examine
from course.checks.answer import WrongAnswer
from course.checks.build_words import Words


def perform(request, num_ranks):
    """Run a request (see on_ranks.py); return what each rank has reported.

    Raises WrongAnswer with the sentence about what kept the ranks from reaching their end.
    """
    observed = examine(request, num_ranks)
    if complaint := Words(observed, request).transport():
        raise WrongAnswer(complaint)
    return [rank.reports[-1] for rank in observed.ranks]


@contextmanager
def as_on_a_rank():
    """A context in which torch has one thread and makes float32, whatever a cell has set.

    One thread makes small matrix products faster.
    """
    import torch

    usual = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_num_threads(usual[0])
        torch.set_default_dtype(usual[1])
