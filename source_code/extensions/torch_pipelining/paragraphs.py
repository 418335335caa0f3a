# SPDX-License-Identifier: Apache-2.0
"""A mask that restricts attention to the position's own paragraph."""

import torch

LINE_END = 10  # the byte; two in a row end a paragraph


def keywords_of(arguments, inputs):
    """Return what every stage takes besides its activation: a mask if --documents asks for one.

    Each rank makes the mask from the tokens, which all ranks have: keyword arguments are not sent.
    The library cuts them into micro-batches along their first dimension, as it does the inputs.
    """
    return {"mask": paragraph_mask(inputs)} if arguments.documents else {}


def paragraph_mask(tokens):
    """Return a mask, True where a position may attend: to itself and before, in its paragraph.

    `tokens` is (batch, length); the mask is (batch, 1, length, length).
    """
    line_ends = tokens == LINE_END
    ends = torch.zeros_like(tokens)
    ends[:, 1:] = line_ends[:, 1:] & line_ends[:, :-1]
    paragraph = ends.cumsum(1) - ends
    same = paragraph[:, :, None] == paragraph[:, None, :]
    return same.tril()[:, None]
