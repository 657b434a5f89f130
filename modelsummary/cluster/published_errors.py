"""How sure the prediction of a step is: the errors that predictions of published runs had.

``published_errors.json`` has the ratios of predicted and measured seconds of each published table, and of predicted and
measured peaks where they are published, with what its runs have in common. ``benchmarks/cluster_runs.py`` writes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from math import sqrt
from operator import eq
from types import MappingProxyType
from typing import NamedTuple

import torch

from modelsummary.cluster.plan import Plan, Recipe
from modelsummary.cluster.topology import Cluster
from modelsummary.file_contents import packaged
from modelsummary.units import number_of, percent

__all__ = ["Case", "PublishedErrors", "PublishedTable", "case_of", "error_of", "published_tables"]

_NEARER = 3  # times that a table counts for each attribute in which it agrees with a step
_INSIDE = (0.1, 0.9)  # quantiles of the ratios that a range lies between, before it is widened
_NORMAL = 1.282  # the last of them of a normal distribution, and of Student's with 1 to 10 degrees of freedom
_STUDENT = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397, 1.383, 1.372)


class Case(NamedTuple):
    """What decides which published tables a step is compared with.

    Attributes:
        generation: architecture of the devices.
        kernels: as in ``Recipe``.
        precision: dtype of the products.
        sharded: ``"parameters"`` under FSDP, else ``"none"``.
        experts: the plan divides experts.
        nodes: ``"one"`` or ``"several"``.
    """

    generation: str = ""
    kernels: str = "compiled"
    precision: str = "bfloat16"
    sharded: str = "none"
    experts: bool = False
    nodes: str = "one"


class PublishedTable(NamedTuple):
    """A table of published runs.

    Attributes:
        name: of its source.
        case: what its runs have in common: a ``Case``, or such a tuple of another room.
        seconds: predicted / measured seconds of each run.
        peaks: predicted / measured bytes of the fullest rank, of the runs that publish them.
        calibrated: number of runs of the table that a cluster was calibrated with -> predicted / measured seconds of
            others.
    """

    name: str
    case: tuple[object, ...]
    seconds: tuple[float, ...]
    peaks: tuple[float, ...] = ()
    calibrated: Mapping[int, tuple[float, ...]] = MappingProxyType({})


class PublishedErrors(NamedTuple):
    """The errors of predictions on published tables, of which the ones that are nearest to a step count most.

    Each attribute of the case in which a table agrees makes it count three times as much. Runs of one source are more
    alike than runs of the next one, so the range is wider than the ratios of few sources are. If each source is left
    out in turn, 84 % of its runs are in the range that the others give, averaged over tables.

    Attributes:
        typical: mean of the absolute predicted / measured - 1.
        bias: mean of predicted / measured - 1; negative if predictions were too fast, or too small.
        low, high: four of five ratios predicted / measured are between them.
        runs: number of runs in the nearest tables.
        tables: names of the nearest tables.

    >>> error = PublishedErrors(0.1, -0.1, 0.8, 1.0, 12, ("some table",))
    >>> error.range(8.0)
    (8.0, 10.0)
    """

    typical: float
    bias: float
    low: float
    high: float
    runs: int
    tables: tuple[str, ...]

    def describe(self) -> str:
        """Return the errors, and the tables that count most, as text.

        >>> PublishedErrors(0.1, -0.1, 0.8, 1.0, 12, ("some table",)).describe()
        'typical error 10.0%, bias -10%, mostly of some table (12 runs)'
        """
        runs = f"{', '.join(self.tables)} ({number_of(self.runs, 'run')})"
        return f"typical error {percent(self.typical)}, bias {100 * self.bias:+.0f}%, mostly of {runs}"

    def why_outside(self, below: str, above: str) -> str:
        """Return why a prediction is outside of its range, as a part of a line; an empty text if it is inside.

        Args:
            below, above: what predictions below, or above, the range are called.

        >>> PublishedErrors(0.1, -0.1, 0.8, 0.9, 12, ("some table",)).why_outside("too fast", "too slow")
        ', not as predicted, as nine of ten predictions were too fast'
        """
        if self.low <= 1 <= self.high:
            return ""
        return f", not as predicted, as nine of ten predictions were {below if self.high < 1 else above}"

    def range(self, value: float) -> tuple[float, float]:
        """Return the range in which the measured value of a prediction is expected, four times of five."""
        return value / self.high, value / self.low


@lru_cache(maxsize=1)
def published_tables() -> tuple[PublishedTable, ...]:
    """Return the published tables with the errors of their predictions.

    >>> sum(len(table.seconds) for table in published_tables() if table.name == "Korthikanti 2022")
    8
    """
    return tuple(
        PublishedTable(
            table["name"],
            Case(**table["case"]),
            tuple(table["seconds"]),
            tuple(table["peaks"]),
            {int(steps): tuple(ratios) for steps, ratios in table["calibrated"].items()},
        )
        for table in packaged("modelsummary.cluster", "published_errors.json")["tables"]
    )


def case_of(plan: Plan, cluster: Cluster, recipe: Recipe, dtype: torch.dtype) -> Case:
    """Return what decides which published tables a step is compared with."""
    return Case(
        generation=cluster.device.generation,
        kernels=recipe.kernels,
        precision=str(dtype).removeprefix("torch."),
        sharded="parameters" if plan.is_fsdp else "none",
        experts=plan.expert > 1,
        nodes="one" if plan.devices <= cluster.devices_per_node else "several",
    )


def error_of(
    case: tuple[object, ...], *, of_peaks: bool = False, steps: int = 0, tables: Sequence[PublishedTable] = ()
) -> PublishedErrors:
    """Return the errors on the published tables that are nearest to a case.

    Args:
        case: of the step.
        of_peaks: of the bytes of the fullest rank, not of the seconds.
        steps: number of measured steps that the cluster is calibrated with.
        tables: published tables. Default: all.

    >>> table = PublishedTable("one", Case("ampere", "eager", "float16", "none", False, "one"), (0.9, 1.2))
    >>> error = error_of(table.case, tables=[table])
    >>> round(error.typical, 3), round(error.bias, 3)
    (0.15, 0.05)
    """
    ratios_of = [
        (table, ratios)
        for table in tables or published_tables()
        if (ratios := _ratios(table, steps, of_peaks=of_peaks))
    ]
    agreement = [sum(map(eq, case, table.case)) for table, _ in ratios_of]
    weighted = [
        (ratio, _NEARER**agreed / len(ratios))
        for (_, ratios), agreed in zip(ratios_of, agreement, strict=True)
        for ratio in ratios
    ]
    total = sum(weight for _, weight in weighted)
    typical = sum(abs(ratio - 1) * weight for ratio, weight in weighted) / total
    bias = sum((ratio - 1) * weight for ratio, weight in weighted) / total
    low, middle, high = (_quantile(weighted, share) for share in (_INSIDE[0], 0.5, _INSIDE[1]))
    wider = _wider(len({_source(table) for table, _ in ratios_of}))
    low, high = (middle * (end / middle) ** wider for end in (low, high))
    nearest = [pair for pair, agreed in zip(ratios_of, agreement, strict=True) if agreed == max(agreement)]
    names = tuple(dict.fromkeys(table.name for table, _ in nearest))
    return PublishedErrors(typical, bias, low, high, sum(len(ratios) for _, ratios in nearest), names)


def _source(table: PublishedTable) -> str:
    """Return the source of a table, which may have several: ``"SimuMax, Llama"`` is one of SimuMax."""
    return table.name.partition(",")[0]


def _wider(sources: int) -> float:
    """Return how much wider, in logarithms, the range of one more source is than the ratios of some.

    A prediction interval: of a normal distribution whose mean and width are known from so many values alone. What a
    single source says of others is not known; it counts as two.

    >>> round(_wider(2), 2), round(_wider(11), 2)  # 3.078 * sqrt(3 / 2) / 1.282, 1.372 * sqrt(12 / 11) / 1.282
    (2.94, 1.12)
    """
    sources = max(sources, 2)
    return _STUDENT[min(sources - 1, len(_STUDENT)) - 1] * sqrt(1 + 1 / sources) / _NORMAL


def _ratios(table: PublishedTable, steps: int, *, of_peaks: bool) -> tuple[float, ...]:
    """Return the ratios of a table; after a calibration, of the largest number of steps that is not above its own."""
    if of_peaks:
        return table.peaks
    fewer = [number for number in table.calibrated if number <= steps]
    return table.calibrated[max(fewer)] if fewer else () if steps else table.seconds


def _quantile(weighted: Sequence[tuple[float, float]], share: float) -> float:
    """Return the value below which a share of the weights lies, with a straight line between neighbours."""
    ordered = sorted(weighted)
    total, before, points = sum(weight for _, weight in ordered), 0.0, []
    for value, weight in ordered:
        points.append(((before + weight / 2) / total, value))
        before += weight
    for (left, low), (right, high) in pairwise(points):
        if left <= share <= right:
            return low + (high - low) * (share - left) / (right - left)
    return points[0][1] if share < points[0][0] else points[-1][1]
