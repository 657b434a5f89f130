"""Measure the explorer: the time and size of its page, and the times in a browser.

    python benchmarks/explorer.py

A model with 1,000 modules and 10,000 operators, of which no two neighbours are equal, and a file of 100,000 operators
without modules. The browser is Chromium through playwright; without it, only the first columns are printed.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from modelsummary import Statistics
from modelsummary.files.budget import Budget
from modelsummary.files.program import Operation, Program, Tensor
from modelsummary.files.statistics import FileStatistics
from modelsummary.statistics import ModelStatistics
from modelsummary.tables import table

BLOCKS = 110


class Block(nn.Module):
    """Nine modules, and 91 functions around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=bool((width + place) % 2)) for place in range(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, layer in enumerate(self.layers):
            y = layer(x)
            for function in (torch.relu, torch.tanh, torch.sigmoid, torch.abs, torch.neg, torch.sin, torch.cos):
                y = function(y)
            x = x + y * (place + 1)
        return torch.relu(x)


def live() -> ModelStatistics:
    return Statistics(nn.Sequential(*(Block(number) for number in range(BLOCKS))), (2, 8))


def flat() -> ModelStatistics:
    tensors = [Tensor(f"t{number}", (2, 8), (2, 8), "float32", 32) for number in range(100_001)]
    kinds = ["Relu", "Neg", "Abs", "Sin", "Cos", "Exp", "Tanh"]
    drawn = random.Random(0).choices(kinds, k=100_000)  # no pattern, which would fold
    steps = [
        Operation(f"op{number}", kind, (), [tensors[number]], [tensors[number + 1]])
        for number, kind in enumerate(drawn)
    ]
    budget = Budget.of_size(10_000_000)  # about the bytes of such a file
    return FileStatistics(Program("Flat", [tensors[0]], [tensors[-1]], steps), Path("flat.onnx"), budget)


def in_browser(path: Path) -> dict[str, float]:
    """Return the seconds until the first picture, and the milliseconds to expand and to collapse a module."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as library:
        browser = library.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 850})
        start = time.perf_counter()
        page.goto(path.as_uri())
        page.wait_for_function("document.body.dataset.ready === 'true'")
        ready = time.perf_counter() - start
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? NaN")
        times = []
        for _ in range(6):
            page.evaluate("delete document.body.dataset.drawn")
            start = time.perf_counter()
            page.locator(".toggle").nth(1).dispatch_event("click")
            page.wait_for_function("document.body.dataset.drawn === 'true'", polling=5)
            times.append(1e3 * (time.perf_counter() - start))
        nodes = page.locator("[data-node]").count()
        browser.close()
    return {"first paint (ms)": paint, "ready (s)": ready, "toggle (ms)": sorted(times)[3], "drawn": nodes}


def main() -> None:
    rows = []
    for name, make in (("1,000 modules, live", live), ("100,000 nodes, file", flat)):
        stats = make()
        start = time.perf_counter()
        flow = stats._dataflow()
        recorded = time.perf_counter() - start
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "page.html"
            start = time.perf_counter()
            stats.explore(path)
            written = time.perf_counter() - start
            found = {
                "model": name,
                "steps": len(flow.steps),
                "recorded (s)": recorded,
                "explore (s)": written,
                "page (MB)": path.stat().st_size / 1e6,
            }
            if shutil.which("chromium") is not None and "--no-browser" not in sys.argv:
                found |= in_browser(path)
        rows.append([f"{value:.2f}" if isinstance(value, float) else value for value in found.values()])
    print(table(rows, list(found), "l" + "r" * (len(found) - 1), "simple"))


if __name__ == "__main__":
    main()
