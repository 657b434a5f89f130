"""Summarise or split a large model on meta in this process; print modules, CPU seconds and bytes as JSON.

    python benchmarks/growth.py decoder|experts|split|llama_split|llama_plan SIZE

SIZE is the number of layers of the decoder, or of modules of the mixture of experts. ``split`` times
``stats.split(16)`` of the decoder, after its summary; a layer has 14 parameters, 7 calls of layers and some 20 of
functions: ``split 715`` has 10,000 tensors. ``llama_split`` does the same with the Llama of transformers that has 405
billion parameters in 126 layers, and ``llama_plan`` times ``stats.parallel_plan(tensor=8)`` of it.
"""

from __future__ import annotations

import gc
import json
import re
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """A decoder block: causal attention and a gated feed-forward network."""

    def __init__(self, width: int, heads: int, experts: int = 1) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).reshape(batch, length, width))
        shares = self.norm2(x).tensor_split(len(self.experts), 1)
        return x + torch.cat([expert(share) for expert, share in zip(self.experts, shares, strict=True)], 1)


class Expert(nn.Module):
    """A gated feed-forward network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def decoder(layers: int, width: int = 256, experts: int = 1) -> nn.Module:
    blocks = [Block(width, 8, experts) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(1000, width), *blocks, nn.Linear(width, 1000))


def llama(layers: int) -> nn.Module:
    """Return the model with the widths of 405 billion parameters; they are that many with 126 layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16384, "intermediate_size": 53248, "vocab_size": 128256, "num_hidden_layers": layers}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=128, num_key_value_heads=8, use_cache=False))


def peak_bytes() -> int:
    """Return the peak memory of this process alone; ``getrusage`` would include the process that started it."""
    line = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert line is not None
    return int(line[1]) * 1024


def main() -> None:
    kind, size = sys.argv[1], int(sys.argv[2])
    with torch.device("meta"):
        per_layer = 64 * 4 + 6  # experts and their layers; the block, its norms, its linears and its list
        if kind.startswith("llama"):
            model = llama(size)
        else:
            model = decoder(round(size / per_layer), experts=64) if kind == "experts" else decoder(size)
    x = torch.zeros(1, 128, dtype=torch.long, device="meta")
    from modelsummary import Statistics

    Statistics(nn.Linear(1, 1), (1, 1))  # warm up the imports
    gc.collect()  # free the garbage of building the model
    before, start = peak_bytes(), time.process_time()
    stats = Statistics(model, x)
    figures: dict[str, int] = {}
    if kind == "llama_plan":
        before, start = peak_bytes(), time.process_time()
        stats.parallel_plan(tensor=8)
    if kind.endswith("split"):
        before, start = peak_bytes(), time.process_time()
        stages = stats.split(16)
        figures = {"calls": sum(1 for event in stages.record.root.walk() if not event.children)}
        figures["tensors"] = len(list(model.parameters()))
    seconds = time.process_time() - start
    assert stats.execution == "shape"
    print(json.dumps({"modules": len(stats) + 1, **figures, "seconds": seconds, "bytes": peak_bytes() - before}))


if __name__ == "__main__":
    main()
