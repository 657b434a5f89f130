"""Compare measured latencies with runs without measuring, side by side in one run.

    python benchmarks/latency.py [--runs 15] [--device cpu]

For each model, prints the root's latency as a multiple of a plain forward, the sum of all own times as a multiple of
the root's latency, the same for the backward, and the slow-down by the marks. A small model with many calls is also
measured with DeepSpeed's flops profiler, and with two hooks on each module. Peers that are not installed are skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from torchvision import models

from modelsummary import Statistics

FORWARD = {"cpu": [("resnet50", 16), ("vit_b_16", 4)], "cuda": [("resnet50", 64)]}
BACKWARD = {
    "cpu": [("resnet50", 4), ("mobilenet_v2", 8), ("densenet121", 4), ("vit_b_16", 2), ("swin_t", 4)],
    "cuda": [("resnet50", 64)],
}


def sum_of_own(stats: Any, attribute: str) -> float:
    """Return the sum of the own times of all rows."""
    return sum(getattr(row, attribute) or 0.0 for row in stats.root.walk())


def transformer(device: str) -> tuple[nn.Module, torch.Tensor]:
    """Return an encoder of 24 layers in bfloat16, and its input."""
    layer = nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 24, enable_nested_tensor=False).to(device, torch.bfloat16)
    return model, torch.randn(8, 512, 1024, device=device, dtype=torch.bfloat16)


def measured(name: str, model: nn.Module, x: torch.Tensor, runs: int, *, backward: bool) -> list[str]:
    """Return a row of the table."""
    stats = Statistics(model, x).measure_latency(runs=runs, backward=backward)
    overhead, prefix = stats.latency_overhead, "backward_" if backward else ""
    compared = overhead.backward if backward else overhead.forward
    root = getattr(stats.root, f"{prefix}latency_ms")
    own = sum_of_own(stats, f"{prefix}self_latency_ms")
    return [
        f"{name}, {'backward' if backward else 'forward'}",
        f"{compared.plain_ms:.2f}",
        f"{root:.2f}",
        f"{root / compared.plain_ms:.3f}",
        f"{own / root:.5f}",
        f"{compared.ratio:.3f}",
    ]


# ------------------------------------------------------------------------------------- many small calls


def many_calls() -> tuple[nn.Module, torch.Tensor]:
    """Return a model of 301 very short calls, and its input."""
    layers = [each for _ in range(150) for each in (nn.Linear(32, 32), nn.ReLU())]
    return nn.Sequential(*layers).eval(), torch.randn(4, 32)


def plain(model: nn.Module, x: torch.Tensor) -> float:
    """Return the milliseconds of a forward."""
    begin = time.perf_counter()
    model(x)
    return 1e3 * (time.perf_counter() - begin)


def with_hooks(model: nn.Module, x: torch.Tensor) -> float:
    """Put two hooks that take the time on each module; return the milliseconds between the root's hooks."""
    times: dict[nn.Module, list[float]] = {}
    hooks: list[Any] = []
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(lambda m, _: times.setdefault(m, []).append(time.perf_counter())))
        hooks.append(module.register_forward_hook(lambda m, *_: times[m].append(time.perf_counter())))
    model(x)
    for hook in hooks:
        hook.remove()
    return 1e3 * (times[model][1] - times[model][0])


def with_deepspeed() -> Callable[[nn.Module, torch.Tensor], float]:
    """Return a function that returns the total duration reported by DeepSpeed's flops profiler."""
    profiler = importlib.import_module("deepspeed.profiling.flops_profiler").FlopsProfiler

    def run(model: nn.Module, x: torch.Tensor) -> float:
        prof = profiler(model)
        prof.start_profile()
        model(x)
        duration = 1e3 * prof.get_total_duration()
        prof.end_profile()
        return duration

    return run


def small_calls(runs: int) -> list[list[str]]:
    """Measure the model of many calls in each way, as a multiple of a plain forward in the same turn."""
    model, x = many_calls()
    ways: dict[str, Callable[[nn.Module, torch.Tensor], float]] = {"two hooks on each module": with_hooks}
    with contextlib.suppress(ImportError):
        ways["DeepSpeed"] = with_deepspeed()
    rows = []
    stats = Statistics(model, x).measure_latency(runs=10 * runs)
    overhead = stats.latency_overhead
    rows.append(["ours", f"{overhead.forward.plain_ms:.3f}", f"{stats.root.latency_ms:.3f}"])
    rows[-1] += [f"{stats.root.latency_ms / overhead.forward.plain_ms:.2f}", f"{overhead.forward.ratio:.2f}"]
    with torch.no_grad():
        for name, way in ways.items():
            pairs = [(plain(model, x), way(model, x)) for _ in range(10 * runs)]
            medians = [statistics.median(each) for each in zip(*pairs, strict=True)]
            ratio = statistics.median(after / before for before, after in pairs)
            rows.append([name, f"{medians[0]:.3f}", f"{medians[1]:.3f}", f"{ratio:.2f}", f"{ratio:.2f}"])
    return rows


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    rows = []
    for backward, cases in ((False, FORWARD), (True, BACKWARD)):
        for name, batch in cases[options.device]:
            model = models.get_model(name, weights=None).to(options.device)
            x = torch.randn(batch, 3, 224, 224, device=options.device)
            rows.append(measured(f"{name} x {batch}", model, x, options.runs, backward=backward))
        if options.device == "cuda":
            rows.append(measured("transformer, bf16", *transformer("cuda"), options.runs, backward=backward))
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {options.device}, {options.runs} pairs of runs"
    )
    headers = ["case", "plain (ms)", "root (ms)", "root / plain", "sum of own / root", "with marks / plain"]
    print(tabulate(rows, headers, disable_numparse=True), end="\n\n")
    if options.device == "cpu":
        headers = ["301 calls of an MLP", "plain (ms)", "measured (ms)", "measured / plain", "run / plain"]
        print(tabulate(small_calls(options.runs), headers, disable_numparse=True))


if __name__ == "__main__":
    main()
