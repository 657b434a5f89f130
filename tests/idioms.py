"""Models written with the idioms of well-known families, small enough to run a hundred times."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Gpt2(nn.Module):
    """Learned positions, causal mask buffer, fused qkv, tied embedding."""

    def __init__(self, vocab=50, width=16, heads=2, depth=4, length=32):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.drop = nn.Dropout(0.1)
        self.h = nn.ModuleList([_Gpt2Block(width, heads, length) for _ in range(depth)])
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None):
        batch, length = ids.shape
        positions = torch.arange(length, device=ids.device)
        x = self.drop(self.wte(ids) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if labels is None:
            return logits
        return {"logits": logits, "loss": F.cross_entropy(logits.view(batch * length, -1), labels.view(-1))}


class _Gpt2Block(nn.Module):
    def __init__(self, width, heads, length):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer(
            "bias", torch.tril(torch.ones(length, length)).view(1, 1, length, length), persistent=False
        )
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(c, dim=2)
        q, k, v = (each.view(b, t, self.heads, c // self.heads).transpose(1, 2) for each in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        att = F.dropout(F.softmax(att, dim=-1), 0.1, self.training)
        x = x + self.c_proj((att @ v).transpose(1, 2).contiguous().view(b, t, c))
        return x + self.mlp(self.ln_2(x))


class Llama(nn.Module):
    """Rotary cache that is built at the first call, grouped-query attention, gated MLP, RMS norm."""

    def __init__(self, vocab=50, width=16, heads=4, groups=2, depth=4):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, width)
        self.rotary = _Rotary(width // heads)
        self.layers = nn.ModuleList([_LlamaLayer(width, heads, groups) for _ in range(depth)])
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor):
        x = self.embed_tokens(ids)
        cos, sin = self.rotary(ids.size(1), x.device, x.dtype)
        for layer in self.layers:
            x = layer(x, cos=cos, sin=sin)
        return self.lm_head(self.norm(x))


class _Rotary(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, width, 2) / width), persistent=False)
        self.cached = None

    def forward(self, length, device, dtype):
        if self.cached is None or self.cached[0].shape[0] < length:
            angles = torch.outer(torch.arange(length, device=device).float(), self.inv_freq)
            angles = torch.cat([angles, angles], -1)
            self.cached = (angles.cos().to(dtype), angles.sin().to(dtype))
        return self.cached[0][:length], self.cached[1][:length]


class _LlamaLayer(nn.Module):
    def __init__(self, width, heads, groups):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.q, self.k = nn.Linear(width, width, bias=False), nn.Linear(width, groups * self.size, bias=False)
        self.v, self.o = nn.Linear(width, groups * self.size, bias=False), nn.Linear(width, width, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def _rotate(self, x, cos, sin):
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    def forward(self, x, *, cos, sin):
        b, t, _ = x.shape
        h = self.norm1(x)
        q = self._rotate(self.q(h).view(b, t, self.heads, self.size).transpose(1, 2), cos, sin)
        k = self._rotate(self.k(h).view(b, t, self.groups, self.size).transpose(1, 2), cos, sin)
        v = self.v(h).view(b, t, self.groups, self.size).transpose(1, 2)
        k, v = (each.repeat_interleave(self.heads // self.groups, dim=1) for each in (k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, -1))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class T5(nn.Module):
    """Encoder and decoder on one embedding; the first layer makes the relative bias for all."""

    def __init__(self, vocab=50, width=16, heads=2, depth=2):
        super().__init__()
        self.shared = nn.Embedding(vocab, width)
        self.encoder = nn.ModuleList([_T5Layer(width, heads, has_bias=i == 0) for i in range(depth)])
        self.decoder = nn.ModuleList([_T5Layer(width, heads, has_bias=i == 0, crosses=True) for i in range(depth)])
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.shared.weight
        self.scale = width**-0.5

    def forward(self, input_ids, decoder_input_ids):
        memory, bias = self.shared(input_ids), None
        for layer in self.encoder:
            memory, bias = layer(memory, bias=bias)
        x, bias = self.shared(decoder_input_ids), None
        for layer in self.decoder:
            x, bias = layer(x, memory=memory, bias=bias)
        return self.lm_head(x * self.scale), memory


class _T5Layer(nn.Module):
    def __init__(self, width, heads, *, has_bias, crosses=False):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.relative = nn.Embedding(64, heads) if has_bias else None
        self.cross = nn.MultiheadAttention(width, heads, batch_first=True) if crosses else None
        self.norm = nn.LayerNorm(width)
        self.ff = nn.Sequential(nn.Linear(width, 32), nn.ReLU(inplace=True), nn.Linear(32, width))

    def forward(self, x, memory=None, bias=None):
        b, t, c = x.shape
        if bias is None:
            distance = torch.arange(t)[None, :] - torch.arange(t)[:, None]
            bias = self.relative(distance.clamp(-31, 31) + 32).permute(2, 0, 1).unsqueeze(0)
        q, k, v = (each.view(b, t, self.heads, -1).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        weights = (q @ k.transpose(-1, -2) + bias).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(b, t, c))
        if self.cross is not None:
            x = x + self.cross(x, memory, memory, need_weights=False)[0]
        return x + self.ff(x), bias


@dataclass
class BertOutput:
    last_hidden_state: Tensor
    pooled: Tensor
    hidden_states: tuple[Tensor, ...] = ()
    attentions: None = None


class Bert(nn.Module):
    """Masks made from shapes, keyword arguments, a dataclass as output."""

    def __init__(self, vocab=50, width=16, depth=3):
        super().__init__()
        self.word, self.position, self.kind = (
            nn.Embedding(vocab, width),
            nn.Embedding(32, width),
            nn.Embedding(2, width),
        )
        self.register_buffer("position_ids", torch.arange(32).unsqueeze(0))
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList([_BertLayer(width) for _ in range(depth)])
        self.pooler = nn.Linear(width, width)

    def forward(self, input_ids=None, attention_mask=None, token_type_ids=None, output_hidden_states=False):
        shape = input_ids.size()
        if attention_mask is None:
            attention_mask = torch.ones(shape, device=input_ids.device)
        if token_type_ids is None:
            token_type_ids = torch.zeros(shape, dtype=torch.long, device=input_ids.device)
        mask = (1.0 - attention_mask[:, None, None, :]) * torch.finfo(self.word.weight.dtype).min
        x = self.word(input_ids) + self.kind(token_type_ids) + self.position(self.position_ids[:, : shape[1]])
        x = self.norm(x)
        hidden = ()
        for layer in self.layers:
            hidden += (x,)
            x = layer(x, mask)
        pooled = torch.tanh(self.pooler(x[:, 0]))
        return BertOutput(x, pooled, hidden if output_hidden_states else ())


class _BertLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.norm = nn.LayerNorm(width)

    def forward(self, x, mask):
        scores = self.q(x) @ self.k(x).transpose(-1, -2) / math.sqrt(x.size(-1)) + mask.squeeze(1)
        return self.norm(x + self.o(scores.softmax(-1) @ self.v(x)))


class MixtureOfExperts(nn.Module):
    """Each layer sends the rows to experts by their values: its inside depends on data, its outside does not."""

    def __init__(self, width=8, experts=3, depth=3):
        super().__init__()
        self.layers = nn.ModuleList([_Experts(width, experts) for _ in range(depth)])
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(F.layer_norm(x, x.shape[-1:]))
        return self.head(x)


class _Experts(nn.Module):
    def __init__(self, width, experts):
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(experts)])

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero(as_tuple=True)[0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return out


class UNet(nn.Module):
    """Skip connections over the whole depth, batch normalisation, in-place activations, a size that is read."""

    def __init__(self, width=4):
        super().__init__()
        self.down1, self.down2, self.middle = _conv(3, width), _conv(width, 2 * width), _conv(2 * width, 4 * width)
        self.up2, self.up1 = _conv(6 * width, 2 * width), _conv(3 * width, width)
        self.out = nn.Conv2d(width, 2, 1)

    def forward(self, x):
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        x = self.middle(F.max_pool2d(two, 2))
        x = self.up2(torch.cat([F.interpolate(x, size=two.shape[2:]), two], 1))
        x = self.up1(torch.cat([F.interpolate(x, scale_factor=2.0), one], 1))
        return self.out(x)


def _conv(inner, outer):
    return nn.Sequential(nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(inplace=True))


class Lstm(nn.Module):
    """A recurrent net whose first state is made from the size of the batch."""

    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True, dropout=0.2)
        self.gru = nn.GRUCell(width, width)
        self.head = nn.Linear(width, 5)

    def forward(self, ids):
        state = torch.zeros(2, ids.size(0), 8)
        out, (h, _) = self.lstm(self.embed(ids), (state, state.clone()))
        hidden = h[-1]
        for step in range(2):
            hidden = self.gru(out[:, step], hidden)
        return self.head(hidden), h


class Seq2Seq(nn.Module):
    """``nn.Transformer`` with the masks that it makes."""

    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Embedding(30, width)
        self.transformer = nn.Transformer(width, 2, 2, 2, 32, batch_first=True)
        self.head = nn.Linear(width, 30)

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.size(1))
        x = self.transformer(self.embed(source), self.embed(target), tgt_mask=mask, tgt_is_causal=True)
        return self.head(x)


class InPlace(nn.Module):
    """Residuals with ``+=``, in-place activations, writes through views, a counter in a buffer."""

    def __init__(self, width=8):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(width, width) for _ in range(4))
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.seen += 1
        x = F.relu(self.a(x), inplace=True)
        skip = x
        x = self.norm(self.b(x))
        x += skip
        x = x.clone()
        x[:, :4] *= 0.5
        view = x.view(-1, 2, 4)
        y = self.c(x.clone())
        view.mul_(2)
        return self.d(y + x).relu_()


class Dense(nn.Module):
    """Plain layers with glue between them: what reads naturally when it is cut."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.features = nn.Sequential(nn.ReLU(), nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.fc1, self.fc2 = nn.Linear(32, 16), nn.Linear(16, 4)

    def forward(self, x):
        x = self.features(self.conv(x))
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        return F.log_softmax(self.fc2(F.dropout(x, 0.5, self.training)), dim=1)


def ids(batch=3, length=10, limit=20, seed=0):
    return torch.randint(0, limit, (batch, length), generator=torch.Generator().manual_seed(seed))


def rows(*size, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


# name -> model class, and its keyword arguments for a batch size and a seed
IDIOMS = {
    "gpt2": (Gpt2, lambda b, s: {"ids": ids(b, seed=s)}),
    "gpt2 with loss": (Gpt2, lambda b, s: {"ids": ids(b, seed=s), "labels": ids(b, seed=s + 1)}),
    "llama": (Llama, lambda b, s: {"ids": ids(b, seed=s)}),
    "t5": (T5, lambda b, s: {"input_ids": ids(b, seed=s), "decoder_input_ids": ids(b, 6, seed=s)}),
    "bert": (Bert, lambda b, s: {"input_ids": ids(b, seed=s)}),
    "bert with all": (
        Bert,
        lambda b, s: {
            "input_ids": ids(b, seed=s),
            "attention_mask": (ids(b, seed=s + 1) > 3).float(),
            "output_hidden_states": True,
        },
    ),
    "experts": (MixtureOfExperts, lambda b, s: {"x": rows(4 * b, 8, seed=s)}),
    "unet": (UNet, lambda b, s: {"x": rows(b, 3, 16, 16, seed=s)}),
    "lstm": (Lstm, lambda b, s: {"ids": ids(b, seed=s)}),
    "transformer": (Seq2Seq, lambda b, s: {"source": ids(b, seed=s), "target": ids(b, 7, seed=s + 1)}),
    "in place": (InPlace, lambda b, s: {"x": rows(b, 8, seed=s)}),
    "dense": (Dense, lambda b, s: {"x": rows(b, 3, 8, 8, seed=s)}),
}


def some(*names):
    """Return all names of ``IDIOMS`` for ``parametrize``; the other ones are slow."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in IDIOMS]


def in_both_modes(train, evaluate):
    """Return pairs of a name and a mode for ``parametrize``; those that are not listed are slow."""
    modes = {"train": train, "eval": evaluate}
    return [
        pytest.param(name, mode == "train", id=f"{name}-{mode}", marks=[] if name in names else pytest.mark.slow)
        for name in IDIOMS
        for mode, names in modes.items()
    ]
