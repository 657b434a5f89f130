"""Predicted latency beside the measured one, on this machine, over models of several families and two batch sizes.

    python benchmarks/latency_truth.py [--models 25] [--rounds 5] [--threads 2] [--backward] [--plot FILE]

Three predictions: ``own``: after ``calibrate`` with the model's own operator calls; ``grid``: with the standard grid
alone, which was chosen for no model; ``own, forward + backward`` with ``--backward``. Models take turns; the lower
quartile of the runs of each counts, without runs in which the process lost its core, where there are others.
The first line says how quiet the machine was: the share of a core that busy waiting had, and the spread of the runs.
Tables of kernels are made anew in a temporary folder.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from modelsummary import Statistics
from modelsummary.costs.kernel_table import cache_folder
from modelsummary.latency import calibrate_grid
from modelsummary.latency.calibrate import _cpu_share
from modelsummary.latency.kernel_measure import preemptions

TORCHVISION = (
    "resnet18 resnet50 mobilenet_v2 mobilenet_v3_large densenet121 shufflenet_v2_x1_0 efficientnet_b0 vgg11"
    " regnet_y_400mf squeezenet1_1 swin_t convnext_tiny"
)
TIMM = (
    "vit_tiny_patch16_224 deit_small_patch16_224 mixer_s16_224 edgenext_xx_small ghostnet_100 hrnet_w18_small"
    " repvgg_a0 levit_128s"
)
TRANSFORMERS = "bert gpt2 llama t5 distilbert"


def language_model(name: str) -> nn.Module:
    """A small model of a family of transformers."""
    import transformers as hf

    width: dict[str, Any] = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6}
    if name == "bert":
        return hf.BertModel(hf.BertConfig(intermediate_size=1536, **width))
    if name == "distilbert":
        return hf.DistilBertModel(hf.DistilBertConfig(dim=384, n_layers=6, n_heads=6, hidden_dim=1536))
    if name == "gpt2":
        return hf.GPT2Model(hf.GPT2Config(n_embd=384, n_layer=6, n_head=6, vocab_size=10000))
    if name == "llama":
        config = hf.LlamaConfig(intermediate_size=1024, vocab_size=10000, **width)
        return hf.LlamaModel(config)
    config = hf.T5Config(d_model=384, d_ff=1536, num_layers=6, num_heads=6, d_kv=64, vocab_size=10000)
    return hf.T5EncoderModel(config)


def cases() -> list[tuple[str, Callable[[], nn.Module], Callable[[int], torch.Tensor]]]:
    """Names, models and inputs of a batch."""
    import timm
    import torchvision

    def images(batch: int) -> torch.Tensor:
        return torch.rand(batch, 3, 224, 224)

    def words(batch: int) -> torch.Tensor:
        return torch.randint(0, 10000, (batch, 128))

    found: list[Any] = []
    for name in TORCHVISION.split():
        found.append((name, lambda name=name: torchvision.models.get_model(name, weights=None), images))
    for name in TIMM.split():
        found.append((name, lambda name=name: timm.create_model(name), images))
    for name in TRANSFORMERS.split():
        found.append((name, lambda name=name: language_model(name), words))
    return found


class Subject:
    """A model, its predictions in milliseconds, and its measured runs."""

    def __init__(self, name: str, model: nn.Module, x: torch.Tensor) -> None:
        self.name, self.model, self.x = name, model.eval(), x
        self.predicted: dict[str, float] = {}
        self.runs: list[tuple[float, float]] = []  # milliseconds, share of a core
        self.steps: list[tuple[float, float]] = []

    def run(self, times: int) -> None:
        """Time forwards, after two that bring the model back into the caches."""
        with torch.no_grad(), no_collection():
            for _ in range(times + 2):
                self.runs.append(timed(lambda: self.model(self.x)))
        del self.runs[-times - 2 : -times]

    def step(self, times: int) -> None:
        """Time forwards with their backwards."""
        with no_collection():
            for _ in range(times + 1):
                self.model.zero_grad(set_to_none=True)
                self.steps.append(timed(lambda: scalar(self.model(self.x)).backward()))
        del self.steps[-times - 1]


def scalar(output: Any) -> torch.Tensor:
    """The sum of the first tensor of a result: a loss that costs nothing."""
    tensor = output if isinstance(output, torch.Tensor) else output[0]
    return tensor.sum()


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect garbage before, not during or between runs: it would push the model out of the caches."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds, and the share of a core that this thread had; 0 if another thread of the process lost its core."""
    lost = preemptions()
    cpu, begin = time.thread_time(), time.perf_counter()
    run()
    seconds = time.perf_counter() - begin
    share = (time.thread_time() - cpu) / seconds
    return 1e3 * seconds, 0.0 if torch.get_num_threads() > 1 and preemptions() > lost else share


def typical(runs: list[tuple[float, float]], *, cpu_time: bool = False) -> float:
    """The lower quartile of the runs that had their core; of their CPU time where that counts."""
    if cpu_time:
        runs = [(run * min(share, 1.0), 1.0) for run, share in runs]
    quiet = [run for run, share in runs if share > 0.95]
    chosen = sorted(quiet if len(quiet) >= 3 else [run for run, _ in runs])
    return chosen[len(chosen) // 4]


def predict(subject: Subject, folder: Path, *, own: bool, backward: bool) -> float:
    """Milliseconds from the table in a folder, after measuring the model's own calls where asked for."""
    os.environ["MODELSUMMARY_CACHE"] = str(folder)
    stats = Statistics(subject.model, subject.x)
    options: dict[str, Any] = {"backward": backward, "loss": scalar} if backward else {}
    if own:
        stats.calibrate(**options)
    return float(stats.estimate_latency(**options))


def kendall(first: list[float], second: list[float]) -> float:
    """How alike two orders are: 1 equal, -1 opposite."""
    pairs = [(i, j) for i in range(len(first)) for j in range(i)]
    agree = sum((first[i] - first[j]) * (second[i] - second[j]) > 0 for i, j in pairs)
    return 2 * agree / len(pairs) - 1 if pairs else 1.0


def summary(what: str, predicted: list[float], measured: list[float]) -> list[str]:
    """A row of the table of errors."""
    errors = [abs(a / b - 1) for a, b in zip(predicted, measured, strict=True)]
    bias = statistics.mean(a / b - 1 for a, b in zip(predicted, measured, strict=True))
    shares = [f"{sum(error < limit for error in errors) / len(errors):.0%}" for limit in (0.1, 0.2)]
    return [
        what,
        str(len(errors)),
        f"{statistics.mean(errors):.1%}",
        f"{bias:+.1%}",
        *shares,
        f"{kendall(predicted, measured):.2f}",
    ]


def main() -> None:
    """Predict, measure, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=25)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=3, help="of a model in a round")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--filter", default="")
    parser.add_argument("--skip-grid", action="store_true", help="the standard grid, which takes a minute")
    parser.add_argument(
        "--cpu-time", action="store_true", help="of this thread counts: for one thread, on a busy machine"
    )
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    if options.threads:
        torch.set_num_threads(options.threads)
    chosen = [case for case in cases() if options.filter in case[0]][: options.models]
    shares = [_cpu_share()]
    with tempfile.TemporaryDirectory() as folder:
        grid, tables = Path(folder) / "grid", Path(folder) / "own"
        os.environ["MODELSUMMARY_CACHE"] = str(grid)
        assert cache_folder() == grid
        if not options.skip_grid:
            print(calibrate_grid(torch.device("cpu")))
        subjects = []
        for name, make, inputs in chosen:
            for batch in options.batches:
                subject = Subject(f"{name} x {batch}", make(), inputs(batch))
                try:
                    subject.predicted["own"] = predict(subject, tables, own=True, backward=False)
                    if not options.skip_grid:
                        subject.predicted["grid"] = predict(subject, grid, own=False, backward=False)
                    if options.backward:
                        subject.predicted["step"] = predict(subject, tables, own=True, backward=True)
                except Exception as error:
                    print(f"left out: {subject.name}: {type(error).__name__}: {str(error)[:100]}")
                    continue
                subjects.append(subject)
        for _ in range(options.rounds):
            shares.append(_cpu_share())
            for subject in subjects:
                subject.run(options.runs)
                if options.backward:
                    subject.step(options.runs)
    report(subjects, shares, options)


def undisturbed(subjects: list[Subject]) -> float:
    """The share of all runs in which no thread lost its core."""
    runs = [share > 0.95 for each in subjects for _, share in each.runs]
    return sum(runs) / len(runs)


def report(subjects: list[Subject], shares: list[float], options: argparse.Namespace) -> None:
    """Print the tables, and draw the picture."""
    measured = [typical(each.runs, cpu_time=options.cpu_time) for each in subjects]
    spreads = [statistics.median(run for run, _ in each.runs) / typical(each.runs) - 1 for each in subjects]
    print(
        f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}; a core was free"
        f" {min(shares):.0%} to {max(shares):.0%} of the time; medians of runs lie {statistics.mean(spreads):.0%} above"
        f" their lower quartiles; {undisturbed(subjects):.0%} of the runs were undisturbed"
    )
    predictions = [what for what in ("own", "grid") if what in subjects[0].predicted]
    rows = [
        [
            each.name,
            f"{real:.2f}",
            f"{each.predicted['own'] / real:.3f}",
            f"{each.predicted.get('grid', 0.0) / real:.3f}",
        ]
        + (
            [f"{each.predicted['step'] / typical(each.steps, cpu_time=options.cpu_time):.3f}"]
            if options.backward
            else []
        )
        for each, real in zip(subjects, measured, strict=True)
    ]
    headers = ["model", "measured (ms)", "own / measured", "grid / measured", "step / measured"]
    print(tabulate(rows, headers[: len(rows[0])], tablefmt="github", disable_numparse=True))
    lines = [summary(what, [each.predicted[what] for each in subjects], measured) for what in predictions]
    if options.backward:
        steps = [typical(each.steps, cpu_time=options.cpu_time) for each in subjects]
        lines.append(summary("own, forward + backward", [each.predicted["step"] for each in subjects], steps))
    headers = ["prediction", "models", "mean error", "bias", "within 10 %", "within 20 %", "Kendall's tau"]
    print(tabulate(lines, headers, tablefmt="github", disable_numparse=True))
    if options.plot:
        draw(subjects, measured, options.plot)


def draw(subjects: list[Subject], measured: list[float], path: Path) -> None:
    """Predicted against measured."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 6), layout="constrained")
    for what, marker in (("own", "o"), ("grid", "x")):
        axes.scatter(
            measured, [each.predicted.get(what, 0.0) for each in subjects], marker=marker, label=what, alpha=0.8
        )
    ends = [0.8 * min(measured), 1.25 * max(measured)]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="measured (ms)", ylabel="predicted (ms)")
    axes.legend(title="kernels of", frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    main()
