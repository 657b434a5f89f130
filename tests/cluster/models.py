"""Small models for the tests of this folder."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from modelsummary import Statistics
from modelsummary.cluster import Recipe, StepModel

WIDTH, HEADS, LENGTH, LAYERS = 32, 4, 16, 4


class Attention(nn.Module):
    """Self-attention, as one fused operator or as operators of its own."""

    def __init__(self, *, fused):
        super().__init__()
        self.heads, self.size, self.fused = HEADS, WIDTH // HEADS, fused
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, self.heads, 3 * self.size).transpose(1, 2).chunk(3, -1)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = self.dropout(F.softmax(q @ k.transpose(-1, -2) * self.size**-0.5, -1)) @ v
        return self.out(y.transpose(1, 2).reshape(b, s, -1))


class Block(nn.Module):
    """A block of GPT with dropout."""

    def __init__(self, *, fused):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(fused=fused)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout1, self.dropout2 = nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.dropout1(self.attention(self.norm1(x)))
        return x + self.dropout2(self.down(F.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    """A GPT whose head shares the weights of the embedding."""

    def __init__(self, layers=LAYERS, *, fused=False):
        super().__init__()
        self.tokens = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block(fused=fused) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt(layers=LAYERS, *, fused=False):
    """Return the model on meta, and token numbers for it."""
    with torch.device("meta"):
        return Gpt(layers, fused=fused), torch.zeros(1, LENGTH, dtype=torch.long)


@cache
def statistics():
    """Return the statistics of ``gpt()``, recorded once for all tests."""
    return Statistics(*gpt())


@cache
def step_model():
    """Return the step model of ``gpt()``, whose shares run once for all tests."""
    return StepModel(statistics().live, statistics().root, Recipe())
