"""Mixtures of experts as published models write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Expert(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 24), nn.SiLU(), nn.Linear(24, width))


class MixtralList(nn.Module):
    """Experts in a list, indexed by a mask of the tokens, as in Mixtral of transformers 4."""

    def __init__(self, width: int, number: int = 4) -> None:
        super().__init__()
        self.number, self.gate = number, nn.Linear(width, number, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(number))

    def forward(self, x):
        flat = x.view(-1, x.shape[-1])
        weight, chosen = torch.topk(F.softmax(self.gate(flat), dim=1), 2, dim=-1)
        weight = weight / weight.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(flat)
        mask = F.one_hot(chosen, num_classes=self.number).permute(2, 1, 0)
        for number in range(self.number):
            place, rows = torch.where(mask[number])
            now = flat[None, rows].reshape(-1, flat.shape[-1])
            out.index_add_(0, rows, self.experts[number](now) * weight[rows, place, None])
        return out.view_as(x)


class DeepSeekList(nn.Module):
    """Experts in a list whose results are written into rows, beside a shared one, as in DeepSeek's own code."""

    def __init__(self, width: int, number: int = 4) -> None:
        super().__init__()
        self.gate, self.shared = nn.Linear(width, number, bias=False), Expert(width)
        self.experts = nn.ModuleList(Expert(width) for _ in range(number))

    def forward(self, x):
        flat = x.view(-1, x.shape[-1])
        weight, chosen = self.gate(flat).sigmoid().topk(2, dim=-1)
        rows, numbers = flat.repeat_interleave(2, dim=0), chosen.view(-1)
        y = torch.empty_like(rows)
        for number, expert in enumerate(self.experts):
            y[numbers == number] = expert(rows[numbers == number])
        return (y.view(*weight.shape, -1) * weight.unsqueeze(-1)).sum(dim=1).view_as(x) + self.shared(x)


class SwitchDict(nn.Module):
    """One expert for each token, in a dict, as in Switch Transformers."""

    def __init__(self, width: int, number: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, number)
        self.experts = nn.ModuleDict({f"expert_{each}": Expert(width) for each in range(number)})

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = x.clone()
        for number, expert in enumerate(self.experts.values()):
            out[chosen == number] = expert(x[chosen == number])
        return out * weight.unsqueeze(-1)


class DenseList(nn.Module):
    """Each expert takes all tokens."""

    def __init__(self, width: int, number: int = 4) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(width, number), nn.ModuleList(Expert(width) for _ in range(number))

    def forward(self, x):
        each = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return torch.einsum("bte,btde->btd", self.gate(x).softmax(-1), each)


class LoopExperts(nn.Module):
    """Stacked experts that are taken one by one; experts without tokens cost nothing."""

    def __init__(self, width: int, number: int = 4) -> None:
        super().__init__()
        self.number = number
        self.up = nn.Parameter(torch.randn(number, width, 24) / 4)
        self.down = nn.Parameter(torch.randn(number, 24, width) / 4)

    def forward(self, x, chosen, weight):
        out = torch.zeros_like(x)
        for number in range(self.number):
            rows, place = torch.where(chosen == number)
            y = F.relu(x[rows] @ self.up[number]) @ self.down[number]
            out = out.index_add(0, rows, y * weight[rows, place, None])
        return out


class LoopStacked(nn.Module):
    def __init__(self, width: int, number: int = 4) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(width, number), LoopExperts(width, number)

    def forward(self, x):
        flat = x.flatten(0, 1)
        weight, chosen = self.gate(flat).softmax(-1).topk(2, dim=-1)
        return self.experts(flat, chosen, weight).view_as(x)


class SharedStacked(LoopExperts):
    """Router, stacked experts and two that take every token, in one module: one is written into, one is added."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.gate, self.written, self.added = nn.Linear(width, self.number), Expert(width), Expert(width)

    def forward(self, x):
        flat = x.flatten(0, 1)
        weight, chosen = self.gate(flat).softmax(-1).topk(2, dim=-1)
        out = self.written(flat)
        for number in range(self.number):
            rows, place = torch.where(chosen == number)
            y = F.relu(flat[rows] @ self.up[number]) @ self.down[number]
            out.index_add_(0, rows, y * weight[rows, place, None])
        return (out + self.added(flat)).view_as(x)


class Residual(nn.Module):
    """A mixture between layers that its gradients reach."""

    def __init__(self, mixture: type[nn.Module], width: int = 16) -> None:
        super().__init__()
        self.first, self.mixture, self.last = nn.Linear(width, width), mixture(width), nn.Linear(width, 4)

    def forward(self, x):
        x = self.first(x)
        return self.last(x + self.mixture(torch.tanh(x)))


EXPERT_MODELS = {
    "mixtral_list": MixtralList,
    "deepseek_list": DeepSeekList,
    "switch_dict": SwitchDict,
    "dense_list": DenseList,
    "loop_stacked": LoopStacked,
    "shared_stacked": SharedStacked,
}
