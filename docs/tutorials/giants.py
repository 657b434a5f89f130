"""Count models of 405 billion to a trillion parameters on the meta device, and cut them into 16 stages.

    python docs/tutorials/giants.py

The sizes are published for Llama 3.1 405B (arXiv:2407.21783), DeepSeek-V3 671B (arXiv:2412.19437) and Kimi K2 1T
(arXiv:2507.20534). The experts of a layer are stacked into one parameter per projection. Each expert gets an equal
share of the tokens, as from a balanced router, because a run on shapes has no scores to route by.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

from modelsummary import Statistics


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder; attention is DeepSeek's with ``latent`` ranks (query, key-value), else grouped-query."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    inner: int
    kv_heads: int = 0
    latent: tuple[int, int] | None = None
    experts: int = 0
    chosen: int = 8
    expert_inner: int = 2048
    dense_layers: int = 0


TOKENS = 6144  # 8 experts per token: 8 * TOKENS is a multiple of 256 and of 384, the numbers of experts

GIANTS = {
    "Llama 3.1 405B": Sizes(126, 16384, 128, 128256, 53248, kv_heads=8),
    "DeepSeek-V3 671B": Sizes(61, 7168, 128, 129280, 18432, latent=(1536, 512), experts=256, dense_layers=3),
    "Kimi K2 1T": Sizes(61, 7168, 64, 163840, 18432, latent=(1536, 512), experts=384, dense_layers=1),
}


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class GroupedAttention(nn.Module):
    """Attention in which several query heads share one key and value head."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = sizes.heads, sizes.kv_heads, sizes.width // sizes.heads
        self.q, self.o = linear(sizes.width, sizes.width), linear(sizes.width, sizes.width)
        self.k, self.v = (linear(sizes.width, self.kv_heads * self.size) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k, v = (each(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2) for each in (self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))


class LatentAttention(nn.Module):
    """Attention with narrow projections of queries, keys and values; 64 features of each head carry the position."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        assert sizes.latent is not None
        rank, kv_rank = sizes.latent
        self.heads, self.kv_rank = sizes.heads, kv_rank
        self.q_down, self.q_norm, self.q_up = (
            linear(sizes.width, rank),
            nn.RMSNorm(rank),
            linear(rank, self.heads * 192),
        )
        self.kv_down, self.kv_norm = linear(sizes.width, kv_rank + 64), nn.RMSNorm(kv_rank)
        self.kv_up, self.o = linear(kv_rank, self.heads * 256), linear(self.heads * 128, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_up(self.q_norm(self.q_down(x))).view(batch, length, self.heads, 192).transpose(1, 2)
        latent, position = self.kv_down(x).split([self.kv_rank, 64], -1)
        kv = self.kv_up(self.kv_norm(latent)).view(batch, length, self.heads, 256).transpose(1, 2)
        k, v = kv.split([128, 128], -1)
        k = torch.cat([k, position.unsqueeze(1).expand(-1, self.heads, -1, -1)], -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(batch, length, self.heads * 128))


class Gated(nn.Module):
    """A gated feed-forward network."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = linear(width, inner), linear(width, inner), linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """One expert shared by all tokens, and many experts from which each token uses a few."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.chosen = sizes.chosen
        self.router = linear(sizes.width, sizes.experts)
        self.bias = nn.Parameter(torch.empty(sizes.experts))
        self.shared = Gated(sizes.width, sizes.expert_inner)
        into, out = (sizes.experts, sizes.width, sizes.expert_inner), (sizes.experts, sizes.expert_inner, sizes.width)
        self.gate, self.up, self.down = (nn.Parameter(torch.empty(shape)) for shape in (into, into, out))

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.sigmoid(self.router(x))
        weights = (scores + self.bias).topk(self.chosen, -1).values
        share = x.numel() // x.shape[-1] * self.chosen // self.gate.shape[0]
        tokens = x.flatten(0, 1).repeat(self.chosen, 1).view(self.gate.shape[0], share, -1)
        y = torch.bmm(F.silu(torch.bmm(tokens, self.gate)) * torch.bmm(tokens, self.up), self.down)
        y = y.view(self.chosen, *x.shape) * weights.permute(2, 0, 1).unsqueeze(-1)
        return self.shared(x) + y.sum(0)


class Block(nn.Module):
    """Attention, followed by a feed-forward network or experts."""

    def __init__(self, sizes: Sizes, *, dense: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(sizes.width), nn.RMSNorm(sizes.width)
        self.attention = LatentAttention(sizes) if sizes.latent else GroupedAttention(sizes)
        self.feed_forward = Gated(sizes.width, sizes.inner) if dense else Experts(sizes)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


def decoder(sizes: Sizes) -> nn.Module:
    """Return the model on the meta device, in bfloat16."""
    with torch.device("meta"):
        blocks = [Block(sizes, dense=not sizes.experts or n < sizes.dense_layers) for n in range(sizes.layers)]
        ends = nn.Embedding(sizes.vocabulary, sizes.width), nn.RMSNorm(sizes.width)
        return nn.Sequential(ends[0], *blocks, ends[1], linear(sizes.width, sizes.vocabulary)).bfloat16()


def main() -> None:
    rows = []
    for name, sizes in GIANTS.items():
        model, tokens = decoder(sizes), torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
        start = time.perf_counter()
        stats = Statistics(model, tokens)
        counted = time.perf_counter()
        stages = stats.split(16)
        cut = time.perf_counter()
        costs = [fact.macs for fact in stages.facts]
        rows.append(
            (
                name,
                f"{stats.total_params:,}",
                stats.total_mult_adds / 1e12,
                counted - start,
                cut - counted,
                max(costs) / (sum(costs) / 16),
            )
        )
    headers = ["", "Parameters", f"TMACs, {TOKENS} tokens", "Summary (s)", "16 stages (s)", "Largest / mean"]
    print(tabulate(rows, headers, floatfmt=".2f", colalign=["left", *["right"] * 5]))


if __name__ == "__main__":
    main()
