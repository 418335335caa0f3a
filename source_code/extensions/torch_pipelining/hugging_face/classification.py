"""A task for a classifier: of every text, whether it is read forwards or backwards."""

import torch
from torch.nn import functional as F

from extensions.torch_pipelining.hugging_face.configuration import PADDING


def sequences_to_classify(tokens):
    """Every second text is read backwards: which ones? They are of different lengths.

    Tokens (batch, length). Returns the tokens with padding, the labels (batch,), and as a keyword
    argument of all stages where each text ends, (batch,).
    """
    rows = torch.arange(len(tokens), device=tokens.device)
    labels = rows % 2
    tokens = torch.where(labels[:, None] == 1, tokens.flip(1), tokens)
    ends = tokens.shape[1] - 1 - rows % min(4, tokens.shape[1])
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    tokens = torch.where(positions[None] <= ends[:, None], tokens, PADDING)
    return tokens, labels, {"ends": ends}


def sequence_loss(scores, labels):
    """Mean cross-entropy in nats per sequence. Scores (batch, classes), labels (batch,)."""
    return F.cross_entropy(scores, labels)
