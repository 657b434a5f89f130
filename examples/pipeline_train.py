"""Train a model that is split over processes, and compare with the same training in one process.

    torchrun --nproc-per-node 4 examples/pipeline_train.py --model decoder --schedule 1f1b
    torchrun --nproc-per-node 4 examples/pipeline_train.py --model resnet18

Every rank builds the model, splits it, and keeps its own stage. One process trains alone on the same micro-batches,
with accumulated gradients. The exit status is 1 if losses or final weights differ.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import modelsummary

MICROBATCH, N_MICROBATCHES, STEPS = 4, 8, 3


class Block(nn.Module):
    """A pre-norm attention and MLP block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            each.view(batch, length, self.heads, -1).transpose(1, 2)
            for each in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """A GPT-like decoder with tied embeddings."""

    def __init__(self, vocab: int = 100, width: int = 64, depth: int = 6, length: int = 16) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make(name: str) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """Return the model, and one batch with targets per step."""
    torch.manual_seed(0)
    size = MICROBATCH * N_MICROBATCHES
    if name == "decoder":
        data = [torch.randint(0, 100, (size, 17)) for _ in range(STEPS)]
        return Decoder(), [(ids[:, :-1], ids[:, 1:]) for ids in data]
    from torchvision.models import resnet18

    data = [torch.randn(size, 3, 64, 64) for _ in range(STEPS)]
    return resnet18(num_classes=10), [(images, torch.randint(0, 10, (size,))) for images in data]


def loss_fn(out: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(out.flatten(0, -2), target.flatten())


def train_alone(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Train in one process that accumulates the gradients of the micro-batches; return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    losses = []
    for inputs, targets in batches:
        pairs = zip(inputs.chunk(N_MICROBATCHES), targets.chunk(N_MICROBATCHES), strict=True)
        for each in [loss_fn(model(x), y) for x, y in pairs]:
            (each / N_MICROBATCHES).backward()
            losses.append(each.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_in_stages(
    model: nn.Module, batches: list[tuple[Tensor, Tensor]], schedule: str, dies: int | None
) -> tuple[list[float], list[nn.Module]]:
    """Train in a pipeline; return the losses (on the rank of the last stage) and this rank's stages."""
    n_ranks = dist.get_world_size()
    two_per_rank = schedule in ("interleaved1f1b", "zbv")
    stats = modelsummary.Statistics(model, batches[0][0][:MICROBATCH])
    stages = stats.split(2 * n_ranks if two_per_rank else n_ranks, single_tensor_cuts=schedule.startswith("zb"))
    if dist.get_rank() == 0:
        print(stages)
    pipeline = stages.schedule(schedule, N_MICROBATCHES, loss_fn, device="cpu")
    optimizer = torch.optim.SGD(pipeline.parameters, 0.05, momentum=0.9)
    losses: list[float] = []
    for inputs, targets in batches:
        if dist.get_rank() == dies and inputs is batches[-1][0]:
            os._exit(1)
        of_step: list[Tensor] = []
        pipeline.step(inputs, target=targets, losses=of_step)
        optimizer.step()
        optimizer.zero_grad()
        losses += [each.item() for each in of_step]
    return losses, [each.submod for each in pipeline.stages]


def main() -> int:
    """Train both ways and compare; return 0 if they agree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=["decoder", "resnet18"], default="decoder")
    parser.add_argument("--schedule", choices=["gpipe", "1f1b", "interleaved1f1b", "zb", "zbv"], default="1f1b")
    parser.add_argument("--dies", type=int, help="rank that exits before the last step, to test the others")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    model, batches = make(options.model)
    alone = copy.deepcopy(model)
    expected = train_alone(alone, batches)
    losses, own = train_in_stages(model, batches, options.schedule, options.dies)
    weights = alone.state_dict()
    difference = max(
        (value - weights[key]).abs().max().item() for each in own for key, value in each.state_dict().items()
    )
    agrees = difference < 1e-4
    if losses:
        gap = (torch.tensor(losses) - torch.tensor(expected)).abs().max().item()
        agrees = agrees and gap < 1e-4 * expected[0]
        print(f"{options.model}, {options.schedule}: losses {losses[0]:.6f} ... {losses[-1]:.6f}")
        print(f"alone: {expected[0]:.6f} ... {expected[-1]:.6f}; largest difference of {len(losses)} losses {gap:.1e}")
    print(f"rank {dist.get_rank()}: largest difference of a weight {difference:.1e}")
    dist.destroy_process_group()
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
