# SPDX-License-Identifier: Apache-2.0
"""A classification task: whether a text is in its original or in reversed order."""

import torch

from extensions.torch_pipelining.hugging_face.configuration import PADDING


def sequences_to_classify(tokens):
    """Return texts of different lengths, every second one reversed, with labels.

    `tokens` is (batch, length). Returns the padded tokens, the labels (batch,), and the index of
    each text's last token, `ends` (batch,), as a keyword argument of all stages.
    """
    rows = torch.arange(len(tokens), device=tokens.device)
    labels = rows % 2
    tokens = torch.where(labels[:, None] == 1, tokens.flip(1), tokens)
    ends = tokens.shape[1] - 1 - rows % min(4, tokens.shape[1])
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    tokens = torch.where(positions[None] <= ends[:, None], tokens, PADDING)
    return tokens, labels, {"ends": ends}
