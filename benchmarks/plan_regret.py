"""Choose among published plans of one model: how much slower is the chosen one than the best?

    python benchmarks/plan_regret.py DATA_FOLDER [--only TEXT] [--groups COUNT] [--docs]

A group is the plans that a source measured for one model on the same devices, with the same batch and sequence; of
SimuMax, with the same number of micro-batches. Regret is the measured time of a sample under the plan that is predicted
to be the fastest, over the time under the fastest one, minus 1. Kendall's tau compares the order of the predictions
with the order of the measurements, over pairs of plans of a group; a tie counts as neither. The anchor predicts a
constant share of the peak for what the devices compute, with recomputation: among plans that it cannot tell apart, the
mean over them counts.

``DATA_FOLDER`` is the one of ``cluster_data.py``; ``a100_single_node.csv`` has iterations of vTrain on one node, whose
plans on eight devices are drawn by their names. nanotron published the best plan of each size alone, and
llm-foundry one plan of each.
"""

from __future__ import annotations

import argparse
import csv
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from cluster_data import model_of, simumax, vtrain
from cluster_runs import MEGATRON, Run, predicted
from latency_page import markdown_table, replaced
from tabulate import tabulate

from modelsummary.cluster import Cluster, Plan

PAGE = Path(__file__).parents[1] / "docs" / "cluster.md"
HEADER = "choosing among measured plans"
_LARGE = 32  # samples of a step, below which Python limits the layers of vTrain's smaller models


class Choice(NamedTuple):
    """A plan of a group, with seconds per sample: measured, predicted, and by a constant share of the peak."""

    measured: float
    predicted: float
    anchor: float


class Group(NamedTuple):
    """The plans that a source measured for one model on the same devices."""

    table: str
    runs: tuple[Run, ...]


def regret(choices: Sequence[Choice], by: str) -> float:
    """Return by how much the plan that is first by an attribute is slower than the fastest; the mean over ties.

    >>> regret([Choice(2.0, 1.0, 5.0), Choice(1.6, 1.1, 5.0)], "predicted")
    0.25
    >>> regret([Choice(2.0, 1.0, 5.0), Choice(1.6, 1.1, 5.0)], "anchor")
    0.125
    """
    least = min(getattr(choice, by) for choice in choices)
    first = [choice.measured for choice in choices if getattr(choice, by) <= least * (1 + 1e-9)]
    return sum(first) / len(first) / min(choice.measured for choice in choices) - 1


def tau(choices: Sequence[Choice], by: str) -> float:
    """Return Kendall's tau of an attribute and the measured seconds: pairs in the same order minus the others.

    >>> choices = [Choice(1, 1, 1), Choice(2, 3, 1), Choice(3, 2, 1)]
    >>> tau(choices, "predicted"), tau(choices, "anchor")
    (0.3333333333333333, 0.0)
    """
    signs = [
        _sign(getattr(one, by) - getattr(other, by)) * _sign(one.measured - other.measured)
        for position, one in enumerate(choices)
        for other in choices[:position]
    ]
    return sum(signs) / len(signs)


def _sign(difference: float) -> int:
    return (difference > 0) - (difference < 0)


def node_runs(folder: Path, gpus: int = 8) -> Iterator[Run]:
    """Yield iterations of vTrain on one node, Megatron-DeepSpeed with full recomputation."""
    names = "gpus batch micro width heads layers length tensor data pipeline".split()
    with open(folder / "training_runs" / "a100_single_node.csv", encoding="utf-8-sig") as file:
        rows = list(csv.reader(file))[1:]
    for row in sorted(rows, key=lambda row: list(map(float, row[1:7]))):
        sizes = dict(zip(names, map(int, row[:10]), strict=True))
        if sizes["gpus"] == gpus:
            plan = Plan(
                tensor=sizes["tensor"],
                data=sizes["data"],
                pipeline=sizes["pipeline"],
                micro_batch=sizes["micro"],
                checkpoint="every",
            )
            model = model_of("gpt", sizes["layers"], sizes["width"], sizes["heads"])
            cluster = Cluster.preset("DGX A100", devices_per_node=gpus)
            batch, length, seconds = sizes["batch"], sizes["length"], float(row[10]) * 1e-3
            samples = f"{_LARGE} samples or more" if batch >= _LARGE else f"fewer than {_LARGE} samples"
            table, name = f"vTrain, one node, {samples}", "-".join(row[:7])
            yield Run(table, name, model, plan, cluster, batch, length, MEGATRON, seconds)


def groups_of(runs: Iterator[Run]) -> list[Group]:
    """Return the groups with two plans or more."""
    by_work: dict[object, list[Run]] = {}
    for run in runs:
        batch = run.batch if run.table != "SimuMax, Llama" else run.batch // run.plan.copies
        elements = sum(parameter.numel() for parameter in run.model.parameters())
        by_work.setdefault((run.table, elements, run.cluster.devices, batch, run.sequence), []).append(run)
    groups = [Group(group[0].table, tuple(group)) for group in by_work.values()]
    return [group for group in groups if len({run.plan for run in group.runs}) > 1]


def choices_of(group: Group) -> list[Choice]:
    """Return the predicted plans of a group."""
    choices = []
    for run in group.runs:
        step = predicted(run)
        share = step.hardware_flops / (run.plan.devices * step.peak_flops)
        choices.append(Choice(run.seconds / run.batch, step.step_seconds / run.batch, share / run.batch))
    return choices


def row_of(table: str, groups: Sequence[Sequence[Choice]]) -> list[str]:
    """Return the row of a table: numbers of groups and plans, then regrets and tau of predictions and of the anchor."""
    row = [table, str(len(groups)), str(sum(map(len, groups)))]
    for by in ("predicted", "anchor"):
        regrets = [regret(choices, by) for choices in groups]
        taus = [tau(choices, by) for choices in groups]
        row += [f"{100 * sum(regrets) / len(regrets):.1f} %", f"{100 * max(regrets):.0f} %"]
        row += [f"{sum(taus) / len(taus):.2f}"]
    return row


def main() -> None:
    """Print the table, and write it into the page with ``--docs``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the measurements")
    parser.add_argument("--only", default="", help="tables whose name contains this text")
    parser.add_argument("--groups", type=int, default=16, help="of each table, drawn by their names")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/cluster.md")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    rows = []
    for runs in (vtrain(options.folder), node_runs(options.folder), simumax(options.folder)):
        by_table: dict[str, list[list[Choice]]] = {}
        drawn = sorted(groups_of(runs), key=lambda group: crc32(group.runs[0].name.encode()))[: options.groups]
        for group in drawn:
            if options.only in group.table:
                choices = choices_of(group)
                by_table.setdefault(group.table, []).append(choices)
                figures = f"regret {regret(choices, 'predicted'):.1%}, tau {tau(choices, 'predicted'):.2f}"
                print(f"{group.table}, {group.runs[0].name}: {len(choices)} plans, {figures}", flush=True)
        for table, groups in by_table.items():
            rows.append(row_of(table, groups))
            print(*rows[-1], flush=True)
    headers = [HEADER, "groups", "plans", "regret", "largest", "tau", "regret of a constant share", "largest", "tau"]
    text = tabulate(rows, headers, tablefmt="github", disable_numparse=True)
    print(text)
    if options.docs:
        page = replaced(PAGE.read_text(encoding="utf-8"), HEADER, markdown_table(headers, rows))
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
