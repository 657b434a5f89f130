"""Compare the time of tracing and profiling with ``torch.export``, in one run.

    python benchmarks/fx.py [--runs 5]

Runs are interleaved: export, trace and profile, export ... Prints medians in milliseconds, and the median of the
ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from growth import decoder
from tabulate import tabulate
from torch import nn
from torchvision import models

from modelsummary import symbolic_trace
from modelsummary.fx import symbolic_profile

CASES: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "vit_b_16": (models.vit_b_16, torch.rand(2, 3, 224, 224)),
    "mobilenet_v2": (models.mobilenet_v2, torch.rand(2, 3, 224, 224)),
    "decoder, 96 layers": (lambda: decoder(96), torch.zeros(2, 128, dtype=torch.long)),
}


def timed(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # nothing large is computed, so more threads would only wait
    rows = []
    for name, (make, x) in CASES.items():
        model = make().train()
        key = "x" if name != "decoder, 96 layers" else "input"
        graphs: list[torch.fx.GraphModule] = []
        contestants: dict[str, Callable[[], object]] = {
            "export": lambda model=model, x=x: torch.export.export(model, (x,)),
            "trace": lambda model=model, x=x, key=key, graphs=graphs: graphs.append(
                symbolic_trace(model, meta_args={key: x})
            ),
            "profile": lambda x=x, graphs=graphs: symbolic_profile(graphs[-1], x),
        }
        times: dict[str, list[float]] = {each: [] for each in contestants}
        for number in range(runs + 1):  # the first is a warm-up
            for each, run in contestants.items():
                taken = timed(run)
                if number:
                    times[each].append(taken)
        both = [trace + profile for trace, profile in zip(times["trace"], times["profile"], strict=True)]
        ratio = statistics.median(own / other for own, other in zip(both, times["export"], strict=True))
        medians = [statistics.median(times[each]) for each in contestants]
        rows.append([name, *(f"{each:.0f}" for each in medians), f"{ratio:.2f}"])
    headers = ["model", "torch.export (ms)", "trace (ms)", "profile (ms)", "both / export"]
    print(f"torch {torch.__version__}, {runs} runs, medians")
    print(tabulate(rows, headers, disable_numparse=True, colalign=["left", *["right"] * 4]))


if __name__ == "__main__":
    main()
