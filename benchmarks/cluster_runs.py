"""Predict published training runs and print how far off the predictions are: seconds, and the peak of a rank.

    python benchmarks/cluster_runs.py [--data FOLDER] [--only TEXT] [--causes] [--write]
    python benchmarks/cluster_runs.py --memory

The models are plain modules on meta. Nothing of the prediction is fitted to these runs. ``cluster_blind.py`` and
``cluster_mixtures.py`` have further runs, and ``cluster_data.py`` the rows of a folder of measurements. ``--write``
stores the ratios of all tables in the package, where ``StepEstimate.error`` takes them from, and writes the figures to
``CLUSTER.md``, with the errors that are left when a cluster is calibrated with one, or with five, runs of a table. The
errors of each table go into ``docs/cluster.md``, too.

Runs that are held out do not take part when a mechanism is chosen; their errors are printed apart. A hash of what a
run is decides, about half of each table and one table in four as a whole: ``Run.is_held_out``.

- Megatron-LM 2021: table 1 of arXiv:2104.04473, with the micro-batches and stages in ``examples/sc21/run_table_1.sh``
  of NVIDIA/Megatron-LM. Achieved FLOP/s become seconds with the paper's own formula, which counts recomputation.
- Korthikanti 2022: table 5 of arXiv:2205.05198, with the configurations of its table 3.
- Llama 3 405B: table 4 of arXiv:2407.21783. The paper does not say how it counts FLOPs; here attention counts causally,
  which is the only count under which the run with sequences of 131,072 tokens stays below the peak.
- Memory: figures 1 and 7 of arXiv:2205.05198, as GiB and shares that Calculon (SC 2023) read from them.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from cluster_models import gpt, llama, token_loss
from latency_page import markdown_table, replaced
from tabulate import tabulate
from torch import nn

import modelsummary
from modelsummary import Statistics
from modelsummary.cluster import Cluster, Plan, Recipe, StepEstimate, StepModel
from modelsummary.cluster.pipeline import in_flight
from modelsummary.cluster.published_errors import Case, PublishedTable, published_tables
from modelsummary.cluster.weights import Weights

MEGATRON = Recipe(
    precision=torch.float16,
    gradient_dtype=torch.float16,
    kernels="fused",
    loss=token_loss,
    overlap_gradients=False,
    share_messages=True,
    sequence="megatron",
)
# The 18 bytes per parameter of the paper's figure 1 hold gradients in float32.
KORTHIKANTI = replace(MEGATRON, gradient_dtype=torch.float32, overlap_tensor=True)
LLAMA = Recipe(precision=torch.bfloat16, loss=token_loss, sequence="megatron")

DETAILS, PAGE = Path(__file__).with_name("CLUSTER.md"), Path(__file__).parents[1] / "docs" / "cluster.md"
# Numbers of runs to calibrate with, how often they are drawn, and ratios after a calibration that are stored.
CALIBRATIONS, DRAWS, KEPT = (1, 5), 5, 40


class Run(NamedTuple):
    """A published run.

    Attributes:
        table: of its source.
        name: of the run.
        model, plan, cluster, batch, sequence, recipe: what ran.
        seconds: measured, of a step.
        peak_bytes: measured, of the fullest rank; None: not published.
        rounds: how often a step repeats forwards and backwards of the batch.
    """

    table: str
    name: str
    model: nn.Module
    plan: Plan
    cluster: Cluster
    batch: int
    sequence: int
    recipe: Recipe
    seconds: float
    peak_bytes: float | None = None
    rounds: int = 1

    @property
    def is_held_out(self) -> bool:
        """Whether no mechanism was chosen by this run: by a hash of its table, or of the table and what ran."""
        identity = f"{self.table}, {self.name}, {self.plan.describe()}, {self.batch} x {self.sequence}"
        return _hash(self.table) % 4 == 0 or _hash(identity) % 2 == 0


def _hash(text: str) -> int:
    return sha256(text.encode()).digest()[0]


def megatron() -> Iterator[Run]:
    """Table 1 of Narayanan et al. 2021."""
    rows = [  # name, heads, width, layers, tensor, pipeline, GPUs, batch, teraFLOP/s, micro-batch, virtual stages
        ("1.7B", 24, 2304, 24, 1, 1, 32, 512, 137, 16, 1),
        ("3.6B", 32, 3072, 30, 2, 1, 64, 512, 138, 16, 1),
        ("7.5B", 32, 4096, 36, 4, 1, 128, 512, 142, 16, 1),
        ("18.4B", 48, 6144, 40, 8, 1, 256, 1024, 135, 8, 1),
        ("39.1B", 64, 8192, 48, 8, 2, 512, 1536, 138, 4, 1),
        ("76.1B", 80, 10240, 60, 8, 4, 1024, 1792, 140, 2, 3),
        ("145.6B", 96, 12288, 80, 8, 8, 1536, 2304, 148, 2, 2),
        ("310.1B", 128, 16384, 96, 8, 16, 1920, 2160, 155, 1, 2),
        ("529.6B", 128, 20480, 105, 8, 35, 2520, 2520, 163, 1, 3),
        ("1008B", 160, 25600, 128, 8, 64, 3072, 3072, 163, 1, 1),
    ]
    s, v = 2048, 51200
    for name, heads, h, layers, t, p, gpus, batch, rate, micro, virtual in rows:
        flops = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
        plan = Plan(
            tensor=t,
            pipeline=p,
            virtual_stages=virtual,
            data=gpus // (t * p),
            micro_batch=micro,
            checkpoint="every",
            schedule="interleaved1f1b" if virtual > 1 else "1f1b",
        )
        cluster = Cluster.preset("DGX A100", nodes=gpus // 8)
        seconds = flops / (gpus * rate * 1e12)
        yield Run("Megatron-LM 2021", name, gpt(layers, h, heads), plan, cluster, batch, s, MEGATRON, seconds)


def korthikanti() -> Iterator[Run]:
    """Table 5 of Korthikanti et al. 2022."""
    rows = [  # name, heads, width, layers, pipeline, virtual stages, batch, micro-batch, seconds
        ("22B", 64, 6144, 48, 1, 1, 4, 4, 1.42, 1.10),
        ("175B", 96, 12288, 96, 8, 3, 64, 1, 18.13, 13.75),
        ("530B", 128, 20480, 105, 35, 3, 280, 1, 49.05, 37.83),
        ("1T", 160, 25600, 128, 64, 1, 512, 1, 94.42, 71.49),
    ]
    for name, heads, width, layers, p, virtual, batch, micro, full, selective in rows:
        model = gpt(layers, width, heads)
        for checkpoint, sequence, seconds in (("every", False, full), ("selective", True, selective)):
            plan = Plan(
                tensor=8,
                sequence=sequence,
                pipeline=p,
                virtual_stages=virtual,
                micro_batch=micro,
                checkpoint=checkpoint,
                schedule="interleaved1f1b" if virtual > 1 else "1f1b",
            )
            cluster = Cluster.preset("DGX A100", nodes=p)
            yield Run(
                "Korthikanti 2022",
                f"{name} {'full' if checkpoint == 'every' else checkpoint}",
                model,
                plan,
                cluster,
                batch,
                2048,
                KORTHIKANTI,
                seconds,
            )


def llama_405b() -> Iterator[Run]:
    """Table 4 of the Llama 3 paper."""
    layers, width = 126, 16384
    model = llama(layers, width, 128, 8, 53248)
    params = sum(each.numel() for each in model.parameters())
    rows = [  # GPUs, context, data, sequence, samples of a copy, teraFLOP/s
        (8192, 1, 64, 8192, 32, 430),
        (16384, 1, 128, 8192, 16, 400),
        (16384, 16, 8, 131072, 16, 380),
    ]
    for gpus, context, data, s, samples, rate in rows:
        batch = samples * data
        flops = batch * s * (6 * params + 6 * layers * width * s)
        plan = Plan(
            tensor=8,
            sequence=True,
            context=context,
            pipeline=16,
            virtual_stages=8,
            shard=data,
            sharded="gradients",
            micro_batch=1,
            schedule="interleaved1f1b",
        )
        cluster = Cluster.preset("DGX H100", nodes=gpus // 8)
        name = f"{gpus:,} GPUs, {s // 1024}k tokens"
        yield Run("Llama 3 405B", name, model, plan, cluster, batch, s, LLAMA, flops / (gpus * rate * 1e12))


# Figure 1 of arXiv:2205.05198: GiB of weights and optimizer, of activations, and of activations with both techniques:
# sequence parallelism and selective recomputation. Figure 7: activations as a share of tensor parallelism alone.
FIGURE_1 = {
    "22B": (45.5625, 59.25, 9.5625),
    "175B": (45.5625, 66.84375, 12.3515625),
    "530B": (31.640625, 114.0234375, 23.076171875),
    "1T": (32.958984375, 131.25, 26.5625),
}
FIGURE_7 = {
    "22B": (66.84, 49.42, 16.18, 7.64),
    "175B": (62.04, 56.53, 18.49, 8.71),
    "530B": (58.31, 62.04, 20.27, 9.42),
    "1T": (58.31, 62.04, 20.27, 9.42),
}


def memory_table() -> list[list[object]]:
    """Return predicted and published bytes of blocks, of the first rank of the pipeline."""
    shapes = {"22B": (48, 6144, 64, 1, 1, 4), "175B": (96, 12288, 96, 8, 3, 1)}
    shapes |= {"530B": (105, 20480, 128, 35, 3, 1), "1T": (128, 25600, 160, 64, 1, 1)}
    rows: list[list[object]] = []
    for name, (layers, width, heads, p, virtual, micro) in shapes.items():
        ids = torch.zeros(1, 2048, dtype=torch.long, device="meta")
        stats = Statistics(gpt(layers, width, heads), ids)
        model = StepModel(stats.live, stats.root, KORTHIKANTI)
        one, shared = (
            model.parts(Plan(tensor=8, sequence=each, micro_batch=micro))["blocks.0"] for each in (False, True)
        )
        kept = {
            "tensor": one.kept_bytes,
            "sequence": shared.kept_bytes,
            "selective": one.kept_bytes - one.core_bytes,
            "both": shared.kept_bytes - shared.core_bytes,
            "full": one.entered_bytes,
        }
        schedule = "interleaved1f1b" if virtual > 1 else "1f1b"
        blocks = layers // (p * virtual) * max(map(sum, in_flight(schedule, p, virtual, 8 * p, 0)))
        weights, most, least = FIGURE_1[name]
        state = layers // p * Weights.of(one.weights.values()).elements * 18 / 2**30
        pairs = [("fig. 1, weights and optimizer (GiB)", weights, state)]
        pairs += [("fig. 1, activations (GiB)", most, blocks * kept["tensor"] / 2**30)]
        pairs += [("fig. 1, activations, both techniques (GiB)", least, blocks * kept["both"] / 2**30)]
        for published, kind in zip(FIGURE_7[name], ("sequence", "selective", "both", "full"), strict=True):
            pairs.append((f"fig. 7, {kind} (%)", published, 100 * kept[kind] / kept["tensor"]))
        rows += [[name, what, published, own, own / published] for what, published, own in pairs]
    return rows


@lru_cache(maxsize=1)
def statistics_of(model: nn.Module, length: int) -> Statistics:
    """Return the statistics of a model, which several runs in a row may have."""
    return Statistics(model, torch.zeros(1, length, dtype=torch.long, device="meta"))


def predicted(run: Run) -> StepEstimate:
    """Return the estimate of a run."""
    stats = statistics_of(run.model, min(run.sequence, 2048))
    return stats.simulate(run.plan, run.cluster, run.batch, sequence_length=run.sequence, recipe=run.recipe)


def seconds_of(run: Run, step: StepEstimate) -> float:
    """Return the predicted seconds of a step; what happens once is not repeated by its rounds."""
    once = step.seconds_by_cause["gradients"] + step.seconds_by_cause["optimizer"]
    return run.rounds * (step.step_seconds - once) + once


def with_row(details: str, run: Run, step: StepEstimate) -> str:
    """Return the text of CLUSTER.md with the figures of a run in its row; large tables have no rows there.

    The first figure is the measured seconds, the last two are the predicted ones and the ratio.
    """
    label = f"| {run.table}, {run.name} |"
    if label not in details:
        return details
    begin = details.index(label)
    end = details.index("\n", begin)
    name, _, *between, _, _ = details[begin:end].split(" | ")
    seconds = seconds_of(run, step)
    cells = [name, f"{run.seconds:.2f}", *between, f"{seconds:.2f}", f"{seconds / run.seconds:.3f} |"]
    return details[:begin] + " | ".join(cells) + details[end:]


def errors_table(stored: Sequence[PublishedTable]) -> str:
    """Return the table of docs/cluster.md: the errors of each published table, from the ratios in the package."""
    rows = [_errors_row(name, list(tables)) for name, tables in groupby(stored, key=attrgetter("name"))]
    headers = ["published runs", "of", "runs", "error", "bias", "worst", "error of the peak"]
    return markdown_table(headers, [*rows, ["all", "", *_errors_row("", stored)[2:]]])


def _errors_row(name: str, tables: Sequence[PublishedTable]) -> list[str]:
    cases = [table.case for table in tables]
    kinds = [", ".join(dict.fromkeys(case.generation.title() for case in cases))]
    kinds += dict.fromkeys(case.kernels for case in cases)
    kinds += ["FSDP"] * any(case.sharded == "parameters" for case in cases)
    kinds += ["experts"] * any(case.experts for case in cases)
    seconds, peaks = (
        [ratio for table in tables for ratio in ratios(table)]
        for ratios in (attrgetter("seconds"), attrgetter("peaks"))
    )
    return [
        name,
        "; ".join(kinds),
        str(len(seconds)),
        mean_error(seconds),
        bias(seconds),
        worst(seconds),
        mean_error(peaks),
    ]


def tables(data: Path | None) -> Iterator[Run]:
    """Yield the runs of all tables."""
    import cluster_blind
    import cluster_mixtures

    yield from (*megatron(), *korthikanti(), *llama_405b())
    yield from (*cluster_blind.torchtitan(), *cluster_blind.foundry(), *cluster_blind.bridge())
    yield from (*cluster_mixtures.megatron_core(), *cluster_mixtures.automodel(), *cluster_mixtures.bridge())
    if data is not None:
        import cluster_data

        for table in (cluster_data.vtrain, cluster_data.foundry, cluster_data.simumax, cluster_data.nanotron):
            yield from table(data)


class Result(NamedTuple):
    """A run with its prediction."""

    run: Run
    step: StepEstimate

    @property
    def ratio(self) -> float:
        """Predicted / measured seconds."""
        return seconds_of(self.run, self.step) / self.run.seconds

    @property
    def peak_ratio(self) -> float | None:
        """Predicted / measured bytes of the fullest rank; None: not published."""
        return None if self.run.peak_bytes is None else self.step.memory_bytes / self.run.peak_bytes


def mean_error(ratios: Sequence[float]) -> str:
    """Return the mean error of ratios as text; an empty text without ratios."""
    return f"{100 * sum(abs(ratio - 1) for ratio in ratios) / len(ratios):.1f} %" if ratios else ""


def bias(ratios: Sequence[float]) -> str:
    """Return the mean of ratios, minus 1, as text; an empty text without ratios."""
    return f"{100 * (sum(ratios) / len(ratios) - 1):+.1f} %" if ratios else ""


def worst(ratios: Sequence[float]) -> str:
    """Return the largest error of ratios as text."""
    return f"{100 * max(abs(ratio - 1) for ratio in ratios):.1f} %"


def summary_row(name: str, results: Sequence[Result], after: Mapping[int, Sequence[float]]) -> list[str]:
    """Return the errors of a table: of its seconds, of its peaks, and of its seconds after calibrations.

    Args:
        name: of the table.
        results: its runs.
        after: number of runs that a cluster was calibrated with -> ratios of the others.
    """
    ratios = [result.ratio for result in results]
    held_out, shown = ([result.ratio for result in results if result.run.is_held_out is flag] for flag in (True, False))
    peaks = [result.peak_ratio for result in results if result.peak_ratio is not None]
    of_seconds = [mean_error(ratios), bias(ratios), worst(ratios), mean_error(shown), mean_error(held_out)]
    calibrations = [mean_error(after.get(steps, ())) for steps in CALIBRATIONS]
    unfit = sum(not result.step.fits for result in results)
    return [name, str(len(results)), *of_seconds, mean_error(peaks), bias(peaks), *calibrations, str(unfit or "")]


def calibrated(results: Sequence[Result], steps: int) -> list[float]:
    """Return predicted / measured seconds of runs after a calibration with others of the table, drawn at random.

    Runs of one kind of device are calibrated together.
    """
    ratios = []
    for device in dict.fromkeys(result.run.cluster.device.name for result in results):
        pool = [result for result in results if result.run.cluster.device.name == device and result.run.rounds == 1]
        for draw in range(DRAWS if len(pool) > steps + 1 else 0):
            chosen = Random(draw).sample(range(len(pool)), steps)
            measured = [(pool[index].step, pool[index].run.seconds, pool[index].run.peak_bytes) for index in chosen]
            factors = pool[chosen[0]].run.cluster.calibrated(measured).factors
            for index, (run, step) in enumerate(pool):
                if index not in chosen:
                    ratios.append(step.on(replace(run.cluster, factors=factors)).step_seconds / run.seconds)
    return ratios


def entries_of(name: str, results: Sequence[Result], after: Mapping[int, Sequence[float]]) -> list[dict[str, object]]:
    """Return the ratios of a table as the package stores them: an entry for each case.

    Args:
        name, results, after: as for ``summary_row``.
    """
    pools: dict[Case, list[Result]] = {}
    for result in results:
        pools.setdefault(result.step.case, []).append(result)
    largest = max(pools.values(), key=len)
    return [
        {
            "name": name,
            "case": case._asdict(),
            "seconds": [round(result.ratio, 3) for result in pool],
            "peaks": [round(result.peak_ratio, 3) for result in pool if result.peak_ratio is not None],
            "calibrated": {
                steps: [round(ratio, 3) for ratio in sorted(ratios)[:: len(ratios) // KEPT + 1]]
                for steps, ratios in after.items()
                if ratios
            }
            if pool is largest
            else {},
        }
        for case, pool in pools.items()
    ]


def write(entries: Sequence[dict[str, object]]) -> None:
    """Store the ratios of all tables in the package."""
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in entries)
    path = Path(modelsummary.__file__).parent / "cluster" / "published_errors.json"
    path.write_text(f'{{"tables": [\n{lines}\n]}}\n', encoding="utf-8")


def main() -> None:
    """Print predicted and measured seconds of each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of measurements with further runs")
    parser.add_argument("--causes", action="store_true", help="print the seconds by cause of each run")
    parser.add_argument("--memory", action="store_true", help="print bytes by technique instead of seconds")
    parser.add_argument("--only", default="", help="runs whose table or name contains this text")
    parser.add_argument("--write", action="store_true", help="store ratios and write pages; needs all tables")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    if options.memory:
        table = memory_table()
        print(
            tabulate(table, ["Model", "Figure", "Published", "Predicted", "Ratio"], floatfmt=".3f", tablefmt="github")
        )
        off = [abs(float(str(row[-1])) - 1) for row in table]
        print(f"{len(off)} figures: mean error {sum(off) / len(off):.2%}, worst {max(off):.2%}")
        return
    rows, summary, entries, every = [], [], [], []
    details = DETAILS.read_text(encoding="utf-8")
    every_after: dict[int, list[float]] = {steps: [] for steps in CALIBRATIONS}
    runs = (run for run in tables(options.data) if options.only in f"{run.table} {run.name}")
    for name, of_table in groupby(runs, key=attrgetter("table")):
        results = [Result(run, predicted(run)) for run in of_table]
        after = {steps: calibrated(results, steps) for steps in CALIBRATIONS} if options.write else {}
        summary.append(summary_row(name, results, after))
        every += results
        for steps, ratios in after.items():
            every_after[steps] += ratios
        entries += entries_of(name, results, after) if options.write else []
        for result in results:
            run, step = result
            peaks = [None if nbytes is None else nbytes / 2**30 for nbytes in (run.peak_bytes, step.memory_bytes)]
            seconds = run.seconds, seconds_of(run, step), result.ratio
            marks = ["" if step.fits else "no", "held out" if run.is_held_out else ""]
            rows.append([name, run.name, *seconds, *peaks, result.peak_ratio, *marks])
            details = with_row(details, run, step)
            if options.causes:
                print(run.name, {cause: round(value, 4) for cause, value in step.seconds_by_cause.items() if value})
    headers = [
        "Table",
        "Run",
        "Measured (s)",
        "Predicted (s)",
        "Ratio",
        "Peak (GiB)",
        "Predicted (GiB)",
        "Ratio",
        "Fits",
        "",
    ]
    floats = ("", "", ".2f", ".2f", ".3f", ".1f", ".1f", ".3f", "", "")
    print(tabulate(rows, headers, floatfmt=floats, tablefmt="github"))
    summary.append(summary_row(f"all {len(every)} runs", every, every_after))
    headers = ["table", "runs", "error", "bias", "worst", "shown", "held out", "peak: error", "bias"]
    headers += [*(f"after {steps}" for steps in CALIBRATIONS), "do not fit"]
    print(tabulate(summary, headers, tablefmt="github", disable_numparse=True))
    if options.write:
        write(entries)
        DETAILS.write_text(replaced(details, headers[0], markdown_table(headers, summary)), encoding="utf-8")
        published_tables.cache_clear()
        page = replaced(PAGE.read_text(encoding="utf-8"), "published runs", errors_table(published_tables()))
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
