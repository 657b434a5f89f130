"""Predict training iterations on one node of A100, and print how far off they are by kind of parallelism.

    python benchmarks/cluster_node.py DATA_FOLDER [--every 10] [--host-us 26]

``DATA_FOLDER`` holds 1,440 iterations of GPT-like models (Megatron-DeepSpeed, half precision, recomputation, 1F1B) on
up to 8 A100 with NVLink: vTrain, MICRO 2024. The kernels' efficiency on an A100 is fitted to its runs without tensor
and pipeline parallelism (``benchmarks/fit_kernels.py``).

The small models among them wait for the host. ``--host-us`` sets the time that it takes per operator. The second table
has the error of every second row for several times: choose one, and see the error of the other rows.
"""

from __future__ import annotations

import argparse
import csv
import warnings
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch
from cluster_models import gpt
from cluster_runs import MEGATRON
from tabulate import tabulate

from modelsummary import Statistics
from modelsummary.cluster import Cluster, Plan, StepModel, StepSimulator

HOSTS = (8, 20, 30, 40, 50, 60, 70, 80)  # microseconds per operator
NAMES = "gpus batch micro width heads layers length tensor data pipeline".split()


def main() -> None:
    """Print the ratio of predicted and measured seconds for each kind of parallelism."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the measurements")
    parser.add_argument("--every", type=int, default=10, help="take every so many rows")
    parser.add_argument("--host-us", type=float, help="microseconds of the host per operator")
    options = parser.parse_args()
    host = None if options.host_us is None else options.host_us * 1e-6
    warnings.filterwarnings("ignore")
    with open(options.folder / "training_runs" / "a100_single_node.csv", encoding="utf-8-sig") as file:
        rows = list(csv.reader(file))[1 :: options.every]
    cluster = Cluster.preset("DGX A100")
    models: dict[tuple[int, ...], StepModel] = {}
    ratios: dict[str, list[float]] = defaultdict(list)
    by_host: dict[tuple[int, int], list[float]] = defaultdict(list)
    for number, row in enumerate(rows):
        run = dict(zip(NAMES, map(int, row[:10]), strict=True))
        key = run["layers"], run["width"], run["heads"]
        if key not in models:
            ids = torch.zeros(1, run["length"], dtype=torch.long, device="meta")
            stats = Statistics(gpt(*key, length=run["length"]), ids)
            models[key] = StepModel(stats.live, stats.root, MEGATRON)
        plan = Plan(
            tensor=run["tensor"],
            pipeline=run["pipeline"],
            data=run["data"],
            micro_batch=run["micro"],
            checkpoint="every",
        )

        def ratio_with(host_seconds: float | None, model=models[key], plan=plan, run=run, row=row) -> float:
            model.recipe = replace(MEGATRON, host_seconds=host_seconds)
            items = StepSimulator(model, cluster, run["batch"], run["length"]).items(plan)
            return items.seconds() / (float(row[10]) * 1e-3)

        for each in HOSTS:
            by_host[each, number % 2].append(abs(ratio_with(each * 1e-6) - 1))
        ratio = ratio_with(host)
        ratios["all"].append(ratio)
        ratios[f"tensor {plan.tensor}, data {plan.batch_ranks}, pipeline {plan.pipeline}"].append(ratio)
        ratios[f"width {run['width']}, micro-batch {run['micro']}"].append(ratio)
    table = [
        [name, len(own), sum(own) / len(own), sum(abs(each - 1) for each in own) / len(own)]
        for name, own in sorted(ratios.items())
    ]
    print(tabulate(table, ["runs", "number", "mean ratio", "mean error"], floatfmt=".3f", tablefmt="github"))
    errors = [[each, *(sum(own) / len(own) for own in (by_host[each, 0], by_host[each, 1]))] for each in HOSTS]
    print(tabulate(errors, ["host (us)", "error of even rows", "of odd rows"], floatfmt=".3f", tablefmt="github"))


if __name__ == "__main__":
    main()
