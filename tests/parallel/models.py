"""Models and inputs for plans, by name: built alike in every process."""

from __future__ import annotations

import copy
import importlib
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from tests import idioms
from tests.parallel.expert_models import EXPERT_MODELS, Residual
from tests.zoo import transformers_models
from tests.zoo.catalogues import CATALOGUES

OLD = torch.__version__ < "2.10"  # FSDP of older versions needs data


class Block(nn.Module):
    """Pre-norm attention with grouped keys and a gated MLP, as torchtitan writes it."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.size = width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, groups)
        self.mlp = Mlp(width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.size = width // heads
        self.wq, self.wo = nn.Linear(width, width), nn.Linear(width, width)
        self.wk, self.wv = nn.Linear(width, groups * self.size), nn.Linear(width, groups * self.size)
        self.q_norm = nn.RMSNorm(self.size)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (each(x).view(b, t, -1, self.size).transpose(1, 2) for each in (self.wq, self.wk, self.wv))
        a = nn.functional.scaled_dot_product_attention(self.q_norm(q), k, v, is_causal=True, enable_gqa=True)
        return self.wo(a.transpose(1, 2).reshape(b, t, -1))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(width, 32), nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Called(nn.Module):
    """A block whose MLP is called by a function that holds its layers, as minGPT writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(16), Attention(16, 4, 4)
        self.mlp = mlp = nn.ModuleDict({"up": nn.Linear(16, 64), "act": nn.GELU(), "down": nn.Linear(64, 16)})
        self.call_mlp = lambda x: mlp["down"](mlp["act"](mlp["up"](x)))

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.call_mlp(self.norm(x))


class Decoder(nn.Module):
    """A small decoder whose layers torch's styles were made for."""

    def __init__(self, vocab: int = 48, width: int = 16, depth: int = 2, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads, groups) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Odd(Decoder):
    """The decoder with a vocabulary that neither two nor four ranks divide, tied to its head."""

    def __init__(self) -> None:
        super().__init__(vocab=49)
        self.head.weight = self.embed.weight


class Captioner(Decoder):
    """The decoder, behind an encoder of images that a text alone does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(12, 16)
        self.encoder = nn.ModuleList(Block(16, 4, 2) for _ in range(2))

    def forward(self, ids, patches=None):
        if patches is None:
            return super().forward(ids)
        x = self.patches(patches)
        for block in self.encoder:
            x = block(x)
        return super().forward(ids) + x.mean()


class Experts(nn.Module):
    """Stacked experts with biases, gate and up projection in one parameter."""

    def __init__(self, n: int, width: int, inner: int, *, shares: bool = False) -> None:
        super().__init__()
        self.n = n
        self.norm = nn.RMSNorm(width) if shares else nn.Identity()
        self.gate_up = nn.Parameter(torch.randn(n, 2 * inner, width) / 4)
        self.gate_up_bias = nn.Parameter(torch.randn(n, 2 * inner) / 4)
        self.down = nn.Parameter(torch.randn(n, width, inner) / 4)
        self.down_bias = nn.Parameter(torch.randn(n, width) / 4)

    def forward(self, x, index, weight):
        ids, each = index.reshape(-1), x.repeat_interleave(index.shape[-1], dim=0)
        gate_up = torch.bmm(self.gate_up[ids], each.unsqueeze(-1)).squeeze(-1) + self.gate_up_bias[ids]
        gate, up = gate_up.chunk(2, dim=-1)
        y = torch.bmm(self.down[ids], (nn.functional.silu(gate) * up).unsqueeze(-1)).squeeze(-1) + self.down_bias[ids]
        return (self.norm(y) * weight.reshape(-1, 1)).view(*index.shape, -1).sum(1)


class Mixture(nn.Module):
    """A router and stacked experts."""

    def __init__(self, width: int, *, shares: bool = False) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(width, 4), Experts(4, width, 8, shares=shares)

    def forward(self, x):
        flat = x.flatten(0, 1)
        weight, index = self.gate(flat).softmax(-1).topk(2, dim=-1)
        return self.experts(flat, index, weight).view_as(x)


class SharedBiasExperts(nn.Module):
    """Stacked experts, gate and up projection in one parameter, with one bias for all experts."""

    def __init__(self, n: int, width: int, inner: int) -> None:
        super().__init__()
        self.n = n
        self.gate_up = nn.Parameter(torch.randn(n, 2 * inner, width) / 4)
        self.bias = nn.Parameter(torch.randn(2 * inner) / 4)
        self.down = nn.Parameter(torch.randn(n, width, inner) / 4)

    def forward(self, x, index, weight):
        ids, each = index.reshape(-1), x.repeat_interleave(index.shape[-1], dim=0)
        gate, up = (torch.bmm(self.gate_up[ids], each.unsqueeze(-1)).squeeze(-1) + self.bias).chunk(2, dim=-1)
        y = torch.bmm(self.down[ids], (nn.functional.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return (y * weight.reshape(-1, 1)).view(*index.shape, -1).sum(1)


class SinkAttention(nn.Module):
    """Multi-query attention with a parameter per head, as in GPT-OSS, and one head of keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.q, self.o = nn.Linear(width, width), nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * self.size)
        self.sinks = nn.Parameter(torch.randn(heads))

    def forward(self, x):
        b, t, _ = x.shape
        q = self.q(x).view(b, t, -1, self.size).transpose(1, 2)
        k, v = (each.unsqueeze(1).expand(b, self.heads, t, self.size) for each in self.kv(x).split(self.size, dim=-1))
        scores = q @ k.transpose(-1, -2) / self.size**0.5
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(b, -1, t, 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        return self.o((weights @ v).transpose(1, 2).reshape(b, t, -1))


class MixtureDecoder(nn.Module):
    """Attention with sinks and stacked experts, which may share a norm, as in Muse."""

    def __init__(self, vocab: int = 48, width: int = 16, *, shares: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mixture = SinkAttention(width, 4), Mixture(width, shares=shares)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.attention(self.norm1(x))
        return self.head(x + self.mixture(self.norm2(x)))


class ExpertsOfModules(nn.Module):
    """A router, experts in a list and a shared one, as in DeepSeek-V2."""

    def __init__(self, width: int, number: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, number, bias=False)
        self.experts, self.shared = nn.ModuleList(Mlp(width) for _ in range(number)), Mlp(width)

    def forward(self, x):
        flat = x.flatten(0, 1)
        weight, index = self.gate(flat).softmax(-1).topk(2, dim=-1)
        y = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(index == number)
            if len(rows):
                y = y.index_add(0, rows, expert(flat[rows]) * weight[rows, place, None])
        return y.view_as(x) + self.shared(x)


class ListDecoder(nn.Module):
    """Blocks of attention and experts in a list; the first layer is dense, as in DeepSeek-V2."""

    def __init__(self, vocab: int = 48, width: int = 16) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)
        self.blocks = nn.ModuleList(Block(width, 4, 2) for _ in range(2))
        self.blocks[1].mlp = ExpertsOfModules(width)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class SizedAttention(nn.Module):
    """Query, key and value in one layer, and views with sizes that the forward reads from its input, as in nanoGPT.

    With ``is_local``, the sizes that depend on the number of heads are -1.
    """

    def __init__(self, width: int = 16, heads: int = 4, *, is_local: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.n_head, self.n_embd, self.is_local = heads, width, is_local

    def forward(self, x):
        b, t, c = x.size()
        heads = -1 if self.is_local else self.n_head
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (each.view(b, t, heads, c // self.n_head).transpose(1, 2) for each in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, -1 if self.is_local else c))


class Conv1D(nn.Module):
    """A linear layer with a transposed weight, as in GPT-2 of transformers."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) / 4), nn.Parameter(torch.randn(nf) / 4)

    def forward(self, x):
        size = (*x.size()[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size)


class FusedAttention(nn.Module):
    """Query, key and value in one layer, one after the other, as in GPT-2 of transformers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.split_size, self.size = width, width // heads
        self.c_attn, self.c_proj = Conv1D(3 * width, width), Conv1D(width, width)

    def forward(self, x):
        q, k, v = self.c_attn(x).split(self.split_size, dim=2)
        q, k, v = (each.view(*each.shape[:-1], -1, self.size).transpose(1, 2) for each in (q, k, v))
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(a.transpose(1, 2).flatten(2))


class Named(nn.Module):
    """An attention and an MLP whose linear layers are called by the names of their arguments.

    The attention computes scores in float32, and casts them to the dtype of its input.
    """

    class Attention(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.qkv, self.proj = nn.Linear(width, 3 * width), Conv1D(width, width)

        def forward(self, x):
            q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in self.qkv(input=x).chunk(3, -1))
            scores = (q @ k.mT).softmax(-1, dtype=torch.float32).type_as(x)
            return self.proj(x=(scores @ v).transpose(1, 2).flatten(2))

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(width), nn.LayerNorm(width), self.Attention(width)
        self.up, self.down = Conv1D(4 * width, width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(input=self.up(x=self.norm2(x)).relu())


class FusedBlock(nn.Module):
    """Fused attention, and a gated MLP whose gate and up projection are one ``nn.Linear``."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = FusedAttention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GLU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class FusedDecoder(nn.Module):
    """Embedding, two fused blocks, tied head."""

    def __init__(self, vocab: int = 48, width: int = 16) -> None:
        super().__init__()
        self.wte, self.ln_f = nn.Embedding(vocab, width), nn.LayerNorm(width)
        self.h = nn.ModuleList(FusedBlock(width) for _ in range(2))
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids):
        x = self.wte(ids)
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))


class BiasedAttention(nn.Module):
    """Attention with a bias by position for each head, looked up with a buffer, as in Swin."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.table = nn.Parameter(torch.linspace(0, 1, 15 * heads).view(15, heads))
        self.register_buffer("index", (torch.arange(8) - torch.arange(8)[:, None] + 7).flatten())
        self.register_buffer("mask", torch.zeros(1, 1, 8, 8).tril())

    def forward(self, x):
        q, k, v = (each(x).view(*x.shape[:-1], -1, self.size).transpose(1, 2) for each in (self.q, self.k, self.v))
        bias = self.table[self.index].view(8, 8, -1).permute(2, 0, 1).unsqueeze(0)
        a = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias + self.mask)
        return self.out(a.transpose(1, 2).flatten(2))


class GroupedAttention(nn.Module):
    """Query, key and value in one layer, group by group, as in Falcon: the queries of a group, its key, its value."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.qkv, self.out = nn.Linear(width, (heads + 2 * groups) * self.size), nn.Linear(width, width)

    def forward(self, x):
        b, t, _ = x.shape
        qkv = self.qkv(x).view(b, t, -1, self.heads // self.groups + 2, self.size)
        q = qkv[:, :, :, :-2]
        q, k, v = (each.expand_as(q).flatten(2, 3) for each in (q, qkv[:, :, :, [-2]], qkv[:, :, :, [-1]]))
        q, k, v = (each.transpose(1, 2).reshape(b, self.heads, t, self.size) for each in (q, k, v))
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(a.transpose(1, 2).reshape(b, t, self.heads * self.size))


class Inline(nn.Module):
    """Attention whose layers take the result of the norm before it, with no module around them."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.norm, self.size = nn.LayerNorm(width), width // heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def attend(self, query, key):
        q, k, v = self.q(query), self.k(key), self.v(key)
        q, k, v = (each.view(*each.shape[:-1], -1, self.size).transpose(1, 2) for each in (q, k, v))
        a = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(a.transpose(1, 2).flatten(2))

    def forward(self, x):
        y = self.norm(x)
        return x + self.attend(y, y)


class Packed(nn.Module):
    """Attention with query, key and value in one parameter, one after the other, and no layers."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.bias = nn.Parameter(torch.randn(3 * width, width) / 4), nn.Parameter(torch.randn(3 * width) / 4)
        self.out = nn.Parameter(torch.randn(width, width) / 4)

    def forward(self, x):
        q, k, v = nn.functional.linear(x, self.qkv, self.bias).chunk(3, dim=-1)
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2) @ self.out


class Alibi(Inline):
    """Attention with a bias that falls with the distance, by a slope for each head."""

    def attend(self, query, key):
        q, k, v = self.q(query), self.k(key), self.v(key)
        q, k, v = (each.unflatten(-1, (-1, self.size)).transpose(1, 2) for each in (q, k, v))
        places = torch.arange(query.shape[1], device=query.device)
        distances = (places - places[:, None]).abs().to(q.dtype)
        slopes = torch.tensor([2.0**-n for n in range(1, q.shape[1] + 1)], dtype=q.dtype, device=q.device)
        a = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=-slopes.view(-1, 1, 1) * distances)
        return self.out(a.transpose(1, 2).flatten(2))


class Merged(nn.Module):
    """Blocks that merge batch and tokens before their MLP, as in OPT, and a mean over the tokens."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.norm = Attention(16, 4, 2), nn.LayerNorm(16)
            self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x):
            x = x + self.attention(x)
            rows = x.reshape(-1, x.size(-1))
            return (rows + self.fc2(torch.relu(self.fc1(self.norm(rows))))).view(x.shape)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(48, 16), nn.Sequential(self.Block(), self.Block())
        self.norm, self.head = nn.Identity(), nn.Linear(16, 4)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.embed(ids)))[:, 1:].mean(1))


class Again(Inline):
    """Two attentions with the same layers: each layer takes the results of two norms."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.LayerNorm(16)

    def forward(self, x):
        x = super().forward(x)
        y = self.second(x)
        return x + self.attend(y, y)


class Looped(nn.Module):
    """Blocks that are called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Inline(), Inline()])

    def forward(self, x):
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return x


class Pairs(Inline):
    """An attention that is called with one tensor as query and key, which may also be added to its result."""

    class Attention(Inline):
        def forward(self, query, key):
            return self.attend(query, key)

    def __init__(self, width: int = 16, *, is_added: bool) -> None:
        nn.Module.__init__(self)
        self.is_added = is_added
        self.norm, self.attention = nn.LayerNorm(width), self.Attention(width)
        del self.attention.norm

    def forward(self, x):
        y = self.norm(x)
        return self.attention(y, y) + (y if self.is_added else x)


class Flat(nn.Module):
    """Layers without blocks; a function writes into what the second one returns, which is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.last(nn.functional.relu_(self.second(self.first(x))))


class InPlace(nn.Module):
    """Blocks whose tensors are written in place: the first takes one, the second and the third return one.

    Only the result of the second is a view.
    """

    class Block(nn.Module):
        def __init__(self, *, writes: bool = False, returns_view: bool = False) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 16)
            self.writes, self.returns_view = writes, returns_view

        def forward(self, x):
            if self.writes:
                x += 1
            y = self.last(self.first(x).relu())
            return (
                y.view_as(y) if self.returns_view else 2 * y
            )  # the result of a linear layer is a view before torch 2.15

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.activation = nn.Linear(16, 16), nn.ReLU(inplace=True)
        kinds: tuple[dict[str, bool], ...] = ({"writes": True}, {"returns_view": True}, {})
        self.blocks = nn.ModuleList(self.Block(**kind) for kind in kinds)

    def forward(self, x):
        x = self.blocks[0](self.embed(x))
        for block in self.blocks[1:]:
            x = self.activation(block(x))
        return x


class Part(nn.Module):
    """A block of 20 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).relu()


class Ends(nn.Module):
    """Layers that are called before, between and behind two lists of blocks of 20 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.small, self.twice = nn.Linear(4, 4), nn.LayerNorm(1), nn.Linear(4, 4)
        self.encoder, self.decoder = (nn.ModuleList(Part() for _ in range(2)) for _ in range(2))
        self.between, self.norm = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.LayerNorm(4)
        self.heads = nn.ModuleDict({"one": nn.Linear(4, 3), "other": nn.Linear(4, 2), "unused": nn.Linear(4, 2)})

    def forward(self, x):
        x = self.small(self.twice(self.twice(self.first(x))).unsqueeze(-1)).squeeze(-1)
        for part in self.encoder:
            x = part(x)
        x = self.between(x)
        for part in self.decoder:
            x = part(x)
        x = self.norm(x)
        return self.heads["one"](x), self.heads["other"](x)


class Scaled(Decoder):
    """Blocks whose results are scaled by parameters without dimensions (ReZero), and a temperature of the root."""

    class Scale(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block, self.alpha = block, nn.Parameter(torch.tensor(0.5))

        def forward(self, x):
            return x + self.alpha * self.block(x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(self.Scale, self.blocks))
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, ids):
        return super().forward(ids) * self.temperature.exp()


def cnn() -> nn.Module:
    def block(inner: int, outer: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(inplace=True))

    return nn.Sequential(block(3, 8), block(8, 8), block(8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def _hf(kind: str, **options: Any) -> nn.Module:
    import transformers

    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes["num_attention_heads"] = 4
    config = getattr(transformers, f"{kind.partition('For')[0]}Config")(**{**sizes, "use_cache": False, **options})
    return getattr(transformers, kind)(config)


def _ids(batch: int = 4) -> torch.Tensor:
    return torch.arange(batch * 8).reshape(batch, 8) * 7 % 48


def _tokens(width: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 3 * 8 * width, dtype=torch.float64).view(3, 8, width)


def make(name: str) -> tuple[nn.Module, dict[str, Any] | tuple[Any, ...]]:
    """Return a model in float64 in evaluation mode, and its inputs.

    Args:
        name: in ``MODELS``, or of a catalogue, such as ``"transformers/llama"``; then ``"@frozen"`` or ``"@lora"``.
    """
    torch.manual_seed(0)
    if "/" not in name:
        model, inputs = MODELS[name]()
        return _in_float64(model), inputs
    return copy.deepcopy(_of_catalogue(name))


def _in_float64(model: nn.Module) -> nn.Module:
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # the grouped product of transformers takes no float64
    return model.double().eval()


@lru_cache(maxsize=1)
def _of_catalogue(name: str) -> tuple[nn.Module, dict[str, Any] | tuple[Any, ...]]:
    library, _, architecture = name.partition("@")[0].partition("/")
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        example = importlib.import_module(CATALOGUES[library]).make(architecture)
    finally:
        torch.set_default_dtype(default)
    model = _in_float64(example.model)
    if library == "transformers":
        for config in transformers_models.parts(model.config):
            if hasattr(config, "use_cache"):
                config.use_cache = True  # as people call it
    if name.endswith("@frozen"):
        parameters = list(model.parameters())
        for parameter in parameters[: len(parameters) // 2]:
            parameter.requires_grad_(False)
    if name.endswith("@lora"):
        import peft

        layers = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(model, layers).double().eval()

    def double(value: Any) -> Any:
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    if example.kwargs:
        return model, {key: double(value) for key, value in example.kwargs.items()}
    return model, tuple(map(double, example.args))


def _vit() -> Any:
    import timm

    options = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 5}
    model = timm.models.vision_transformer.VisionTransformer(**options)
    return model, (torch.randn(2, 3, 32, 32, dtype=torch.float64),)


def _pair() -> dict[str, Any]:
    return {"input_ids": _ids(), "decoder_input_ids": _ids()}


def _shared_bias() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    model = MixtureDecoder()
    model.mixture.experts = SharedBiasExperts(4, 16, 8)
    return model, (_ids(),)


def _dbrx() -> Any:
    import transformers

    experts = {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}
    config = transformers.DbrxConfig(
        d_model=64, n_heads=4, n_layers=2, vocab_size=128, max_seq_len=64, ffn_config=experts, use_cache=False
    )
    # The classes of the configuration set neither the base of rotary positions nor a limit of the projections.
    config.attn_config.kv_n_heads, config.attn_config.rope_theta, config.attn_config.clip_qkv = 2, 1e4, 8.0
    return transformers.DbrxForCausalLM(config), {"input_ids": _ids()}


MODELS = {
    "decoder": lambda: (Decoder(), (_ids(),)),
    "gpt2": lambda: (idioms.Gpt2(depth=2), (_ids(),)),
    "odd": lambda: (Odd(), (_ids().fill_diagonal_(48),)),
    "captioner": lambda: (Captioner(), (_ids(),)),
    "sized": lambda: (nn.Sequential(*(SizedAttention(is_local=False) for _ in range(2))), (_tokens(16),)),
    "local": lambda: (nn.Sequential(*(SizedAttention(is_local=True) for _ in range(2))), (_tokens(16),)),
    "fused": lambda: (FusedDecoder(), (_ids(),)),
    "llama": lambda: (idioms.Llama(depth=2), (_ids(),)),
    "t5": lambda: (idioms.T5(depth=1), (_ids(), _ids())),
    "bert": lambda: (idioms.Bert(depth=2), {"input_ids": _ids()}),
    "flat": lambda: (Flat(), (_tokens(16),)),
    "in_place": lambda: (InPlace(), (_tokens(16),)),
    "scaled": lambda: (Scaled(), (_ids(),)),
    "ends": lambda: (Ends(), (_tokens(4),)),
    "cnn": lambda: (cnn(), (torch.randn(4, 3, 8, 8, dtype=torch.float64),)),
    "moe": lambda: (idioms.MixtureOfExperts(), (torch.randn(6, 8, dtype=torch.float64),)),
    "mixture": lambda: (MixtureDecoder(), (_ids(),)),
    "shared": lambda: (MixtureDecoder(shares=True), (_ids(),)),
    "shared_bias": _shared_bias,
    "biased": lambda: (nn.Sequential(BiasedAttention(12, 3), BiasedAttention(12, 2)), (_tokens(12),)),
    "inline": lambda: (nn.Sequential(Inline(), Inline()), (_tokens(16),)),
    "again": lambda: (nn.Sequential(Again(), Again()), (_tokens(16),)),
    "looped": lambda: (Looped(), (_tokens(16),)),
    "pairs": lambda: (nn.Sequential(Pairs(is_added=True), Pairs(is_added=False)), (_tokens(16),)),
    "grouped": lambda: (nn.Sequential(GroupedAttention(32, 8, 4), GroupedAttention(32, 8, 4)), (_tokens(32),)),
    "list": lambda: (ListDecoder(), (_ids(),)),
    "vit": _vit,
    "merged": lambda: (Merged(), (_ids(),)),
    "called": lambda: (Called(), (_tokens(16),)),
    "hf_llama": lambda: (_hf("LlamaForCausalLM", num_key_value_heads=2), {"input_ids": _ids()}),
    "hf_qwen3": lambda: (_hf("Qwen3ForCausalLM", num_key_value_heads=2, head_dim=16), {"input_ids": _ids()}),
    "hf_bert": lambda: (_hf("BertForMaskedLM"), {"input_ids": _ids()}),
    "hf_neox": lambda: (_hf("GPTNeoXForCausalLM"), {"input_ids": _ids()}),
    "hf_mixtral": lambda: (
        _hf("MixtralForCausalLM", num_key_value_heads=2, num_local_experts=4),
        {"input_ids": _ids()},
    ),
    "hf_dbrx": _dbrx,
    "hf_t5": lambda: (_hf("T5ForConditionalGeneration", d_model=64, d_kv=16, d_ff=128, num_layers=2), _pair()),
    "hf_vit": lambda: (
        _hf("ViTForImageClassification", image_size=32, patch_size=8),
        {"pixel_values": torch.randn(2, 3, 32, 32, dtype=torch.float64)},
    ),
}


def _mixture(kind: type[nn.Module]) -> Any:
    return lambda: (Residual(kind), (torch.randn(2, 6, 16, dtype=torch.float64),))


MODELS |= {name: _mixture(kind) for name, kind in EXPERT_MODELS.items()}
NAMES = tuple(MODELS)


def _encoder() -> nn.Module:
    return nn.Sequential(*(nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True) for _ in range(2)))


MODELS |= {
    "encoder": lambda: (_encoder(), (_tokens(16),)),
    "named": lambda: (nn.Sequential(nn.Embedding(48, 16), Named(), Named()), (_ids(),)),
    "packed": lambda: (nn.Sequential(Packed(), Packed()), (_tokens(16),)),
    "alibi": lambda: (nn.Sequential(Alibi(), Alibi()), (_tokens(16),)),
}
