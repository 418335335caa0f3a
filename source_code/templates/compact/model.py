"""The course's one model, a small Llama-style decoder, and how a stage of it is built."""

import math
import zlib

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 256  # tokens are bytes


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Attention(nn.Module):
    """Causal self-attention; several query heads share a key and a value head."""

    def __init__(self, sizes):
        super().__init__()
        self.head_dim = sizes.dim // sizes.heads
        kv_dim = sizes.kv_heads * self.head_dim
        self.query = nn.Linear(sizes.dim, sizes.dim, bias=False)
        self.key = nn.Linear(sizes.dim, kv_dim, bias=False)
        self.value = nn.Linear(sizes.dim, kv_dim, bias=False)
        self.output = nn.Linear(sizes.dim, sizes.dim, bias=False)

    def forward(self, x, rotary):
        def in_heads(projected):  # (batch, length, width) -> (batch, heads, length, head_dim)
            return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        query = rotate(in_heads(self.query(x)), *rotary)
        key = rotate(in_heads(self.key(x)), *rotary)
        value = in_heads(self.value(x))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: one projection gates the other."""

    def __init__(self, sizes):
        super().__init__()
        hidden_dim = 16 * math.ceil(8 * sizes.dim / 3 / 16)
        self.gate = nn.Linear(sizes.dim, hidden_dim, bias=False)
        self.up = nn.Linear(sizes.dim, hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, sizes.dim, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class DecoderLayer(nn.Module):
    """Attention, then the feed-forward network, each behind a norm and added to its input."""

    def __init__(self, sizes):
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(sizes.dim), Attention(sizes)
        self.feed_forward_norm, self.feed_forward = RMSNorm(sizes.dim), FeedForward(sizes)

    def forward(self, x, rotary):
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.feed_forward(self.feed_forward_norm(x))


class ModelPart(nn.Module):
    """Layers `first` to `last` - 1 of the model, with the embedding before or the head behind."""

    def __init__(self, sizes, first, last):
        super().__init__()
        self.is_first, self.is_last = first == 0, last == sizes.layers
        if self.is_first:
            self.embedding = nn.Embedding(VOCABULARY, sizes.dim)
        self.layers = nn.ModuleDict({str(i): DecoderLayer(sizes) for i in range(first, last)})
        if self.is_last:
            self.norm = RMSNorm(sizes.dim)
            self.head = nn.Linear(sizes.dim, VOCABULARY, bias=False)
        half = sizes.dim // sizes.heads // 2
        frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.outer(torch.arange(sizes.seq_len, dtype=torch.float64), frequency)
        self.register_buffer("cosine", angle.cos(), persistent=False)
        self.register_buffer("sine", angle.sin(), persistent=False)

    def forward(self, x):
        """Tokens (b, length) or activations (b, length, dim) in, activations or scores out."""
        if self.is_first:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x, (self.cosine[: x.shape[1]], self.sine[: x.shape[1]]))
        return self.head(self.norm(x)) if self.is_last else x


def rotate(x, cosine, sine):
    """Rotary position embedding: turn each pair (x[i], x[i + half]) by its position's angle."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cosine - right * sine, left * sine + right * cosine), dim=-1)


def cut_evenly(num_layers, num_stages):
    """Layers of each stage as (first, last) pairs; the earlier stages get one more."""
    base, extra = divmod(num_layers, num_stages)
    ends = [base * stage + min(stage, extra) for stage in range(num_stages + 1)]
    return list(zip(ends, ends[1:]))


def build_part(sizes, first, last, device):
    """Layers `first` to `last` - 1; weights follow from (seed, name), so every cut starts alike."""
    part = ModelPart(sizes, first, last)
    for name, weight in part.named_parameters():
        if weight.dim() < 2:  # a norm starts at one
            nn.init.constant_(weight, 0.0 if "bias" in name else 1.0)
        else:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode(), sizes.seed))
            normal = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            scale = 1.0 if name == "embedding.weight" else weight[0].numel() ** -0.5
            weight.data = scale * normal
    return part.to(device, sizes.torch_dtype)


def token_loss(scores, targets, reduction="mean"):
    """Cross-entropy in nats. Scores (..., VOCABULARY), targets (...)."""
    return F.cross_entropy(scores.flatten(0, -2), targets.flatten(), reduction=reduction)
