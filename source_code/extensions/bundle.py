"""Several tensors between two stages, sent as one.

A stage may have more to pass on than one activation: two streams, the output of an encoder beside
the state of a decoder, the embedding that later layers look back at. A message is one tensor of a
shape that all ranks know. So the tensors are laid side by side, and taken apart again behind the
message. Their gradients come back in the same way, zeros where a tensor was not used.
"""

import math

import torch


class Bundle:
    """What passes between stages: for each tensor its shape for one row, declared once.

    All have the type of the job; `numbers` of a row are sent, and an activation has the shape
    (rows, numbers).
    """

    def __init__(self, *shapes):
        self.shapes = [tuple(shape) for shape in shapes]
        self.sizes = [math.prod(shape) for shape in self.shapes]
        self.numbers = sum(self.sizes)

    def together(self, *tensors):
        """One tensor (rows, numbers) of several, each (rows, *its shape). Raises ValueError."""
        made = [tuple(tensor.shape[1:]) for tensor in tensors]
        if made != self.shapes:
            raise ValueError(f"a bundle is {made} for each row, but has to be {self.shapes}")
        rows = len(tensors[0])
        return torch.cat([t.reshape(rows, n) for t, n in zip(tensors, self.sizes)], dim=1)

    def apart(self, bundle):
        """The tensors of one (rows, numbers), as a tuple."""
        parts = bundle.split(self.sizes, dim=1)
        return tuple(part.reshape(len(bundle), *shape) for part, shape in zip(parts, self.shapes))
