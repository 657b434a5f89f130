"""Fit the factors of a cluster to measured steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modelsummary.devices.factors import Factors, calibrated_factors
from modelsummary.errors import InputError, is_number

if TYPE_CHECKING:
    from modelsummary.cluster.estimate import StepEstimate
    from modelsummary.cluster.topology import Cluster

__all__ = ["factors_of_steps"]


def factors_of_steps(cluster: Cluster, measured: Sequence[tuple[StepEstimate, float, float | None]]) -> Factors:
    """Return the factors that measured steps ask for, as ``Cluster.calibrated`` says."""
    for entry in measured if _is_list(measured) else [None]:
        _check(entry)
    if not measured:
        raise InputError(
            "measured must have one step or more, got none; pass [(estimate, seconds, peak_bytes or None)]"
        )
    peaks = [peak for *_, peak in measured if peak is not None]

    def predict(factors: Factors) -> list[float]:
        other = replace(cluster, factors=factors)
        estimates = [step.on(_with_nodes(other, step)) for step, *_ in measured]
        return [estimate.step_seconds for estimate in estimates] + [
            float(estimate.memory_bytes) for estimate, (*_, peak) in zip(estimates, measured, strict=True) if peak
        ]

    return calibrated_factors(predict, [seconds for _, seconds, _ in measured], peaks)


def _with_nodes(cluster: Cluster, step: StepEstimate) -> Cluster:
    """Return the cluster with as many nodes as the step was predicted on, if that are more."""
    return cluster.with_nodes(max(cluster.nodes, step.cluster.nodes))


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
