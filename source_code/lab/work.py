"""One action, as it appears to the instruments."""

from dataclasses import dataclass, field

import torch
from torch.utils._pytree import tree_leaves

from pipeline.schedule import Action


@dataclass
class Work:
    """One action of one stage: what it used and made, tensors or None, and when.

    `start` and `end` are the clock's; `again` has (start, end) of each forward that it ran again.
    `starts_now` says that what it needs has arrived just now, unseen.
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
