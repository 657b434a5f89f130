"""Compare the predicted memory of a training step with a real step, in one run.

    python benchmarks/memory.py [--device cpu]

Each model runs a step with SGD and momentum. Printed are the bytes held after the forward and the peak, both over the
bytes alive before the step, predicted and measured (torch's profiler on the CPU, the allocator's statistics on CUDA).
The last lines predict a decoder of 70 billion parameters that is built on meta, and print the time this takes.
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import nn
from torchvision import models

from modelsummary import Statistics

IMAGES = {
    "resnet18": 8,
    "mobilenet_v2": 8,
    "vit_b_16": 2,
    "swin_t": 2,
    "convnext_tiny": 2,
    "densenet121": 2,
}


class Recurrent(nn.Module):
    """An embedding, two layers of LSTM and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(100, 64), nn.LSTM(64, 64, 2, batch_first=True)
        self.head = nn.Linear(64, 100)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(ids))[0])


class Block(nn.Module):
    """A decoder block like Llama's: grouped queries, gated feed-forward, RMS norms."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * groups * self.size, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q = self.q(y).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
        k, v = self.kv(y).unflatten(-1, (2 * self.groups, self.size)).transpose(1, 2).chunk(2, 1)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(attention.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def decoder(layers: int, width: int, heads: int, groups: int, hidden: int, words: int) -> nn.Module:
    """An embedding, decoder blocks and a head."""
    blocks = (Block(width, heads, groups, hidden) for _ in range(layers))
    return nn.Sequential(nn.Embedding(words, width), *blocks, nn.RMSNorm(width), nn.Linear(width, words, bias=False))


def cases(device: str) -> Any:
    """Yield names, models and inputs."""
    for name, batch in IMAGES.items():
        size = 64 if device == "cuda" else batch
        yield f"{name} x {size}", models.get_model(name, weights=None), torch.randn(size, 3, 224, 224)
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    yield "encoder, 6 layers", nn.TransformerEncoder(layer, 6), torch.randn(4, 64, 128)
    yield "LSTM, 2 layers", Recurrent(), torch.randint(0, 100, (4, 32))
    yield "decoder, 4 layers", decoder(4, 128, 4, 2, 352, 1000), torch.randint(0, 1000, (4, 64))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    rows = []
    for name, model, x in cases(device):
        stats = Statistics(model.to(device), x.to(device))
        measured = stats.measure_memory(optimizer="sgd-momentum", loss=lambda output: output.sum())
        guess = measured.predicted
        before = guess.params + guess.buffers + guess.inputs + guess.optimizer_state
        held = measured.held_after_forward - before, guess.held_after_forward - before
        peak = measured.peak, guess.peak
        rows.append([name, *(f"{each:,}" for each in held), f"{held[1] / held[0]:.5f}"])
        rows[-1] += [*(f"{each:,}" for each in peak), f"{peak[1] / peak[0]:.4f}"]
    print(f"torch {torch.__version__}, {device}")
    headers = ["model", "held, real (B)", "predicted (B)", "ratio", "peak, real (B)", "predicted (B)", "ratio"]
    print(tabulate(rows, headers, disable_numparse=True), end="\n\n")
    with torch.device("meta"):
        large = decoder(80, 8192, 64, 8, 28672, 128256).to(torch.bfloat16)
    begin = time.perf_counter()
    stats = Statistics(large, torch.zeros(1, 4096, dtype=torch.long))
    print(stats.memory(optimizer="adamw"))
    print(f"{stats.total_params:,} parameters, batch 1 x 4096: {time.perf_counter() - begin:.1f} s, ", end="")
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB resident at most in this process")


if __name__ == "__main__":
    main()
