# SPDX-License-Identifier: Apache-2.0
"""Several tensors between two stages, sent as one.

A stage may pass on more than one activation: two streams, the output of an encoder beside the state
of a decoder, or the embedding that later layers use again. A message is one tensor of a shape that
is fixed on all ranks. So the sender concatenates the tensors, and the receiver splits them again.
Their gradients return in the same way, with zeros where a tensor was not used.
"""

import math

import torch


class Bundle:
    """The layout of several tensors in one message: the shape of each tensor's rows.

    All tensors have the job's dtype. One row of the message has `numbers` elements, so the message
    has the shape (rows, numbers).
    """

    def __init__(self, *shapes):
        self.shapes = [tuple(shape) for shape in shapes]
        self.sizes = [math.prod(shape) for shape in self.shapes]
        self.numbers = sum(self.sizes)

    def together(self, *tensors):
        """Join tensors of shape (rows, *shape) into one (rows, numbers).

        Raises ValueError when a shape is not the declared one.
        """
        made = [tuple(tensor.shape[1:]) for tensor in tensors]
        if made != self.shapes:
            raise ValueError(f"a bundle is {made} for each row, but has to be {self.shapes}")
        rows = len(tensors[0])
        return torch.cat([t.reshape(rows, n) for t, n in zip(tensors, self.sizes)], dim=1)

    def apart(self, bundle):
        """Split one tensor (rows, numbers) into a tuple of tensors, each (rows, *shape)."""
        parts = bundle.split(self.sizes, dim=1)
        return tuple(part.reshape(len(bundle), *shape) for part, shape in zip(parts, self.shapes))
