"""Small models with idioms that are hard for tools of this kind."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Call(nn.Module):
    """A forward that is one function, with submodules it may use: ``function(self, *args, **kwargs)``."""

    def __init__(self, function, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


@contextmanager
def zeros_as_parameters() -> Iterator[None]:
    """Build a large model quickly: ``nn.init`` fills tensors with zeros instead of random numbers."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (each for each in dir(nn.init) if each.endswith("_") and not each.startswith("_")):
            patch.setattr(nn.init, name, lambda tensor, *_, **__: tensor.detach().zero_())
        yield


def encoder():
    """Two layers; takes (batch, length, 16)."""
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)


def mixed():
    """Norm, in-place activation, a lazy layer, a parameter of its own; takes (batch, 3, 6, 6)."""
    return Call(
        lambda self, x: self.head(self.norm(self.first(x)).relu_().flatten(1)) + self.bias[0],
        first=nn.Conv2d(3, 4, 3),
        norm=nn.BatchNorm2d(4),
        head=nn.LazyLinear(5),
        bias=nn.ParameterList([torch.zeros(5)]),
    )


class CachesTensors(nn.Module):
    """Stores tensors where a forward may: an attribute, a buffer, a list, a dict, an object, in place."""

    class State:
        last: Tensor | None = None

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(4))
        self.scratch = torch.zeros(4)
        self.history: list[Tensor] = []
        self.by_name: dict[str, Tensor] = {"kept": torch.ones(2)}
        self.nested = {"lists": [[1, 2]]}
        self.state = self.State()
        self.cached = None

    def forward(self, x):
        self.calls += 1
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.scratch.add_(1)
        self.cached = x * 2
        self.brand_new = x + 1
        self.history.append(x)
        self.by_name["x"] = x
        self.by_name["kept"] = x
        self.nested["lists"][0].append(3)
        self.state.last = x
        self.linear.weight.requires_grad_(False)
        self.linear.training = not self.linear.training
        return self.linear(self.cached)


class ClampsWeights(nn.Module):
    """Clamps a weight in place, as weight-clipping critics do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        self.linear.weight.data.clamp_(-0.01, 0.01)
        return self.linear(x)


class ReplacesData(ClampsWeights):
    """Replaces the data of a weight."""

    def forward(self, x):
        self.linear.weight.data = self.linear.weight.data * 2
        return self.linear(x)


class Stack(nn.Module):
    """Layers in a ModuleList and a ModuleDict, which are never called themselves."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.heads = nn.ModuleDict({"used": nn.Linear(4, 2), "unused": nn.Linear(4, 3)})

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.heads["used"](x)


class Nested(nn.Module):
    """Holds a child twice and calls one path only."""

    def __init__(self, child):
        super().__init__()
        self.left = self.right = child

    def forward(self, x):
        return self.left(x)


Pair = namedtuple("Pair", "first second")


@dataclass
class Output:
    logits: Tensor
    loss: float | None = None


class Attention(nn.Module):
    """Self-attention by hand, rotary positions in a lazily filled cache, grouped keys, causal mask."""

    def __init__(self, width=32, heads=4, groups=2):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, groups * self.size, bias=False)
        self.value = nn.Linear(width, groups * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, self.size, 2) / self.size), persistent=False)
        self.cache = None

    def rotate(self, x):
        length = x.shape[-2]
        if self.cache is None or self.cache[0].shape[0] < length:
            angles = torch.outer(torch.arange(length, device=x.device).float(), self.inv_freq)
            angles = torch.cat((angles, angles), -1)
            self.cache = angles.cos(), angles.sin()
        cos, sin = (part[:length] for part in self.cache)
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat((-right, left), -1) * sin

    def forward(self, x):
        batch, length, width = x.shape
        q = self.rotate(self.query(x).view(batch, length, self.heads, self.size).transpose(1, 2))
        k = self.rotate(self.key(x).view(batch, length, self.groups, self.size).transpose(1, 2))
        v = self.value(x).view(batch, length, self.groups, self.size).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Decoder(nn.Module):
    """A language model whose head is tied to its embedding."""

    def __init__(self, layers=2, width=32, vocabulary=50):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([Attention(width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return Output(self.head(self.norm(x)))
