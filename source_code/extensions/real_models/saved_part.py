# SPDX-License-Identifier: Apache-2.0
"""The course's layers with the settings of a saved model, bit-equal to transformers.

transformers computes a norm in float32 even in a float64 model, and computes the tables of the
rotary embedding in float32 before it rounds them. These layers do both in the same way, so float64
and bfloat16 results are bit-equal, including gradients. The parameters keep the course's names;
NAMES maps them to the names in a file.
"""

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from pipeline.model import DecoderLayer, ModelConfig, ModelPart

NAMES = {  # the course's name of a module: its name in a file
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.query.norm": "self_attn.q_norm",
    "attention.key": "self_attn.k_proj",
    "attention.key.norm": "self_attn.k_norm",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}


@dataclass(frozen=True)
class SavedSettings(ModelConfig):
    """The sizes of ModelConfig, where `head_dim` and `hidden_dim` are free, and other settings."""

    head_dim: int = 8
    hidden_dim: int = 96
    epsilon: float = 1e-6  # in the root of a norm
    rotary_base: float = 10000.0
    rotary: tuple = (("type", "default"),)  # pairs, so that it can be compared and hashed
    query_bias: bool = False  # of the projections to queries, keys and values
    output_bias: bool = False
    feed_forward_bias: bool = False
    head_norms: bool = False  # of the queries and keys of each head
    tied: bool = False  # embedding and head are one matrix
    longest: int = 2048  # positions
    padding: int = -1  # the token whose row of the embedding is not trained; -1: every row is
    norms_in_float32: ClassVar[bool] = True  # for every dtype, as transformers computes them

    def further(self):
        """Return {name: value} of what ModelConfig does not have, as a checkpoint keeps it."""
        sizes = {field.name for field in dataclasses.fields(ModelConfig)}
        own = {name: value for name, value in vars(self).items() if name not in sizes}
        return {**own, "rotary": dict(self.rotary)}


def with_settings(config, kept):
    """Return the SavedSettings of a ModelConfig and of a checkpoint's "--settings".

    These are what `further` returned, beside the "config" that convert.py reads. Raises ValueError
    for values of another kind, as a damaged checkpoint has them.
    """
    kinds = {name: type(value) for name, value in SavedSettings().further().items()}
    kept = {"padding": -1, **kept} if isinstance(kept, dict) else {}  # an older one has no padding
    further = {name: kept.get(name) for name in kinds}
    if {name: type(value) for name, value in further.items()} != kinds:
        raise ValueError("a setting is missing or of another kind")
    rotary = further["rotary"]
    padding = further.pop("padding")
    numbers = [n for n in (*further.values(), *rotary.values()) if isinstance(n, (int, float))]
    if not (all(0 <= n < 2**31 for n in numbers) and -1 <= padding < config.vocabulary):
        raise ValueError("a setting is out of range")
    further |= {"padding": padding, "rotary": tuple(rotary.items())}
    settings = SavedSettings(**{**vars(config), **further})
    try:
        lay_out(settings, 0, 1)
        frequencies(settings)
    except (ArithmeticError, KeyError, RuntimeError, TypeError) as error:
        raise ValueError(f"the settings fit no layer ({type(error).__name__})") from None
    return settings


def name_in_file(name):
    """layers.3.attention.query.weight -> model.layers.3.self_attn.q_proj.weight."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("layers."):
        return f"{NAMES[module]}.{kind}"
    _, layer, module = module.split(".", 2)
    return f"model.layers.{layer}.{NAMES[module]}.{kind}"


class NormInFloat32(nn.RMSNorm):
    """RMSNorm as transformers computes it: in float32, for every dtype of the model."""

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)


class NormedHeads(nn.Linear):
    """A projection to queries or keys (..., heads * head_dim), and a norm of each head."""

    def __init__(self, dim, width, bias, settings):
        super().__init__(dim, width, bias)
        self.norm = NormInFloat32(settings.head_dim, settings.epsilon)

    def forward(self, x):
        heads = super().forward(x).unflatten(-1, (-1, *self.norm.weight.shape))
        return self.norm(heads).flatten(-2)


class SavedLayer(DecoderLayer):
    """A DecoderLayer with the widths, biases and norms of `settings`."""

    def __init__(self, settings):
        super().__init__(settings)
        dim, inner = settings.dim, settings.hidden_dim
        width, kv_width = (n * settings.head_dim for n in (settings.heads, settings.kv_heads))
        attention, feed_forward = self.attention, self.feed_forward
        self.attention_norm = NormInFloat32(dim, settings.epsilon)
        self.feed_forward_norm = NormInFloat32(dim, settings.epsilon)
        heads = partial(NormedHeads, settings=settings) if settings.head_norms else nn.Linear
        attention.query = heads(dim, width, bias=settings.query_bias)
        attention.key = heads(dim, kv_width, bias=settings.query_bias)
        attention.value = nn.Linear(dim, kv_width, bias=settings.query_bias)
        attention.output = nn.Linear(width, dim, bias=settings.output_bias)
        feed_forward.gate = nn.Linear(dim, inner, bias=settings.feed_forward_bias)
        feed_forward.up = nn.Linear(dim, inner, bias=settings.feed_forward_bias)
        feed_forward.down = nn.Linear(inner, dim, bias=settings.feed_forward_bias)


class SavedPart(ModelPart):
    """A ModelPart of SavedLayers; a tied head is a second copy of the embedding (tied_ends.py)."""

    def __init__(self, settings, first, last):
        super().__init__(settings, first, last)
        self.layers = nn.ModuleDict({str(i): SavedLayer(settings) for i in range(first, last)})
        if self.is_first and settings.padding >= 0:
            # As in transformers, its row gets no gradient.
            self.embedding.padding_idx = settings.padding
        if self.is_last:
            self.norm = NormInFloat32(settings.dim, settings.epsilon)


def lay_out(settings, first=0, last=None):
    """Return the part on torch's meta device: shapes and names without memory."""
    with torch.device("meta"):
        return SavedPart(settings, first, settings.layers if last is None else last)


def fill_part(part, weight_of, dtype, device):
    """Replace a part's meta tensors by real ones; `weight_of(name)` returns each weight."""
    for path, module in part.named_modules():
        for name, layout in list(module.named_parameters(recurse=False)):
            weight = weight_of(f"{path}.{name}").to(device, dtype)
            setattr(module, name, nn.Parameter(weight, layout.requires_grad))
    positions = torch.arange(part.config.seq_len, dtype=torch.float32)
    angle = positions[:, None] * frequencies(part.config)
    part.cosine, part.sine = angle.cos().to(device, dtype), angle.sin().to(device, dtype)
    return part


def empty_part(settings, first, last, dtype, device):
    """Build layers `first` to `last` - 1, whose weights are zero until a checkpoint fills them."""
    part = lay_out(settings, first, last)
    shapes = {name: weight.shape for name, weight in part.named_parameters()}
    return fill_part(part, lambda name: torch.zeros(shapes[name]), dtype, device)


def frequencies(settings):
    """Return the rotary frequencies, float32, (head_dim / 2,), bit-equal to transformers.

    Type llama3 divides low frequencies by `factor`, keeps high ones, and interpolates between.
    """
    steps = torch.arange(0, settings.head_dim, 2, dtype=torch.float32) / settings.head_dim
    plain = 1.0 / (settings.rotary_base**steps)
    said = dict(settings.rotary)
    if said["type"] == "default":
        return plain
    if said["type"] == "linear":
        return plain / said["factor"]
    low, high = said["low_freq_factor"], said["high_freq_factor"]
    before = said["original_max_position_embeddings"]
    wavelength = 2 * math.pi / plain
    stretched = torch.where(wavelength > before / low, plain / said["factor"], plain)
    share = (before / wavelength - low) / (high - low)
    blended = (1 - share) * stretched / said["factor"] + share * stretched
    is_between = ~(wavelength < before / high) & ~(wavelength > before / low)
    return torch.where(is_between, blended, stretched)
