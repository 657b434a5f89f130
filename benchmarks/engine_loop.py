"""A small engine in plain PyTorch on this CPU: its real throughput and latencies, and what ``simulate`` predicts.

    python benchmarks/engine_loop.py [--requests 24] [--slots 8] [--runs 8]

The engine keeps the keys and values of a few slots. A step computes one whole prompt that waits for a free slot, else a
token of each running request; the last slot moves into one that becomes free. A virtual clock adds up the CPU time of
its single thread, so other processes of the machine hardly count, and requests arrive by this clock. The prediction is
``serving(calibrate=True).simulate(...)`` in eager mode, with ``token_budget=None`` and as many requests as slots; it
may compute several whole prompts in one step, up to the context, where this engine computes one prompt. The kernel
table is made anew in a temporary folder; the engine runs between the rounds in which operator calls are measured, so
both see the same fast and slow seconds of the machine, and the median of its runs counts. Loads: all requests at once,
and at a rate of two thirds of what was sustained.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parent.parent))

from interleaved_runs import between_rounds

from modelsummary import Statistics
from modelsummary.serving import Engine, Load, ServedRequest, Spread, Uniform

WIDTH, LAYERS, HEADS, WORDS, CONTEXT = 512, 4, 8, 4000, 192


class Slots:
    """Keys and values of all slots and layers, allocated once; each slot holds a number of tokens."""

    def __init__(self, slots: int, context: int) -> None:
        self.layers = [torch.zeros(2, slots, HEADS, context, WIDTH // HEADS) for _ in range(LAYERS)]
        self.lengths = [0] * slots
        self.rows: tuple[Tensor, Tensor, Tensor] | None = None  # slot, position of the new token, and mask

    def extend(self, n_slots: int, n_tokens: int) -> None:
        """Make room for new tokens of the first slots: a prompt in empty ones, or a token in each."""
        self.lengths[:n_slots] = [length + n_tokens for length in self.lengths[:n_slots]]
        lengths = torch.tensor(self.lengths[:n_slots])
        mask = (torch.arange(max(self.lengths[:n_slots])) < lengths[:, None])[:, None, None]
        self.rows = None if n_tokens > 1 else (torch.arange(n_slots), lengths - 1, mask)

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Write the keys and values of new tokens; return all that are attended to, and a mask."""
        keys, values = self.layers[layer]
        if self.rows is None:
            n_tokens = key.shape[2]
            keys[:, :, :n_tokens], values[:, :, :n_tokens] = key, value
            return key, value, None
        slots, positions, mask = self.rows
        keys[slots, :, positions], values[slots, :, positions] = key[:, :, 0], value[:, :, 0]
        n_slots, longest = mask.shape[0], mask.shape[-1]
        return keys[:n_slots, :, :longest], values[:n_slots, :, :longest], mask


class Model(nn.Module):
    """A decoder of plain layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.up = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(LAYERS))
        self.down = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, ids: Tensor, cache: Slots | None = None) -> tuple[Tensor, Slots]:
        """Return the logits of the last token, and the cache."""
        cache = Slots(len(ids), CONTEXT) if cache is None else cache
        cache.extend(*ids.shape)
        x = self.words(ids)
        for layer, (qkv, out, up, down) in enumerate(zip(self.qkv, self.out, self.up, self.down, strict=True)):
            query, key, value = qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            keys, values, mask = cache.write(layer, key, value)
            attended = scaled_dot_product_attention(query, keys, values, mask, is_causal=ids.shape[1] > 1)
            x = x + out(attended.transpose(1, 2).flatten(2))
            x = x + down(torch.relu(up(x)))
        cache.rows = None
        return self.head(x[:, -1:]), cache


def serve(model: Model, load: Load, n_slots: int) -> list[ServedRequest]:
    """Serve a load for real; times are CPU seconds of this thread, and waiting for arrivals."""
    slots, now = Slots(n_slots, CONTEXT), 0.0
    requests, waiting = load.sample(), list(range(load.requests))
    running: list[int] = []  # the request in each slot
    tokens, first, done = {}, {}, {}
    while waiting or running:
        if not running and requests[waiting[0]].arrival > now:
            now = requests[waiting[0]].arrival
        begin = time.thread_time()
        if waiting and len(running) < n_slots and requests[waiting[0]].arrival <= now:
            computed = [waiting.pop(0)]
            logits, cache = model(torch.zeros(1, requests[computed[0]].prompt, dtype=torch.long))
            for layer, part in zip(slots.layers, cache.layers, strict=True):
                layer[:, len(running) : len(running) + 1] = part
            slots.lengths[len(running)] = cache.lengths[0]
            running += computed
            tokens[computed[0]] = 0
        else:
            computed = list(running)
            logits, _ = model(torch.zeros(len(running), 1, dtype=torch.long), slots)
        logits.argmax(-1).tolist()
        now += time.thread_time() - begin
        begin = time.thread_time()
        for index in computed:
            tokens[index] += 1
            first.setdefault(index, now)
            if tokens[index] == requests[index].output:
                done[index], slot = now, running.index(index)
                last = len(running) - 1
                for layer in slots.layers:
                    layer[:, slot] = layer[:, last]
                running[slot], slots.lengths[slot], slots.lengths[last] = running[last], slots.lengths[last], 0
                running.pop()
        now += time.thread_time() - begin
    return [ServedRequest(*requests[index], first[index], done[index], 0) for index in range(load.requests)]


def figures(requests: list[ServedRequest]) -> dict[str, float]:
    """Return throughput and latencies."""
    seconds = max(request.last for request in requests) - requests[0].arrival
    ttft, tpot = ([getattr(request, name) for request in requests] for name in ("ttft_ms", "tpot_ms"))
    return {
        "output tokens/s": sum(request.output for request in requests) / seconds,
        "TTFT p50 (ms)": Spread.of(ttft).p50,
        "TTFT p95 (ms)": Spread.of(ttft).p95,
        "TPOT p50 (ms)": Spread.of(tpot).p50,
        "TPOT p95 (ms)": Spread.of(tpot).p95,
    }


def main() -> None:
    """Measure, predict, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--runs", type=int, default=8, help="of the engine, at most")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    model = Model().eval()
    load = Load(options.requests, prompt=Uniform(16, 96), output=Uniform(8, 64))
    rows = []
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        os.environ["MODELSUMMARY_CACHE"] = folder
        stats = Statistics(model, torch.zeros(1, 8, dtype=torch.long))
        serve(model, replace(load, requests=4), options.slots)  # memory is new
        rate = 2 / 3 * options.requests / max(request.last for request in serve(model, load, options.slots))
        loads = {"at once": load, f"{rate:.1f} requests/s": replace(load, rate=rate)}
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in loads}

        def measure() -> None:
            """Serve both loads, at most as often as asked, between the rounds in which operator calls are measured."""
            if len(runs["at once"]) < options.runs:
                for name, served_load in loads.items():
                    runs[name].append(figures(serve(model, served_load, options.slots)))

        engine = Engine(token_budget=None, max_requests=options.slots)
        with between_rounds(measure):
            estimate = stats.serving(CONTEXT, batch=options.slots, calibrate=True, batches=[1])
            runs = {name: [] for name in loads}  # the calls of steps are measured from here on
            estimate.prices(engine)
        for name, served_load in loads.items():
            simulation = estimate.simulate(served_load, engine)
            print(simulation)
            for figure, value in figures(list(simulation.requests)).items():
                real = sorted(run[figure] for run in runs[name])
                middle = median(real)
                rows.append([name, figure, value, middle, real[0], real[-1], f"{value / middle - 1:+.1%}"])
    headers = ["load", "figure", "predicted", "measured", "least", "most", "error"]
    print(tabulate(rows, headers, "github", floatfmt=".1f"))
    print("load of the machine:", os.getloadavg())


if __name__ == "__main__":
    main()
