"""The Llama of torchtitan as its eager runs of 2024 and 2025 had it, on the meta device.

An RMS norm is a chain of operators in float32 (``norm_type = "rmsnorm"`` in train_configs/llama2_13b.toml and
torchtitan/models/norms.py of pytorch/torchtitan), rotary positions are complex products in float32, and keys and values
are repeated for the queries of their group.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["titan_llama"]


class RMSNorm(nn.Module):
    """An RMS norm, operator by operator."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Return queries or keys of (batch, length, heads, size) times complex numbers of (1, length, 1, size / 2)."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(3).type_as(x)


class Attention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.size, self.repeats = width // heads, heads // groups
        self.wq, self.wo = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.wk, self.wv = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))

    def repeated(self, x: Tensor) -> Tensor:
        if self.repeats == 1:
            return x
        batch, length, groups, size = x.shape
        wide = x[:, :, :, None, :].expand(batch, length, groups, self.repeats, size)
        return wide.reshape(batch, length, groups * self.repeats, size)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (layer(x).view(batch, length, -1, self.size) for layer in (self.wq, self.wk, self.wv))
        q, k = rotated(q, turns), rotated(k, turns)
        q, k, v = (each.transpose(1, 2) for each in (q, self.repeated(k), self.repeated(v)))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).contiguous().view(batch, length, -1))


class FeedForward(nn.Module):
    """The gated layers of a block."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """A block."""

    def __init__(self, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(width), RMSNorm(width)
        self.attention = Attention(width, heads, groups)
        self.feed_forward = FeedForward(width, inner)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """A Llama."""

    def __init__(self, layers: int, width: int, heads: int, groups: int, inner: int, vocabulary: int, length: int):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, heads, groups, inner) for _ in range(layers))
        self.norm, self.output = RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.turns: Tensor = torch.empty(length, width // heads // 2, dtype=torch.complex64, device="meta")

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok_embeddings(ids)
        turns = torch.empty_like(self.turns[: ids.shape[1]], device=ids.device)[None, :, None, :]
        for layer in self.layers:
            x = layer(x, turns)
        return self.output(self.norm(x))


def titan_llama(
    layers: int, width: int, heads: int, groups: int, inner: int, *, vocabulary: int = 128256, length: int = 8192
) -> nn.Module:
    """Return torchtitan's Llama on the meta device, in bfloat16."""
    with torch.device("meta"):
        return Transformer(layers, width, heads, groups, inner, vocabulary, length).bfloat16()
