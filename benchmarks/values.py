"""Measure what ``Statistics.watch`` costs: CPU time of a forward and backward under it, over the time without.

    python benchmarks/values.py

Both take turns, on one thread; printed are the medians of the times and of the ratios of neighbouring turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from growth import decoder
from torch import nn

from modelsummary import Statistics


def cases() -> dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]]:
    import torchvision

    return {
        "resnet50, 4 images": lambda: (torchvision.models.resnet50(), torch.randn(4, 3, 224, 224)),
        "vit_b_16, 2 images": lambda: (torchvision.models.vit_b_16(), torch.randn(2, 3, 224, 224)),
        "decoder, 2 x 256 tokens": lambda: (decoder(8, width=512), torch.randint(0, 1000, (2, 256))),
    }


def cpu_seconds(function: Callable[[], object]) -> float:
    begin = time.process_time()
    function()
    return time.process_time() - begin


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--turns", type=int, default=7)
    turns = arguments.parse_args().turns
    torch.set_num_threads(1)
    for name, make in cases().items():
        torch.manual_seed(0)
        model, x = make()
        stats = Statistics(model, x)

        def step(model: nn.Module = model, x: torch.Tensor = x) -> None:
            model.zero_grad()
            output = model(x).flatten(0, -2)
            targets = torch.zeros(len(output), dtype=torch.long)
            F.cross_entropy(output, targets).backward()

        def watched(stats: Statistics = stats, step: Callable[[], None] = step) -> None:
            with stats.watch():
                step()

        step()
        watched()
        times = [(cpu_seconds(step), cpu_seconds(watched)) for _ in range(turns)]
        plain = median(before for before, _ in times)
        ratio = median(after / before for before, after in times)
        print(f"{name}: {plain:.2f} s, under watch() {ratio:.2f} times that", flush=True)


if __name__ == "__main__":
    main()
