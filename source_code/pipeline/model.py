# SPDX-License-Identifier: Apache-2.0
"""The course's model, a small Llama-style decoder, and how a stage of it is built.

Parameters keep their names in the whole model and are drawn from (seed, name): every cut of the
model starts from the same weights, and no rank ever builds more than its own part.
"""

import math
import zlib
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import nn
from torch.nn import functional as F

linear = partial(nn.Linear, bias=False)
RMSNorm = partial(nn.RMSNorm, eps=1e-6)  # Zhang and Sennrich 2019, 1910.07467


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; `kv_heads` divides `heads`, and `heads` cuts `dim` into even widths."""

    layers: int = 8
    dim: int = 32
    heads: int = 4
    kv_heads: int = 2
    seq_len: int = 32
    vocabulary: int = 256  # tokens are bytes, unless a tokenizer makes them

    @property
    def head_dim(self):
        return self.dim // self.heads

    @property
    def hidden_dim(self):
        """Width of the SwiGLU layer: 8/3 of `dim`, rounded up to a multiple of 16."""
        return 16 * math.ceil(8 * self.dim / 3 / 16)


class Attention(nn.Module):
    """Causal self-attention; query heads share key and value heads (Ainslie 2023, 2305.13245)."""

    def __init__(self, config):
        super().__init__()
        self.head_dim, kv_dim = config.head_dim, config.kv_heads * config.head_dim
        self.query = linear(config.dim, config.dim)
        self.key = linear(config.dim, kv_dim)
        self.value = linear(config.dim, kv_dim)
        self.output = linear(config.dim, config.dim)

    def forward(self, x, rotary, mask=None):
        def in_heads(projected):  # (batch, length, width) -> (batch, heads, length, head_dim)
            return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        query = rotate(in_heads(self.query(x)), *rotary)
        key = rotate(in_heads(self.key(x)), *rotary)
        mixed = self.mix(query, key, in_heads(self.value(x)), mask)
        return self.output(mixed.transpose(1, 2).flatten(-2))

    def mix(self, query, key, value, mask=None):
        """Return the attention output (batch, heads, length, head_dim) of queries, keys, values."""
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )


class FeedForward(nn.Module):
    """SwiGLU: one projection gates the other (Shazeer 2020, 2002.05202)."""

    def __init__(self, config):
        super().__init__()
        self.gate = linear(config.dim, config.hidden_dim)
        self.up = linear(config.dim, config.hidden_dim)
        self.down = linear(config.hidden_dim, config.dim)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class DecoderLayer(nn.Module):
    """Attention, then the feed-forward network, each behind a norm and added to its input."""

    def __init__(self, config):
        super().__init__()
        self.attention_norm = RMSNorm(config.dim)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.dim)
        self.feed_forward = FeedForward(config)

    def forward(self, x, rotary, mask=None):
        x = x + self.attention(self.attention_norm(x), rotary, mask)
        return x + self.feed_forward(self.feed_forward_norm(x))


class ModelPart(nn.Module):
    """Layers `first` to `last` - 1, with the embedding if first, with norm and head if last.

    Takes tokens (batch, length) or activations (batch, length, dim); returns activations, or from
    the last part scores (batch, length, vocabulary). `mask` (batch, 1, length, length) is True
    where a position may attend to another; without it attention is causal.
    """

    tables = "cosine", "sine"  # buffers that activations are multiplied by, in their type

    def __init__(self, config, first, last):
        super().__init__()
        self.config, self.is_first, self.is_last = config, first == 0, last == config.layers
        if self.is_first:  # nn.Embedding by itself would draw its weights
            rows = torch.empty(config.vocabulary, config.dim)
            self.embedding = nn.Embedding.from_pretrained(rows, freeze=False)
        self.layers = nn.ModuleDict({str(i): DecoderLayer(config) for i in range(first, last)})
        if self.is_last:
            self.norm = RMSNorm(config.dim)
            self.head = linear(config.dim, config.vocabulary)
        for name in self.tables:
            table = torch.empty(config.seq_len, config.head_dim // 2)
            self.register_buffer(name, table, persistent=False)

    def forward(self, x, mask=None, start=0, end=None):
        """Run the part, or only its layers `start` to `end` - 1, counted within the part."""
        layers = list(self.layers.values())
        if self.is_first and start == 0:
            x = self.embedding(x)
        rotary = self.cosine[: x.shape[1]], self.sine[: x.shape[1]]
        for layer in layers[start:end]:
            x = layer(x, rotary, mask)
        return self.head(self.norm(x)) if self.is_last and end in (None, len(layers)) else x


def rotate(x, cosine, sine):
    """Rotary position embedding of (batch, heads, length, head_dim) (Su et al. 2021, 2104.09864)."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cosine - right * sine, left * sine + right * cosine), dim=-1)


def rotary_tables(config):
    """Cosine and sine of position x frequency, each (seq_len, head_dim / 2), float64."""
    half = config.head_dim // 2
    frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.outer(torch.arange(config.seq_len, dtype=torch.float64), frequency)
    return angle.cos(), angle.sin()


def build_part(config, first, last, seed=0, dtype=torch.float64, device="cpu"):
    """Build layers `first` to `last` - 1 with their starting weights.

    The module is laid out on torch's meta device, where it has shapes but no memory; each parameter
    gets its memory together with its weight. So a model that fits on no device can be built. Only
    a part with buffers of its own is also built on the CPU, since `__init__` fills them.
    """
    with torch.device("meta"):
        part = ModelPart(config, first, last)
    if {name for name, _ in part.named_buffers()} - set(getattr(part, "tables", ())):
        with torch.random.fork_rng(devices=[]):
            fill_buffers(part, ModelPart(config, first, last))
    return materialise(part, config, seed, dtype, device)


def fill_buffers(part, filled):
    """Give a part's buffers, such as tables or statistics, the values that those of `filled` have."""
    for path, module in part.named_modules():
        for name, values in filled.get_submodule(path).named_buffers(recurse=False):
            setattr(module, name, values)


def materialise(part, config, seed=0, dtype=torch.float64, device="cpu"):
    """Replace a part's meta tensors by its starting weights; return the part."""
    for path, module in part.named_modules():
        for name, layout in list(module.named_parameters(recurse=False)):
            weight = starting_weight(f"{path}.{name}", layout.shape, seed)
            weight = nn.Parameter(weight.to(device, dtype), layout.requires_grad)  # or frozen
            setattr(module, name, weight)
    if hasattr(part, "cosine"):
        part.cosine, part.sine = (table.to(dtype) for table in rotary_tables(config))
    return part.to(device)  # other buffers keep their type


def starting_weight(name, shape, seed):
    """The float64 starting value of a parameter, from the seed and its name in the whole model.

    Norms start at one, biases at zero; matrices are normal with variance 1 / (number of inputs),
    the embedding with variance 1. Drawn on the CPU, so that every device has the same digits.
    """
    if len(shape) < 2:
        return torch.full(shape, 0.0 if "bias" in name else 1.0, dtype=torch.float64)
    # A CPU generator takes the low 32 bits of its seed and ignores the rest.
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode(), seed))
    scale = 1.0 if name == "embedding.weight" else math.prod(shape[1:]) ** -0.5
    return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


def token_loss(scores, targets):
    """Mean cross-entropy in nats per token. Scores (..., vocabulary), targets (...)."""
    return F.cross_entropy(scores.flatten(0, -2), targets.flatten())


def cut_evenly(num_layers, num_stages):
    """Return each stage's (first, last) layer, `last` excluded; earlier stages get one more."""
    base, extra = divmod(num_layers, num_stages)
    return cut_as([base + (stage < extra) for stage in range(num_stages)])


def cut_as(layers_per_stage):
    """Return each stage's (first, last) layer for given layers per stage, e.g. [3, 3, 2]."""
    ends = list(accumulate(layers_per_stage))
    return list(zip([0, *ends], ends))
