"""How long ``Statistics`` takes against the bare forward on meta, and against peers, side by side in one run.

    python benchmarks/capture.py [--runs 7]

Each row alternates the contestants, run by run, and prints medians in milliseconds and their ratio to the
bare forward. Peers that are not installed are left out. torchinfo and DeepSpeed compute, as they always do.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision import models

from modelsummary import Statistics


class Block(nn.Module):
    """A decoder block: causal attention and a gated feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).reshape(batch, length, width))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def decoder(layers: int = 32, width: int = 256) -> nn.Module:
    return nn.Sequential(nn.Embedding(1000, width), *[Block(width, 8) for _ in range(layers)], nn.Linear(width, 1000))


def image_model(name: str) -> Callable[[], nn.Module]:
    return lambda: models.get_model(name, weights=None)


IMAGE = (1, 3, 224, 224)
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    name: (image_model(name), lambda: torch.rand(IMAGE))
    for name in ("resnet18", "resnet152", "vit_b_16", "swin_t", "efficientnet_b0")
}
CASES["decoder, 32 layers"] = (decoder, lambda: torch.zeros(1, 128, dtype=torch.long))


def contestants(make: Callable[[], nn.Module], x: torch.Tensor, training: bool) -> dict[str, Callable[[], object]]:
    """Name -> a run of it. All summarise the same model and input; the first is the bare meta forward."""
    model = make().train(training)
    on_meta, meta_x = make().to("meta").train(training), x.to("meta")

    def bare() -> object:
        with torch.no_grad():
            return on_meta(meta_x)

    def flop_counter() -> object:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            on_meta(meta_x)
        return counter

    runs: dict[str, Callable[[], object]] = {
        "bare meta forward": bare,
        "Statistics": lambda: Statistics(model, x),
        "FlopCounterMode on meta": flop_counter,
    }
    with contextlib.suppress(ImportError):
        torchinfo = importlib.import_module("torchinfo")
        mode = "train" if training else "eval"
        runs["torchinfo"] = lambda: torchinfo.summary(
            model, input_data=x, verbose=0, mode=mode, cache_forward_pass=False
        )
    with contextlib.suppress(ImportError):
        profiler = importlib.import_module("deepspeed.profiling.flops_profiler")
        runs["DeepSpeed"] = lambda: profiler.get_model_profile(model, args=[x], print_profile=False, warm_up=0)
    return runs


def medians(runs: dict[str, Callable[[], object]], count: int) -> dict[str, float]:
    """Median milliseconds of each, the contestants taking turns; the first turn is not counted."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(count + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            with contextlib.redirect_stdout(io.StringIO()):
                run()
            if turn:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7, help="counted runs of each contestant (default: 7)")
    count = parser.parse_args().runs
    warnings.simplefilter("ignore")
    rows = []
    for name, (make, sample) in CASES.items():
        for training in (False, True):
            result = medians(contestants(make, sample(), training), count)
            bare = next(iter(result.values()))
            row = {"model": f"{name}, {'train' if training else 'eval'}"}
            for contestant, milliseconds in result.items():
                row[f"{contestant} (ms)"] = f"{milliseconds:.1f}"
                if milliseconds != bare:
                    row[f"{contestant} / bare"] = f"{milliseconds / bare:.2f}"
            rows.append(row)
            print(row["model"], {key: value for key, value in row.items() if key != "model"}, flush=True)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, medians of {count} runs")
    print(tabulate(rows, headers="keys", tablefmt="github"))


if __name__ == "__main__":
    main()
