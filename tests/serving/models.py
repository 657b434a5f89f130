"""Small decoders with caches of their own."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

WIDTH, HEADS, WORDS = 32, 4, 50


class Cache:
    """Keys and values of each layer; the last ``window`` tokens of them, if given."""

    def __init__(self, window=None):
        self.layers, self.window = {}, window

    def update(self, number, keys, values):
        if number in self.layers:
            before = self.layers[number]
            keys, values = (torch.cat(pair, dim=2) for pair in zip(before, (keys, values), strict=True))
        kept = slice(-self.window, None) if self.window else slice(None)
        self.layers[number] = keys[:, :, kept], values[:, :, kept]
        return keys, values


class Attention(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = number
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, cache):
        q, k, v = (each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.q, self.k, self.v))
        k, v = cache.update(self.number, k, v)
        attended = scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
        return self.out(attended.transpose(1, 2).flatten(-2))


class Decoder(nn.Module):
    """Blocks of attention and an MLP; returns its logits and its cache as a dict."""

    def __init__(self, layers=1, window=None, positions=None):
        super().__init__()
        self.window = window
        self.words = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Embedding(positions, WIDTH) if positions else None
        self.attention = nn.ModuleList(Attention(number) for number in range(layers))
        self.up = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(layers))
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids, past=None, use_cache=True):
        past = Cache(self.window) if past is None else past
        x = self.words(ids)
        if self.positions is not None:
            first = past.layers[0][0].shape[2] if past.layers else 0
            x = x + self.positions(torch.arange(first, first + ids.shape[1]))
        for attention, up, down in zip(self.attention, self.up, self.down, strict=True):
            x = x + attention(x, past)
            x = x + self.dropout(down(torch.relu(up(x))))
        logits = self.head(x[:, -1:])
        return {"logits": logits, "past": past} if use_cache else {"logits": logits}


class Block(nn.Module):
    """An attention and an MLP."""

    def __init__(self, number):
        super().__init__()
        self.attention = Attention(number)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, past):
        x = x + self.attention(x, past)
        return x + self.down(torch.relu(self.up(x)))


class BlockDecoder(nn.Module):
    """Blocks; returns its logits and its cache as a dict."""

    def __init__(self, layers):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block(number) for number in range(layers))

    def forward(self, ids, past=None, use_cache=True):
        past = Cache() if past is None else past
        x = self.words(ids)
        for block in self.blocks:
            x = block(x, past)
        logits = self.head(x[:, -1:])
        return {"logits": logits, "past": past} if use_cache else {"logits": logits}


class Experts(nn.Module):
    """Stacked experts of one matrix each, for which rows of their tokens are sorted."""

    def __init__(self, number):
        super().__init__()
        self.number = number
        self.weight = nn.Parameter(torch.randn(number, WIDTH, WIDTH))

    def forward(self, x, chosen, weight):
        numbers = chosen.flatten()
        order = numbers.argsort()
        rows = order // chosen.shape[-1]
        ends = torch.histc(numbers.float(), bins=self.number, min=0, max=self.number - 1).cumsum(0).to(torch.int32)
        y = torch._grouped_mm(x[rows], self.weight, offs=ends) * weight.flatten()[order][:, None]
        return torch.zeros_like(x).index_add(0, rows, y)


class MixtureDecoder(nn.Module):
    """An attention, and experts of which each token goes to two."""

    def __init__(self, experts):
        super().__init__()
        self.words, self.attention = nn.Embedding(WORDS, WIDTH), Attention(0)
        self.router, self.experts = nn.Linear(WIDTH, experts, bias=False), Experts(experts)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids, past=None, use_cache=True):
        past = Cache() if past is None else past
        x = self.words(ids)
        x = x + self.attention(x, past)
        flat = x.flatten(0, 1)
        weight, chosen = self.router(flat).softmax(-1).topk(2, -1)
        x = x + self.experts(flat, chosen, weight).view_as(x)
        logits = self.head(x[:, -1:])
        return {"logits": logits, "past": past} if use_cache else {"logits": logits}


class Recurrent(nn.Module):
    """Works through its tokens one after the other; its state is a list of a tensor."""

    def __init__(self):
        super().__init__()
        self.words, self.cell = nn.Embedding(WORDS, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, ids, state=None):
        x = self.words(ids)
        h = x.new_zeros(len(ids), WIDTH) if state is None else state[0]
        for step in range(ids.shape[1]):
            h = torch.tanh(self.cell(torch.cat([x[:, step], h], dim=-1)))
        return {"last": h, "state": [h]}


class TupleDecoder(nn.Module):
    """Attention written by hand: positions from a sliced table, and a cache that is a tuple of pairs."""

    def __init__(self, positions):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.table = nn.Parameter(torch.randn(1, positions, WIDTH))
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))

    def forward(self, ids, past=None):
        first = 0 if past is None else past[0][0].shape[1]
        x = self.words(ids) + self.table[:, first : first + ids.shape[1]]
        kept = []
        for number, qkv in enumerate(self.qkv):
            q, k, v = qkv(x).split(WIDTH, dim=-1)
            if past is not None:
                k, v = (torch.cat(pair, dim=1) for pair in zip(past[number], (k, v), strict=True))
            kept.append((k, v))
            x = x + torch.softmax(q @ k.mT / WIDTH**0.5, dim=-1) @ v
        return self.head(x), tuple(kept)
