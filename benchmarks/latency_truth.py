"""Predicted latency beside the measured one, on this machine, over models of several families and two batch sizes.

    python benchmarks/latency_truth.py [--models 25] [--rounds 3] [--threads 2] [--backward N] [--plot FILE]

Predictions from the model's own operator calls, of a forward and with ``--backward`` of forward + backward; and from
the standard grid alone, which was chosen for no model. Models take turns, and ``calibrate`` visits the calls of each
model in every round, for forwards and for steps apart. Meanwhile the model itself runs after each round of calls, so
both see the same fast and slow seconds of the machine; before each run that counts, one brings the model back into the
caches. Of a visit, the lower quartile of a model's runs counts, without runs in which the process lost its core, where
there are others.

Each visit is compared with its own runs; the median of the visits' runs with the table of all visits; and the first
visit with the runs of later ones. The grid is measured once, at the beginning.

Predictions leave out page faults, and glibc keeps freed memory while ``calibrate`` measures, as other allocators do.
Forwards before that run as the C library is by default; they have a line of their own.

The first lines say how well the truth repeats itself: the share of a core that busy waiting had, and the difference
between two visits of a model. Tables of kernels are made anew in a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
from interleaved_runs import Run, between_rounds, minor_faults, only_latest_visit, timed, typical
from tabulate import tabulate
from torch import nn

from modelsummary import Statistics
from modelsummary.devices.kernel_table import cache_folder
from modelsummary.latency import calibrate_grid
from modelsummary.latency.calibrate import _cpu_share

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


class Visit(NamedTuple):
    """A visit to a model: the predictions from its calls, and the milliseconds of its runs in between.

    Attributes:
        alone: prediction from the times of this visit alone.
        pooled: prediction from the medians of all visits so far, as of a table that is calibrated again.
        runs: measured runs.
    """

    alone: float
    pooled: float
    runs: list[Run]


class Subject:
    """A model, its predictions in milliseconds, and its measured runs, one list per visit."""

    def __init__(self, name: str, model: nn.Module, x: torch.Tensor) -> None:
        self.name, self.model, self.x = name, model.eval(), x
        self.stats = Statistics(self.model, x)
        self.grid = 0.0
        self.forwards: list[Visit] = []
        self.steps: list[Visit] = []
        self.by_default: list[Run] = []  # with the default settings of the C library
        self.faults: list[int] = []  # of the same runs

    def forwards_by_default(self, times: int) -> None:
        """Time forwards after two that do not count, and their page faults."""
        before = minor_faults()
        with torch.no_grad():
            self.by_default = [timed(lambda: self.model(self.x)) for _ in range(times + 2)][2:]
        self.faults.append((minor_faults() - before) // (times + 2))

    def visit(self, tables: Path, *, backward: bool) -> None:
        """Measure the calls of the model for the tables in a folder, and the model itself between their rounds."""
        os.environ["MODELSUMMARY_CACHE"] = str(tables)
        runs: list[Run] = []
        run = self._step if backward else self._forward

        def measure() -> None:
            run()  # brings the model back into the caches, and its memory into the state that runs leave behind
            runs.append(timed(run))

        with between_rounds(measure):
            self.stats.calibrate(**step_of(backward), again=True)
        pooled = self.stats.estimate_latency(**step_of(backward))
        with only_latest_visit(tables):
            alone = self.stats.estimate_latency(**step_of(backward))
        (self.steps if backward else self.forwards).append(Visit(alone, pooled, runs))

    def _forward(self) -> None:
        with torch.no_grad():
            self.model(self.x)

    def _step(self) -> None:
        with torch.enable_grad():
            scalar(self.model(self.x)).backward()
        self.model.zero_grad(set_to_none=True)


def scalar(output: Any) -> torch.Tensor:
    """The sum of the first tensor of a result: a loss that costs nothing."""
    tensor = output if isinstance(output, torch.Tensor) else output[0]
    return tensor.sum()


def step_of(backward: bool) -> dict[str, Any]:
    """The arguments of a prediction."""
    return {"backward": True, "loss": scalar} if backward else {}


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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", type=int, default=3, help="of a model with the C library's defaults")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--backward", type=int, default=0, help="also forward + backward, in so many rounds")
    parser.add_argument("--filter", default="")
    parser.add_argument("--skip-grid", action="store_true", help="the standard grid, which takes a minute")
    parser.add_argument(
        "--cpu-time", action="store_true", help="of this thread counts: for one thread, on a busy machine"
    )
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--save", type=Path, help="folder for all runs and tables")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    if options.threads:
        torch.set_num_threads(options.threads)
    chosen = [case for case in cases() if options.filter in case[0]][: options.models]
    shares = [_cpu_share()]
    subjects = [made for case in chosen for batch in options.batches for made in subject_of(*case, batch)]
    for subject in subjects:
        subject.forwards_by_default(options.runs)
    with tempfile.TemporaryDirectory() as folder:
        grid = Path(folder) / "grid"
        os.environ["MODELSUMMARY_CACHE"] = str(grid)
        assert cache_folder() == grid
        if not options.skip_grid:
            print(calibrate_grid(torch.device("cpu")), flush=True)
            for subject in subjects:
                subject.grid = subject.stats.estimate_latency()
        for number in range(options.rounds):
            for backward in (False, True) if number < options.backward else (False,):
                begin = time.perf_counter()
                shares.append(_cpu_share())
                for subject in subjects:
                    subject.visit(Path(folder) / ("steps" if backward else "forwards"), backward=backward)
                print(f"round {number + 1}: {time.perf_counter() - begin:.0f} s", flush=True)
            report(subjects, shares, options)
            if options.save:
                save(subjects, Path(folder), options.save)
    by_model(subjects, options)


def subject_of(
    name: str, make: Callable[[], nn.Module], inputs: Callable[[int], torch.Tensor], batch: int
) -> list[Subject]:
    """A model with its input; none if it cannot be followed on shapes."""
    try:
        return [Subject(f"{name} x {batch}", make(), inputs(batch))]
    except Exception as error:
        print(f"left out: {name} x {batch}: {type(error).__name__}: {str(error)[:100]}")
        return []


def save(subjects: list[Subject], tables: Path, folder: Path) -> None:
    """Write all runs and the tables of kernels into a folder."""
    shutil.copytree(tables, folder, dirs_exist_ok=True)
    runs = [{"name": each.name, "grid": each.grid, "forwards": each.forwards, "steps": each.steps} for each in subjects]
    (folder / "runs.json").write_text(json.dumps(runs))


def repeatability(subjects: list[Subject], *, cpu_time: bool) -> str:
    """Tell by how much two visits of the same model differ."""
    found = []
    for each in subjects:
        medians = [
            statistics.median(run * (share if cpu_time else 1) for run, share in visit.runs) for visit in each.forwards
        ]
        found += [abs(a / b - 1) for a, b in combinations(sorted(medians), 2)]
    if not found:
        return "one visit: no repetition to compare with"
    return f"two visits of a model differ by {statistics.mean(found):.1%} (mean), {max(found):.0%} at most"


def undisturbed(subjects: list[Subject]) -> float:
    """The share of all runs in which no thread lost its core."""
    runs = [share > 0.95 for each in subjects for visit in each.forwards for _, share in visit.runs]
    return sum(runs) / len(runs)


def report(subjects: list[Subject], shares: list[float], options: argparse.Namespace) -> None:
    """Print the errors of all models."""

    def time_of(visit: Visit) -> float:
        return typical(visit.runs, cpu_time=options.cpu_time)

    def pooled(visits: list[Visit]) -> float:
        return statistics.median(map(time_of, visits))

    print(
        f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}; a core was free"
        f" {min(shares):.0%} to {max(shares):.0%} of the time; {undisturbed(subjects):.0%} of the runs were undisturbed"
    )
    print(repeatability(subjects, cpu_time=options.cpu_time))
    measured = [pooled(each.forwards) for each in subjects]
    lines = []
    for what, all_visits in (
        ("forward", [each.forwards for each in subjects]),
        ("forward + backward", [each.steps for each in subjects]),
    ):
        if not all_visits[0]:
            continue
        each_visit = [visit for visits in all_visits for visit in visits]
        lines.append(
            summary(
                f"own calls, {what}", [visit.alone for visit in each_visit], [time_of(visit) for visit in each_visit]
            )
        )
        if len(all_visits[0]) > 1:
            real = [pooled(visits) for visits in all_visits]
            lines.append(summary(f"own calls, {what}, all visits", [visits[-1].pooled for visits in all_visits], real))
            later = [(visits[0].alone, time_of(visit)) for visits in all_visits for visit in visits[1:]]
            lines.append(summary(f"own calls, {what}, minutes later", *map(list, zip(*later, strict=True))))
    if subjects[0].grid:
        lines.append(summary("standard grid, forward", [each.grid for each in subjects], measured))
    by_default = [typical(each.by_default, cpu_time=options.cpu_time) for each in subjects]
    pooled_forwards = [each.forwards[-1].pooled for each in subjects]
    lines.append(summary("own calls, forward, glibc by default", pooled_forwards, by_default))
    headers = ["table of kernels", "mean error", "bias", "within 10 %", "within 20 %", "Kendall's tau"]
    print(tabulate(lines, headers, tablefmt="github", disable_numparse=True), flush=True)


def by_model(subjects: list[Subject], options: argparse.Namespace) -> None:
    """Print predicted over measured times of each visit to each model, and draw the picture."""

    def ratios(visits: list[Visit]) -> str:
        return ", ".join(f"{visit.alone / typical(visit.runs, cpu_time=options.cpu_time):.3f}" for visit in visits)

    measured = [
        statistics.median(typical(visit.runs, cpu_time=options.cpu_time) for visit in each.forwards)
        for each in subjects
    ]
    headers = ["model", "measured (ms)", "own calls", "grid", "step", "by default (ms)", "its page faults"]
    rows = [
        [
            each.name,
            f"{real:.2f}",
            ratios(each.forwards),
            f"{each.grid / real:.3f}",
            ratios(each.steps),
            f"{typical(each.by_default, cpu_time=options.cpu_time):.2f}",
            f"{max(each.faults):,}",
        ]
        for each, real in zip(subjects, measured, strict=True)
    ]
    print(tabulate(rows, headers, tablefmt="github", disable_numparse=True))
    if options.plot:
        draw(subjects, measured, options.plot)


def draw(subjects: list[Subject], measured: list[float], path: Path) -> None:
    """Predicted against measured."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 6), layout="constrained")
    predicted = {"own calls": [each.forwards[-1].pooled for each in subjects], "grid": [each.grid for each in subjects]}
    for (label, values), marker in zip(predicted.items(), "ox", strict=True):
        axes.scatter(measured, values, marker=marker, label=label, alpha=0.8)
    ends = [0.8 * min(measured), 1.25 * max(measured)]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="measured (ms)", ylabel="predicted (ms)")
    axes.legend(title="table of kernels", frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    main()
