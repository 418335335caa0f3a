# SPDX-License-Identifier: Apache-2.0
"""The starting weights of a Hugging Face model, drawn by seed and name."""

import zlib

import torch
from torch import nn

from extensions.torch_pipelining.hugging_face.configuration import model_class

INITIAL_SPREAD = 0.02  # standard deviation of the random weights, as in GPT-2


def build_layout(arguments):
    """Return the whole model laid out without memory: shapes and names."""
    with torch.device("meta"):
        model = model_class(arguments)(arguments.model_config)
    return model.to(arguments.torch_dtype)


def build_whole(arguments, device):
    """Return the unchanged model with memory and starting weights, for --verify."""
    arguments.model_config.tie_word_embeddings = arguments.tied
    model = model_class(arguments)(arguments.model_config).to(device, arguments.torch_dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weight_of(arguments, name, parameter.shape))
    return model


def fill(module, arguments, device):
    """Fill a module without memory with its weights, each by its name in the whole model."""
    for path, part in module.named_modules():
        for name, layout in list(part.named_parameters(recurse=False)):
            weight = weight_of(arguments, f"{path}.{name}", layout.shape)
            setattr(part, name, nn.Parameter(weight.to(device, arguments.torch_dtype)))
    return module


def weight_of(arguments, name, shape):
    """Return the initial value of a parameter, drawn by seed and name."""
    if arguments.tied and name == "lm_head.weight":
        name = "transformer.wte.weight"
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=torch.float64)
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.float64)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode(), arguments.seed))
    return INITIAL_SPREAD * torch.randn(shape, generator=generator, dtype=torch.float64)
