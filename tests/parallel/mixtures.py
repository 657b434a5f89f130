"""Mixtures of experts as strangers write them: with constants of each expert, capacities, and losses of their own.

The first are called with tokens, numbers of experts and weights; the last route themselves.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

N, DIM, INNER = 4, 8, 12


class Base(nn.Module):
    """Two stacked weights, and constants of each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.n = N
        self.up = nn.Parameter(torch.randn(N, DIM, INNER) / 3)
        self.down = nn.Parameter(torch.randn(N, INNER, DIM) / 3)
        self.register_buffer("scale", torch.linspace(0.5, 2.0, N))
        self.factors = [1.0, 3.0, 0.5, 2.0]
        self.made()

    def made(self) -> None:
        """Add parameters."""


class Loop(Base):
    """Experts one by one; ``expert`` says what one does."""

    def forward(self, x, index, weight):
        out = torch.zeros_like(x)
        for i in range(self.n):
            token, nth = torch.where(index == i)
            out.index_add_(0, token, self.expert(i, x[token]) * weight[token, nth, None])
        return out

    def expert(self, i, x):
        return F.silu(x @ self.up[i]) @ self.down[i]


class ScaleBuffer(Loop):
    def expert(self, i, x):
        return super().expert(i, x) * self.scale[i]


class FactorList(Loop):
    def expert(self, i, x):
        return super().expert(i, x) * self.factors[i]


class Reciprocal(Loop):
    def expert(self, i, x):
        return super().expert(i, x) / self.n


class NumberFactor(Loop):
    def expert(self, i, x):
        return super().expert(i, x) * (i + 1)


class Threshold(Loop):
    def expert(self, i, x):
        return (F.relu if i < self.n // 2 else torch.tanh)(x @ self.up[i]) @ self.down[i]


class BiasList(Loop):
    def made(self):
        self.biases = nn.ParameterList(nn.Parameter(torch.randn(DIM)) for _ in range(N))

    def expert(self, i, x):
        return super().expert(i, x) + self.biases[i]


class BiasRows(Loop):
    def made(self):
        self.bias = nn.Parameter(torch.randn(N, DIM))

    def expert(self, i, x):
        return super().expert(i, x) + self.bias[i]


class NumberEmbedding(Loop):
    def made(self):
        self.names = nn.Embedding(N, DIM)

    def expert(self, i, x):
        return super().expert(i, x + self.names(torch.tensor(i)))


class NextExpert(Loop):
    """Each expert takes the projection of the next one, which another rank may hold."""

    def expert(self, i, x):
        return F.silu(x @ self.up[i]) @ self.down[(i + 1) % self.n]


class Skips(Loop):
    """Experts without tokens are skipped."""

    def forward(self, x, index, weight):
        out = torch.zeros_like(x)
        for i in index.unique().tolist():
            token, nth = torch.where(index == i)
            out[token] += self.expert(i, x[token]) * weight[token, nth, None] * self.factors[i]
        return out


class Counted(Loop):
    """What an expert adds is divided by the number of its tokens."""

    def forward(self, x, index, weight):
        counts = torch.bincount(index.flatten(), minlength=self.n)
        out = torch.zeros_like(x)
        for i, count in enumerate(counts):
            token, nth = torch.where(index == i)
            out = out.index_add(0, token, self.expert(i, x[token]) * weight[token, nth, None] / count.clamp(min=1))
        return out / counts.numel()


class Capacity(Loop):
    """Tokens beyond the capacity of an expert are dropped."""

    def forward(self, x, index, weight):
        flat = index.flatten()
        chosen = F.one_hot(flat, num_classes=self.n)
        place = (chosen.cumsum(0) * chosen).sum(-1) - 1
        kept = place < max(flat.numel() // self.n, 1)
        out = x.new_zeros(x.shape)
        for i in range(self.n):
            rows = torch.nonzero((flat == i) & kept).flatten()
            out.index_add_(
                0, rows // index.shape[-1], self.expert(i, x[rows // index.shape[-1]]) * weight.flatten()[rows, None]
            )
        return out


class Masked(Loop):
    """Each expert takes all tokens, and a mask chooses."""

    def forward(self, x, index, weight):
        out = torch.zeros_like(x)
        for i, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            gate = ((index == i) * weight).sum(-1, keepdim=True)
            y = torch.tanh(x @ up + self.factors[i]) @ down
            out = out + torch.where(gate > 0, gate * y, 0.0)
        return out


class Clamped(Base):
    """Numbers of experts are clamped, and looked up, in a table of temperatures as well."""

    def forward(self, x, index, weight):
        ids = index.clamp(0, self.n - 1)
        h = torch.einsum("td,tkdh->tkh", x, self.up[ids]) * self.scale[ids].unsqueeze(-1)
        return torch.einsum("tkh,tkhd,tk->td", torch.tanh(h), self.down[ids], weight)


class Normalised(Base):
    """The weights are normalised inside, and the input is added."""

    def forward(self, x, index, weight):
        weight = weight / weight.sum(-1, keepdim=True)
        h = torch.sigmoid((x[:, None, None] @ self.up[index]).squeeze(-2))
        y = (h.unsqueeze(-2) @ self.down[index]).squeeze(-2)
        return x + (y * weight.unsqueeze(-1)).sum(1)


class GptFast(Base):
    """Conditional feed-forward of gpt-fast."""

    def made(self):
        self.w1, self.w3 = (nn.Parameter(torch.randn(N, INNER, DIM) / 3) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(N, DIM, INNER) / 3)
        del self.up, self.down

    def forward(self, x, index, weight):
        x1 = F.silu(torch.einsum("ti,taoi -> tao", x, self.w1[index]))
        x3 = torch.einsum("ti, taoi -> tao", x, self.w3[index])
        outs = torch.einsum("tao, taio -> tai", (x1 * x3), self.w2[index])
        return torch.einsum("tai,ta -> ti", outs, weight)


class GptFastInner(GptFast):
    """It returns what each chosen expert makes; the weights come outside."""

    def forward(self, x, index, weight):
        x1 = F.silu(torch.einsum("ti,taoi -> tao", x, self.w1[index]))
        return torch.einsum("tao, taio -> tai", x1, self.w2[index])


class AllThenChosen(Base):
    """All experts take all tokens, and the chosen results are looked up."""

    def forward(self, x, index, weight):
        y = torch.bmm(F.gelu(torch.bmm(x.expand(self.n, -1, -1), self.up)), self.down) * self.scale.view(-1, 1, 1)
        return (y[index.T, torch.arange(len(x))] * weight.T.unsqueeze(-1)).sum(0)


class AllGathered(Base):
    def forward(self, x, index, weight):
        y = torch.einsum("teh,ehd->ted", F.relu(torch.einsum("td,edh->teh", x, self.up)), self.down)
        return (y.gather(1, index.unsqueeze(-1).expand(-1, -1, DIM)) * weight.unsqueeze(-1)).sum(1)


class Sorted(Base):
    """Tokens sorted by their expert, split by counts, joined, and put back in order."""

    def forward(self, x, index, weight):
        flat = index.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.n).tolist()
        parts = []
        for i, part in enumerate(x[order // index.shape[-1]].split(counts)):
            parts.append(F.silu(part @ self.up[i]) @ self.down[i] * self.factors[i])
        y = torch.cat(parts)[order.argsort()].view(*index.shape, -1)
        return (y * weight.unsqueeze(-1)).sum(1)


class Written(Base):
    """Results are written into rows of memory without values."""

    def forward(self, x, index, weight):
        rows, numbers = x.repeat_interleave(index.shape[-1], 0), index.flatten()
        y = torch.empty_like(rows)
        for i in range(self.n):
            y[numbers == i] = torch.tanh(rows[numbers == i] @ self.up[i] + i) @ self.down[i]
        return (y.view(*index.shape, -1) * weight.unsqueeze(-1)).sum(1)


class FlatRows(Base):
    """The rows of all experts in one table."""

    def forward(self, x, index, weight):
        rows = index.unsqueeze(-1) * DIM + torch.arange(DIM)
        h = (self.up.flatten(0, 1)[rows] * x[:, None, :, None]).sum(-2)
        return ((torch.tanh(h).unsqueeze(-2) @ self.down[index]).squeeze(-2) * weight.unsqueeze(-1)).sum(1)


class Penalty(Base):
    """A mean of all experts joins in, and a penalty on their weights is returned."""

    def forward(self, x, index, weight):
        y = torch.einsum("tkh,tkhd->tkd", torch.tanh(torch.einsum("td,tkdh->tkh", x, self.up[index])), self.down[index])
        y = (y * weight.unsqueeze(-1)).sum(1) + x @ self.up.mean(0) @ x.new_ones(INNER, DIM)
        return y, self.up.square().mean() + self.down.abs().sum() / self.n


class Balanced(Loop):
    """It returns a loss of the load as well, from the counts of the experts and the weights."""

    def forward(self, x, index, weight):
        load = F.one_hot(index, self.n).to(x.dtype)
        loss = self.n * (load.mean((0, 1)) * (load * weight.unsqueeze(-1)).mean((0, 1))).sum()
        return super().forward(x, index, weight), loss


class Routed(nn.Module):
    """A router around experts."""

    def __init__(self, experts: nn.Module, topk: int = 2) -> None:
        super().__init__()
        self.topk, self.first, self.gate, self.experts = topk, nn.Linear(DIM, DIM), nn.Linear(DIM, N), experts

    def forward(self, x):
        x = self.first(x).flatten(0, -2)
        weight, index = self.gate(x).softmax(-1).topk(self.topk)
        return self.experts(torch.tanh(x), index, weight=weight)


class Outside(Routed):
    """What each chosen expert returns is weighed outside."""

    def forward(self, x):
        x = self.first(x).flatten(0, -2)
        weight, index = self.gate(x).softmax(-1).topk(self.topk)
        return (self.experts(x, index, weight) * weight.unsqueeze(-1)).sum(1)


class Twice(Routed):
    def forward(self, x):
        y = super().forward(x)
        return super().forward(y) + y


class SelfRouted(Base):
    """Mixtures whose router is inside."""

    def made(self):
        self.gate = nn.Parameter(torch.randn(N, DIM))

    def forward(self, x):
        x = x.flatten(0, -2)
        scores = F.linear(x, self.gate).softmax(-1)
        weight, index = scores.topk(2)
        load = F.one_hot(index, self.n).sum((0, 1)) / index.numel()
        h = torch.tanh((x[:, None, None] @ self.up[index]).squeeze(-2) / self.n)
        y = (h.unsqueeze(-2) @ self.down[index]).squeeze(-2)
        return x + (y * weight.unsqueeze(-1)).sum(1), self.n * (load * scores.mean(0)).sum()


class Soft(SelfRouted):
    """All experts, weighed."""

    def forward(self, x):
        x = x.flatten(0, -2)
        scores = (x @ self.gate.t()).softmax(-1)
        y = torch.einsum("teh,ehd->ted", F.silu(torch.einsum("td,edh->teh", x, self.up)), self.down)
        return torch.einsum("te,ted->td", scores, y + self.scale[None, :, None])


class Switch(SelfRouted):
    """Dispatch masks with a capacity, as in Mesh TensorFlow and Switch."""

    def forward(self, x):
        x = x.flatten(0, -2)
        scores = (x @ self.gate.t()).softmax(-1)
        capacity = max(2 * len(x) // self.n, 1)
        weight, index = scores.max(-1)
        mask = F.one_hot(index, self.n)
        place = (mask.cumsum(0) - 1) * mask
        mask = mask * (place < capacity)
        dispatch = mask.unsqueeze(-1) * F.one_hot((place * mask).sum(-1), capacity).unsqueeze(1).to(x.dtype)
        combine = dispatch * weight[:, None, None]
        inputs = torch.einsum("sec,sm->ecm", dispatch, x)
        y = torch.einsum("ech,ehm->ecm", F.relu(torch.einsum("ecm,emh->ech", inputs, self.up)), self.down)
        loss = (mask.to(x.dtype).mean(0) * scores.mean(0)).sum() * self.n
        return torch.einsum("sec,ecm->sm", combine, y), loss


class SoftSlots(SelfRouted):
    """Soft MoE: each expert takes mixtures of all tokens."""

    def made(self):
        self.slots = nn.Parameter(torch.randn(DIM, N, 3))

    def forward(self, x):
        x = x.flatten(0, -2)
        logits = torch.einsum("td,des->tes", x, self.slots)
        inputs = torch.einsum("td,tes->esd", x, logits.softmax(0))
        y = torch.baddbmm(self.scale.view(-1, 1, 1), F.gelu(inputs.bmm(self.up)), self.down)
        return torch.einsum("esd,tes->td", y, logits.flatten(1).softmax(-1).view_as(logits))


class ExpertChoice(SelfRouted):
    """Experts choose their tokens."""

    def forward(self, x):
        x = x.flatten(0, -2)
        weight, rows = (x @ self.gate.t()).softmax(-1).t().topk(3, dim=-1)
        y = torch.bmm(F.relu(torch.bmm(x[rows], self.up)), self.down) * weight.unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, rows.flatten(), y.flatten(0, 1))


class ParallelExperts(nn.Module):
    """A linear layer of each expert, for tokens that are sorted by their expert, as in Granite."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(N, out, width) / 3)

    def forward(self, x, sizes):
        return torch.cat([F.linear(part, self.weight[i]) for i, part in enumerate(x.split(sizes, dim=0))], dim=0)


class Granite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, N, bias=False)
        self.inputs, self.outputs = ParallelExperts(DIM, 2 * INNER), ParallelExperts(INNER, DIM)

    def forward(self, x):
        x = x.flatten(0, -2)
        weight, index = self.gate(x).topk(2)
        flat, order = index.flatten().sort(stable=True)
        sizes = flat.bincount(minlength=N).tolist()
        gate, up = self.inputs(x[order // 2], sizes).chunk(2, -1)
        y = self.outputs(F.silu(gate) * up, sizes) * weight.softmax(-1).flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // 2, y)


class GroupedExperts(nn.Module):
    """Experts of torchtitan, one after the other, or in one product of groups."""

    def __init__(self, *, is_grouped: bool) -> None:
        super().__init__()
        self.is_grouped, self.num_experts = is_grouped, N
        self.w1, self.w3 = (nn.Parameter(torch.randn(N, INNER, DIM) / 3) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(N, DIM, INNER) / 3)

    def forward(self, x, counts):
        if self.is_grouped:
            ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
            h = F.silu(torch._grouped_mm(x, self.w1.transpose(-2, -1), offs=ends))
            h = h * torch._grouped_mm(x, self.w3.transpose(-2, -1), offs=ends)
            return torch._grouped_mm(h, self.w2.transpose(-2, -1), offs=ends).type_as(x)
        counts = counts.tolist()
        padding = x.shape[0] - sum(counts)
        parts = []
        for i, part in enumerate(torch.split(x[: sum(counts)], split_size_or_sections=counts, dim=0)):
            h = F.silu(torch.matmul(part, self.w1[i].transpose(-2, -1)))
            h = h * torch.matmul(part, self.w3[i].transpose(-2, -1))
            parts.append(torch.matmul(h, self.w2[i].transpose(-2, -1)))
        out = torch.cat(parts, dim=0)
        return torch.vstack((out, out.new_zeros((padding, out.shape[-1]))))


class TokenChoice(nn.Module):
    """The router of torchtitan's DeepSeek-V3: sigmoid scores, a bias for the choice, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, N, bias=False)

    def forward(self, x, bias):
        scores = torch.sigmoid(self.gate(x))
        _, chosen = torch.topk(scores + bias, k=2, dim=1)
        scores = scores.gather(dim=1, index=chosen)
        scores = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
        return scores, chosen, torch.histc(chosen.view(-1).float(), bins=N, min=0, max=N)


class Titan(nn.Module):
    """The mixture of torchtitan's DeepSeek-V3, with a shared expert."""

    def __init__(self, *, is_grouped: bool = False) -> None:
        super().__init__()
        self.experts, self.router = GroupedExperts(is_grouped=is_grouped), TokenChoice()
        self.shared = nn.Sequential(nn.Linear(DIM, INNER), nn.SiLU(), nn.Linear(INNER, DIM))
        self.register_buffer("expert_bias", torch.linspace(-0.1, 0.1, N))
        self.register_buffer("tokens_per_expert", torch.zeros(N), persistent=False)

    def forward(self, x):
        shape, x = x.shape, x.view(-1, x.shape[-1])
        scores, chosen, counts = self.router(x, self.expert_bias)
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        order = torch.argsort(chosen.view(-1), stable=True)
        scores, rows = scores.view(-1)[order], order // 2
        rows = rows.reshape(-1, 1).expand(-1, x.shape[-1])
        routed = self.experts(torch.gather(x, dim=0, index=rows), counts.long())
        routed = (
            (routed.to(torch.float32) * scores.reshape(-1, 1)).to(x.dtype)
            if self.experts.is_grouped
            else routed * scores[:, None]
        )
        out = self.shared(x).scatter_add(dim=0, index=rows, src=routed)
        return out.reshape(shape)


class Listed(nn.Module):
    """Experts in a dict, which holds their dropout as well, as in NLLB."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, N)
        self.experts = nn.ModuleDict({f"expert_{i}": nn.Linear(DIM, DIM) for i in range(N)})
        self.experts["drop"] = nn.Dropout(0.1)

    def forward(self, x):
        weight, index = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i in range(N):
            token = torch.where(index == i)[0]
            out = out.index_add(0, token, self.experts["drop"](self.experts[f"expert_{i}"](x[token])))
        return out * weight[:, None]


class Frozen(Routed):
    """Frozen experts behind a router that trains."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__(experts)
        self.experts.requires_grad_(False)


EXPERTS = (
    ScaleBuffer, FactorList, Reciprocal, NumberFactor, Threshold, BiasList, BiasRows, NumberEmbedding, Skips, Counted,
    Capacity, Masked, Clamped, Normalised, GptFast, AllThenChosen, AllGathered, Sorted, Written, Penalty,
    Balanced,
)  # fmt: skip
MIXTURES = {kind.__name__: lambda kind=kind: Routed(kind()) for kind in EXPERTS}
MIXTURES |= {kind.__name__: kind for kind in (SelfRouted, Soft, Switch, SoftSlots, ExpertChoice, Granite, Titan)}
MIXTURES |= {
    "Outside": lambda: Outside(GptFastInner()),
    "Twice": lambda: Twice(ScaleBuffer()),
    "Frozen": lambda: Frozen(BiasRows()),
    "one expert per token": lambda: Routed(Skips(), topk=1),
}
GROUPED = {"TitanGrouped": lambda: Titan(is_grouped=True)}  # torch has no such product in double precision
REFUSED = {kind.__name__: lambda kind=kind: Routed(kind()) for kind in (NextExpert, FlatRows)}
