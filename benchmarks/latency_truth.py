"""Predicted latency beside the measured one, on this machine, over models of several families and two batch sizes.

    python benchmarks/latency_truth.py [--models 25] [--rounds 3] [--threads 2] [--backward [N]] [--plot FILE]

Three predictions: from the model's own operator calls; from the standard grid alone, which was chosen for no model;
with ``--backward`` also of forward + backward, in N of the rounds. Models take turns, and ``calibrate`` visits the
calls of each model in every round. Meanwhile the model itself runs between rounds of calls, so both see the same fast
and slow seconds of the machine. Of a visit, the lower quartile of a model's runs counts, without runs in which the
process lost its core, where there are others; of the visits, the median, as in the table of kernels. One line compares
predictions from the first visit with the runs of later ones. The grid is measured once, at the beginning.

Predictions leave out page faults, and glibc keeps freed memory while ``calibrate`` measures, as other allocators do.
Forwards before that run as the C library is by default; they have a line of their own.

The first lines say how well the truth repeats itself: the share of a core that busy waiting had, the spread of the
runs, and the difference between two visits of a model. Tables of kernels are made anew in a temporary folder.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from modelsummary import Statistics
from modelsummary.costs.kernel_table import cache_folder
from modelsummary.latency import calibrate_grid, kernel_rounds
from modelsummary.latency.calibrate import _cpu_share
from modelsummary.latency.host_time import minor_faults, preemptions

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


Run = tuple[float, float]  # milliseconds, share of a core


class Subject:
    """A model, its predictions in milliseconds, and its measured runs, one list per visit."""

    def __init__(self, name: str, model: nn.Module, x: torch.Tensor) -> None:
        self.name, self.model, self.x = name, model.eval(), x
        self.stats = Statistics(self.model, x)
        self.predicted: dict[str, float] = {}
        self.rounds: list[list[Run]] = []
        self.steps: list[list[Run]] = []
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
        forwards: list[Run] = []
        steps: list[Run] = []

        def run() -> None:
            with torch.no_grad():
                self.model(self.x)  # brings the model back into the caches
                forwards.append(timed(lambda: self.model(self.x)))
            if backward:
                with torch.enable_grad():
                    steps.append(timed(lambda: scalar(self.model(self.x)).backward()))
                self.model.zero_grad(set_to_none=True)

        with between_rounds(run):
            self.stats.calibrate(**step_of(backward), again=True)
        self.rounds.append(forwards)
        if backward:
            self.steps.append(steps)
        if len(self.rounds) == 1:
            self.predicted["once"] = self.stats.estimate_latency()

    @property
    def runs(self) -> list[Run]:
        """The forwards of all rounds."""
        return [run for each in self.rounds for run in each]


@contextmanager
def between_rounds(run: Callable[[], None]) -> Iterator[None]:
    """Call a function between rounds of operator calls, in about half of the time; collect garbage before."""
    round_of_calls = kernel_rounds._round
    latest = [0.0, 0.0]  # seconds that the function took, and when it ended

    def followed(*args: Any) -> Any:
        found = round_of_calls(*args)
        begin = time.perf_counter()
        if begin - latest[1] >= latest[0]:
            run()
            latest[:] = time.perf_counter() - begin, time.perf_counter()
        return found

    gc.collect()
    gc.disable()
    kernel_rounds._round = followed
    try:
        yield
    finally:
        kernel_rounds._round = round_of_calls
        gc.enable()


def scalar(output: Any) -> torch.Tensor:
    """The sum of the first tensor of a result: a loss that costs nothing."""
    tensor = output if isinstance(output, torch.Tensor) else output[0]
    return tensor.sum()


def timed(run: Callable[[], object]) -> Run:
    """Milliseconds, and the share of a core that this thread had; 0 if another thread of the process lost its core."""
    lost = preemptions()
    cpu, begin = time.thread_time(), time.perf_counter()
    run()
    seconds = time.perf_counter() - begin
    share = (time.thread_time() - cpu) / seconds
    return 1e3 * seconds, 0.0 if torch.get_num_threads() > 1 and preemptions() > lost else share


def typical(runs: list[Run], *, cpu_time: bool = False) -> float:
    """The lower quartile of the runs of a visit that had their core; of their CPU time where that counts."""
    if cpu_time:
        runs = [(run * min(share, 1.0), 1.0) for run, share in runs]
    quiet = [run for run, share in runs if share > 0.95]
    chosen = sorted(quiet if len(quiet) >= 3 else [run for run, _ in runs])
    return chosen[len(chosen) // 4]


def step_of(backward: bool) -> dict[str, Any]:
    """The arguments of a prediction."""
    return {"backward": True, "loss": scalar} if backward else {}


def predict(subjects: list[Subject], what: str, folder: Path, *, backward: bool = False) -> None:
    """Predict each model from the tables in a folder."""
    os.environ["MODELSUMMARY_CACHE"] = str(folder)
    for each in subjects:
        each.predicted[what] = each.stats.estimate_latency(**step_of(backward))


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
    parser.add_argument("--backward", type=int, nargs="?", const=0, help="in so many rounds; without a number in all")
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
    with_steps = spread(options.backward or options.rounds, options.rounds) if options.backward is not None else set()
    subjects = [made for case in chosen for batch in options.batches for made in subject_of(*case, batch)]
    for subject in subjects:
        subject.forwards_by_default(options.runs)
    with tempfile.TemporaryDirectory() as folder:
        grid, tables = Path(folder) / "grid", Path(folder) / "own"
        os.environ["MODELSUMMARY_CACHE"] = str(grid)
        assert cache_folder() == grid
        if not options.skip_grid:
            print(calibrate_grid(torch.device("cpu")), flush=True)
            predict(subjects, "grid", grid)
        for number in range(options.rounds):
            begin = time.perf_counter()
            shares.append(_cpu_share())
            for subject in subjects:
                subject.visit(tables, backward=number in with_steps)
            predict(subjects, "own", tables)
            if any(each.steps for each in subjects):
                predict(subjects, "step", tables, backward=True)
            print(f"round {number + 1}: {time.perf_counter() - begin:.0f} s", flush=True)
            report(subjects, shares, options)
            if options.save:
                save(subjects, Path(folder), options.save)


def spread(count: int, rounds: int) -> set[int]:
    """The numbers of some rounds, evenly spread over all."""
    return {(2 * number + 1) * rounds // (2 * count) for number in range(count)}


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
    runs = [
        {"name": each.name, "predicted": each.predicted, "rounds": each.rounds, "steps": each.steps}
        for each in subjects
    ]
    (folder / "runs.json").write_text(json.dumps(runs))


def repeatability(subjects: list[Subject], *, cpu_time: bool) -> str:
    """Tell by how much two visits of the same model differ."""
    found = []
    for each in subjects:
        medians = [statistics.median(run * (share if cpu_time else 1) for run, share in runs) for runs in each.rounds]
        found += [abs(a / b - 1) for a, b in combinations(sorted(medians), 2)]
    if not found:
        return "one visit: no repetition to compare with"
    return f"two visits of a model differ by {statistics.mean(found):.1%} (mean), {max(found):.0%} at most"


def undisturbed(subjects: list[Subject]) -> float:
    """The share of all runs in which no thread lost its core."""
    runs = [share > 0.95 for each in subjects for _, share in each.runs]
    return sum(runs) / len(runs)


def report(subjects: list[Subject], shares: list[float], options: argparse.Namespace) -> None:
    """Print the tables, and draw the picture."""

    def time_of(rounds: list[list[Run]]) -> float:
        return statistics.median(typical(runs, cpu_time=options.cpu_time) for runs in rounds)

    measured = [time_of(each.rounds) for each in subjects]
    spreads = [statistics.median(run for run, _ in each.runs) / typical(each.runs) - 1 for each in subjects]
    print(
        f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}; a core was free"
        f" {min(shares):.0%} to {max(shares):.0%} of the time; medians of runs lie {statistics.mean(spreads):.0%} above"
        f" their lower quartiles; {undisturbed(subjects):.0%} of the runs were undisturbed"
    )
    print(repeatability(subjects, cpu_time=options.cpu_time))
    known = [
        ("the model's own calls", "own", measured),
        (
            "the model's own calls, visited minutes before",
            "once",
            [time_of(each.rounds[1:] or each.rounds) for each in subjects],
        ),
        ("the standard grid alone", "grid", measured),
        (
            "the model's own calls, forward + backward",
            "step",
            [time_of(each.steps or each.rounds) for each in subjects],
        ),
        ("the model's own calls, glibc by default", "own", [time_of([each.by_default]) for each in subjects]),
    ]
    lines = [
        summary(title, [each.predicted[what] for each in subjects], real)
        for title, what, real in known
        if what in subjects[0].predicted
    ]
    headers = ["table of kernels", "mean error", "bias", "within 10 %", "within 20 %", "Kendall's tau"]
    print(tabulate(lines, headers, tablefmt="github", disable_numparse=True), flush=True)
    if len(subjects[0].rounds) < options.rounds:
        return
    headers = ["model", "measured (ms)", "own / measured", "grid / measured", "by default (ms)", "its page faults"]
    headers += ["step / measured"] if subjects[0].steps else []
    rows = []
    for each, real in zip(subjects, measured, strict=True):
        row = [each.name, f"{real:.2f}", *(f"{each.predicted.get(what, 0.0) / real:.3f}" for what in ("own", "grid"))]
        row += [f"{time_of([each.by_default]):.2f}", f"{max(each.faults):,}"]
        rows.append(row + ([f"{each.predicted['step'] / time_of(each.steps):.3f}"] if each.steps else []))
    print(tabulate(rows, headers, tablefmt="github", disable_numparse=True))
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
