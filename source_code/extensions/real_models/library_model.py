# SPDX-License-Identifier: Apache-2.0
"""The same model built by transformers in one process, with which --verify compares."""

import os

from torch import nn


def check_library(arguments):
    """Reject --verify if transformers, which only --verify needs, is not installed."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads both at its import
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    if not arguments.verify:
        return
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise SystemExit(
            "--verify needs the package transformers; install it, or leave --verify out"
        ) from None


def library_model(folder, dtype, device):
    """Return the model in `folder`: a module from tokens (b, length), maybe a mask, to scores."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return ScoresOfLibrary(model.train().to(device))


class ScoresOfLibrary(nn.Module):
    """Returns only the scores from the output of a transformers model."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, mask=None):
        return self.model(tokens, attention_mask=mask, use_cache=False).logits
