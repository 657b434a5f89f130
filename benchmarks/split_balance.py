"""Compare the cost of the largest stage with other methods, as a multiple of max(total / n, most expensive call).

The other methods cut between blocks, where a single tensor crosses. Each is implemented here in a few lines:

- torchgpipe balances the costs of blocks (Bárány and Grinberg, "Block partitions of sequences": move the ends of the
  most expensive part towards cheaper ones as long as that helps);
- DeepSpeed's "parameters" is exact, but balances parameters; printed is the cost of its result;
- uniform puts the same number of blocks into each stage.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torchvision import models

import modelsummary
from modelsummary.split.call_costs import call_costs
from modelsummary.split.partition import Chain, partitions


class Decoder(nn.Module):
    """A GPT-like decoder: 24 layers of width 1,024, vocabulary 50,257."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50257, 1024)
        self.blocks = nn.ModuleList(Block() for _ in range(24))
        self.norm, self.head = nn.LayerNorm(1024), nn.Linear(1024, 50257, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(1024), nn.LayerNorm(1024)
        self.qkv, self.proj = nn.Linear(1024, 3072), nn.Linear(1024, 1024)
        self.mlp = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (each.view(b, t, 16, 64).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.proj(
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        )
        return x + self.mlp(self.norm2(x))


def uniform(costs: Sequence[int], count: int) -> list[int]:
    return [round(len(costs) * number / count) for number in range(1, count)]


def exact(costs: Sequence[int], count: int) -> list[int]:
    return next(partitions(Chain(costs, dict.fromkeys(range(1, len(costs)), 0)), count))


def bottleneck_of(costs: Sequence[int], cuts: Sequence[int]) -> int:
    return max(sum(costs[begin:end]) for begin, end in pairwise([0, *cuts, len(costs)]))


def local_search(costs: Sequence[int], count: int) -> list[int]:
    """Return cuts that cannot be improved by moving one block out of the most expensive part."""
    cuts = uniform(costs, count)

    def sums(cuts: list[int]) -> list[int]:
        bounds = [0, *cuts, len(costs)]
        return [sum(costs[begin:end]) for begin, end in pairwise(bounds)]

    while True:
        now = sums(cuts)
        largest = now.index(max(now))
        best = cuts
        for first, last, step in ((0, largest, 1), (largest, count - 1, -1)):
            for other in range(first, last) if step > 0 else range(largest, last):
                moved = [cut + step * (other <= number < largest if step > 0 else largest <= number <= other)
                         for number, cut in enumerate(cuts)]  # fmt: skip
                if sorted(sums(moved), reverse=True) < sorted(sums(best), reverse=True):
                    best = moved
        if best == cuts:
            return cuts
        cuts = best


def compare(name: str, model: nn.Module, inputs: Any) -> list[list[Any]]:
    stats = modelsummary.Statistics(model, inputs)
    with stats._splitting() as splitter:
        sequence = next(splitter._sequences())
    rows = [stats.root, *stats.summary_list]
    macs, params = (call_costs(by, sequence, model, rows).costs for by in ("macs", "params"))
    ends = [cut.position for cut in sequence.cuts if not cut.obstacle and len(cut.values) == 1]
    bounds = [0, *ends, len(macs)]
    blocks, weights = ([sum(costs[begin:end]) for begin, end in pairwise(bounds)] for costs in (macs, params))
    table = []
    for count in (2, 4, 8, 16):
        ideal = max(sum(macs) / count, *macs)
        found = {
            "ours": max(each.macs for each in stats.split(count).facts),
            "torchgpipe": bottleneck_of(blocks, local_search(blocks, count)),
            "parameters": bottleneck_of(blocks, exact(weights, count)),
            "uniform": bottleneck_of(blocks, uniform(blocks, count)),
        }
        table.append([name, count, *(f"{cost / ideal:.3f}" for cost in found.values())])
        assert found["ours"] == min(found.values()), f"{name}: another is better"
    return table


def main() -> None:
    table = compare("resnet152", models.resnet152(), (1, 3, 224, 224))
    table += compare("vgg16", models.vgg16(), (1, 3, 224, 224))
    table += compare("vit_b_16", models.vit_b_16(), (1, 3, 224, 224))
    with torch.device("meta"):
        decoder = Decoder()
    table += compare("decoder", decoder, torch.zeros(1, 1024, dtype=torch.long, device="meta"))
    print(tabulate(table, ["model", "stages", "ours", "torchgpipe", "parameters", "uniform"], tablefmt="plain"))
    generator = torch.Generator().manual_seed(0)
    costs = torch.randint(0, 10**10, (10_000,), generator=generator).tolist()
    crossing = dict(enumerate(torch.randint(0, 10**8, (9_999,), generator=generator).tolist(), 1))
    begin = time.perf_counter()
    next(partitions(Chain(costs, crossing), 64))
    print(f"10,000 calls into 64 stages: {time.perf_counter() - begin:.2f} s")


if __name__ == "__main__":
    main()
