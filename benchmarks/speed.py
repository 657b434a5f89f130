"""Compare the time of ``Statistics`` with the bare forward and with peers, measure its growth, and write RESULTS.md.

    python3 -m venv .venv-bench && .venv-bench/bin/pip install -q -e . -r benchmarks/requirements.txt \\
        && .venv-bench/bin/python benchmarks/speed.py

Times are CPU times of a process, all threads. Contestants take turns, and a ratio compares two runs of the same turn.
Printed are the median and the quartiles of the ratios. Each peer runs with ``Statistics`` in its own process, because
some peers leave wrappers on torch's functions. Peers that are not installed are skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import importlib
import io
import json
import logging
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from math import log
from pathlib import Path
from typing import Any

import torch
from growth import decoder
from tabulate import tabulate
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import modelsummary
from modelsummary import Statistics

HERE = Path(__file__).parent
META = torch.device("meta")
BARE = "bare"
PEERS = ("FlopCounterMode", "torchinfo", "DeepSpeed", "Lightning", "torchlens")
GROWTH = {"decoder": (10, 100, 1_000, 10_000), "experts": (1_000, 10_000, 100_000), "split": (30, 100, 1_000)}


def image_model(name: str) -> nn.Module:
    return importlib.import_module("torchvision.models").get_model(name, weights=None)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    return nn.TransformerEncoder(layer, 96, enable_nested_tensor=False)


def cases() -> Iterator[tuple[str, Callable[[], nn.Module], torch.Tensor]]:
    """Yield names, functions that make the model, and inputs, on meta."""
    for name in ("resnet18", "resnet152", "vit_b_16", "swin_t", "efficientnet_b0"):
        yield name, functools.partial(image_model, name), torch.empty(1, 3, 224, 224, device=META)
    yield "encoder, 96 layers", encoder, torch.empty(1, 64, 256, device=META)
    yield "decoder, 32 layers", functools.partial(decoder, 32), torch.zeros(1, 128, dtype=torch.long, device=META)


def bare(model: nn.Module, x: torch.Tensor) -> object:
    with torch.no_grad():
        return model(x)


def flop_counter(model: nn.Module, x: torch.Tensor) -> object:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(x)
    return counter


def peer(name: str, model: nn.Module, x: torch.Tensor, training: bool) -> Callable[[], object]:
    """Return the call of a peer on the same model; raise ``ImportError`` if the peer is not installed."""
    if name == "FlopCounterMode":
        return lambda: flop_counter(model, x)
    if name == "torchinfo":
        torchinfo = importlib.import_module("torchinfo")
        options = {"verbose": 0, "mode": "train" if training else "eval", "cache_forward_pass": False}
        return lambda: torchinfo.summary(model, input_data=x, device=x.device, **options)
    if name == "DeepSpeed":
        profiler = importlib.import_module("deepspeed.profiling.flops_profiler")
        return lambda: profiler.get_model_profile(model, args=[x], print_profile=False, warm_up=0)
    if name == "torchlens":
        torchlens = importlib.import_module("torchlens")
        return lambda: torchlens.summary(model, x)
    return lightning_summary(model, x)


def lightning_summary(model: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    lightning = importlib.import_module("lightning.pytorch")
    summarize = importlib.import_module("lightning.pytorch.utilities.model_summary").ModelSummary

    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.example_input_array = model, x

        def forward(self, x: torch.Tensor) -> Any:
            return self.model(x)

    module = Module().to(META)
    return lambda: str(summarize(module, max_depth=-1))


def first_run(run: Callable[[], object]) -> float | None:
    """Return the CPU seconds of the warm-up run; None if it cannot run on meta."""
    try:
        return quietly(run)
    except Exception:
        return None


def quietly(run: Callable[[], object]) -> float:
    """Return the CPU seconds of a run with its output suppressed."""
    with contextlib.redirect_stdout(io.StringIO()):
        start = time.process_time()
        run()
        return time.process_time() - start


def turns(runs: dict[str, Callable[[], object]], count: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each contestant in each turn, without the first turn."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(count + 1):
        for name, run in runs.items():
            seconds = quietly(run)
            if turn:
                times[name].append(seconds)
    return times


def ratio(ours: list[float], theirs: list[float]) -> str:
    """Return the median and the quartiles of ours / theirs."""
    each = [own / other for own, other in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(each, n=4)
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def against_peers(count: int) -> str:
    """Return a table of the ratios of ``Statistics`` to the bare forward and to each peer, on the same meta models."""
    rows: dict[str, dict[str, str]] = {}
    for name in (BARE, *PEERS):
        command = [sys.executable, __file__, "--runs", str(count), "--beside", name]
        found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1]
        for case, milliseconds, quotient in json.loads(found):
            rows.setdefault(case, {"": case, "Statistics (ms)": milliseconds})[f"/ {name}"] = quotient
    return tabulate(rows.values(), headers="keys", tablefmt="github", disable_numparse=True)


def beside(name: str, count: int) -> list[tuple[str, str, str]]:
    """Return for each case the name, the milliseconds of ``Statistics``, and the ratio to one contestant."""
    found = []
    for case, make, x in cases():
        for training in (True, False):
            model = make().to(META).train(training)
            try:
                other = functools.partial(bare, model, x) if name == BARE else peer(name, model, x, training)
            except ImportError:
                return []
            if (seconds := first_run(other)) is not None:
                runs = {"ours": functools.partial(Statistics, model, x), "other": other}
                times = turns(runs, count if seconds < 1 else min(count, 3))  # a slow contestant needs fewer runs
                milliseconds = f"{statistics.median(times['ours']) * 1e3:.1f}"
                mode = "train" if training else "eval"
                found.append((f"{case}, {mode}", milliseconds, ratio(times["ours"], times["other"])))
    return found


def against_real_forwards(count: int) -> str:
    """Return the ratio of ``Statistics`` of a model on the CPU to its real forward at batch 1."""
    rows = []
    for name in ("resnet152", "vit_b_16"):
        model, x = image_model(name).eval(), torch.rand(1, 3, 224, 224)
        runs = {"bare": functools.partial(bare, model, x), "ours": functools.partial(Statistics, model, x)}
        times = turns(runs, count)
        rows.append({"": name, "Statistics / real forward": ratio(times["ours"], times["bare"])})
        print(rows[-1], flush=True)
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)


def growth() -> str:
    """Return time and memory by size, each measured in its own process, with the slope between neighbours."""
    rows = []
    for kind, sizes in GROWTH.items():
        before: dict[str, Any] = {}
        for size in sizes:
            command = [sys.executable, str(HERE / "growth.py"), kind, str(size)]
            found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            row = {
                "": f"{kind}, {size:,}",
                "Modules": f"{found['modules']:,}",
                "CPU time (s)": f"{found['seconds']:.2f}",
            }
            row["Beyond torch and model (MB)"] = f"{found['bytes'] / 1e6:.0f}"
            for name, key in (("Slope of time", "seconds"), ("Slope of memory", "bytes")):
                steps = log(found["modules"] / before["modules"]) if before else 0
                row[name] = f"{log(found[key] / before[key]) / steps:.2f}" if steps and before[key] else ""
            rows.append(row)
            before = found
            print(row, flush=True)
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)


def imports(count: int = 7) -> str:
    """Return the CPU milliseconds of the import after torch's, and of the imports for a first table."""
    code = (
        "import time, torch; start = time.process_time(); import modelsummary; middle = time.process_time();"
        "modelsummary.Statistics; print(middle - start, time.process_time() - middle)"
    )
    command = [sys.executable, "-c", code]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() for _ in range(count)]
    package, table = (statistics.median(float(run[part]) * 1e3 for run in runs) for part in (0, 1))
    beyond = f"`import modelsummary` beyond `import torch`: {package:.1f} ms"
    return f"{beyond}; what `Statistics` needs, when first used: {table:.0f} ms."


def machine() -> str:
    date = datetime.datetime.now(tz=datetime.UTC).date()
    threads = f"{torch.get_num_threads()} threads, Python {platform.python_version()}, torch {torch.__version__}"
    return f"{date}, {platform.machine()}, {threads}, modelsummary {modelsummary.__version__}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=11, help="counted turns of each contestant (default: 11)")
    parser.add_argument("--beside", choices=(BARE, *PEERS), help="print the ratios to one contestant alone, as JSON")
    options = parser.parse_args()
    count = options.runs
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if options.beside is not None:
        print(json.dumps(beside(options.beside, count)))
        return
    parts = [
        "# Speed\n\nMade by `benchmarks/speed.py`, which says how it is run.",
        machine(),
        "Ratios of CPU time: median (quartiles) over interleaved turns, each contestant in a process of its own with"
        " `Statistics`; below 1, `Statistics` is faster.",
        "## On meta, beside the bare forward and peers\n\nA peer that cannot run on meta has no figure.",
        against_peers(count),
        "## Models on the CPU, batch 1",
        against_real_forwards(count),
        "## Growth\n\nOf one summary. `experts`: a decoder whose layers hold 64 experts that are modules. `split`: of"
        " `split(16)` of the decoder, after its summary.",
        growth(),
        f"## Import\n\n{imports()}",
    ]
    (HERE / "RESULTS.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
