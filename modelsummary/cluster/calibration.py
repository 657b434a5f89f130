"""Fit the factors of a cluster to measured steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modelsummary.devices.factors import COMMON, SPREADS, Factors, fitted
from modelsummary.errors import InputError, is_number

if TYPE_CHECKING:
    from modelsummary.cluster.estimate import StepEstimate
    from modelsummary.cluster.topology import Cluster

__all__ = ["calibrated_factors"]


def calibrated_factors(cluster: Cluster, measured: Sequence[tuple[StepEstimate, float, float | None]]) -> Factors:
    """Return the factors that measured steps ask for, as ``Cluster.calibrated`` says."""
    for entry in measured if _is_list(measured) else [None]:
        _check(entry)
    if not measured:
        raise InputError(
            "measured must have one step or more, got none; pass [(estimate, seconds, peak_bytes or None)]"
        )
    goals = [value for _, seconds, peak in measured for value in (seconds, peak) if value is not None]

    def predict(values: Sequence[float]) -> list[float]:
        other = replace(cluster, factors=_factors(values))
        predictions = []
        for step, _, peak in measured:
            estimate = step.on(_with_nodes(other, step))
            predictions += [estimate.step_seconds, *([float(estimate.memory_bytes)] if peak is not None else [])]
        return predictions

    values = fitted(predict, goals, list(SPREADS.values()), [COMMON.get(name, 0.0) for name in SPREADS])
    before, after = (_error(cluster, measured, factors) for factors in (Factors(), _factors(values)))
    return replace(_factors(values), steps=len(measured), before=before, after=after)


def _factors(values: Sequence[float]) -> Factors:
    by_name: dict[str, Any] = dict(zip(SPREADS, values, strict=True))
    return Factors(**by_name)


def _with_nodes(cluster: Cluster, step: StepEstimate) -> Cluster:
    """Return the cluster with as many nodes as the step was predicted on, if that are more."""
    return cluster.with_nodes(max(cluster.nodes, step.cluster.nodes))


def _error(cluster: Cluster, measured: Sequence[tuple[StepEstimate, float, float | None]], factors: Factors) -> float:
    other = replace(cluster, factors=factors)
    off = [abs(step.on(_with_nodes(other, step)).step_seconds / seconds - 1) for step, seconds, _ in measured]
    return sum(off) / len(off)


def _is_list(measured: Any) -> bool:
    return isinstance(measured, Sequence) and not isinstance(measured, (str, bytes))


def _check(entry: Any) -> None:
    """Raise ``InputError`` if this is not an estimate with its seconds and its peak."""
    is_triple = isinstance(entry, (tuple, list)) and len(entry) == 3 and hasattr(entry[0], "step_seconds")
    if not is_triple:
        raise InputError(
            "measured must be a list of (estimate, seconds, peak_bytes or None), with estimates of stats.simulate, got "
            f"{entry!r:.80}"
        )
    for name, value in (("seconds", entry[1]), ("peak_bytes", entry[2])):
        may_be_none = name == "peak_bytes" and value is None
        if not may_be_none and not (is_number(value) and value > 0):
            or_none = "" if name == "seconds" else " or None"
            raise InputError(f"{name} of a measured step must be a number > 0{or_none}, got {value!r:.80}")
