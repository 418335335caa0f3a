# SPDX-License-Identifier: Apache-2.0
"""One action as the instruments see it."""

from dataclasses import dataclass, field

import torch
from torch.utils._pytree import tree_leaves

from pipeline.schedule import Action


@dataclass
class Work:
    """One action of one stage: the tensors that it used and made, or None, and its times.

    `start` and `end` are set by the clock; `again` has (start, end) of each recomputed forward.
    `starts_now` says that its message has just arrived without having been observed.
    """

    stage: object
    action: Action
    used: torch.Tensor | None = None
    made: torch.Tensor | None = None
    start: object = None
    end: object = None
    again: list = field(default_factory=list)
    starts_now: bool = False


def first_tensor(*values):
    """The first tensor in arguments or in an output, however they are nested; None without one."""
    return next((leaf for leaf in tree_leaves(values) if torch.is_tensor(leaf)), None)
