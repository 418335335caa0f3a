# SPDX-License-Identifier: Apache-2.0
"""The same model built by transformers in one process, with which --verify compares."""

import os

import torch
from torch import nn


def check_library(arguments):
    """Reject --verify if transformers is not installed, or cannot build the model in --model."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads both at its import
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    if not arguments.verify:
        return
    try:
        import transformers
        from huggingface_hub.errors import StrictDataclassError
    except ImportError:
        raise SystemExit(
            "--verify needs the package transformers; install it, or leave --verify out"
        ) from None
    folder = arguments.model_folder
    wrong = (
        AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError,
    )  # fmt: skip
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            transformers.AutoModelForCausalLM.from_config(config)
    except (*wrong, StrictDataclassError) as error:
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise SystemExit(
            f"--verify: transformers cannot build the model in {folder} ({why}); take config.json from "
            "the folder of the published model again, or leave --verify out"
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
        return self.model(tokens, attention_mask=mask, use_cache=False, return_dict=True).logits
