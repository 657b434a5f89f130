"""Choices of Inductor, the compiler behind ``torch.compile``, that decide which kernels a compiled step runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from modelsummary.operators.operator_calls import OperatorCall, TensorSpec

__all__ = ["prefers_channels_last"]

_NODES_PER_CONVOLUTION = 300
_SMALL = 64  # channels
# Time in channels last relative to contiguous, measured by Inductor's authors, by kind of convolution.
_RELATIVE_TIME = {"grouped": 1.358, "small": 0.783, "narrowing": 0.725, "other": 0.823}


def prefers_channels_last(calls: Sequence[OperatorCall]) -> bool:
    """Return True if Inductor runs the 2-D convolutions of a step in channels last.

    The rules, and the times that the rule for inference weighs, are those in ``GraphLowering.decide_layout_opt``
    (torch/_inductor/graph.py).
    """
    convolutions = [call for call in calls if call.name == "aten.convolution"]
    if not convolutions or len(calls) >= _NODES_PER_CONVOLUTION * len(convolutions):
        return False
    weights = [call.bound["weight"] for call in convolutions]
    kinds = [_kind(weight, call.bound["groups"]) for weight, call in zip(weights, convolutions, strict=True)]
    if any(call.name == "aten.convolution_backward" for call in calls):
        refused = any(kind == "grouped" for kind in kinds) or any(map(_is_narrowing, weights))
        return not refused and not all(map(_is_small, weights))
    macs: Counter[str] = Counter()
    for kind, call in zip(kinds, convolutions, strict=True):
        macs[kind] += call.cost.macs
    return sum(_RELATIVE_TIME[kind] * macs[kind] for kind in macs) <= macs.total()


def _kind(weight: TensorSpec, groups: int) -> str:
    """Return the kind of a convolution: a key of ``_RELATIVE_TIME``."""
    if groups > 1 and weight.shape[1] > 1:
        return "grouped"
    if _is_small(weight):
        return "small"
    return "narrowing" if _is_narrowing(weight) else "other"


def _is_small(weight: TensorSpec) -> bool:
    return weight.shape[0] <= _SMALL and weight.shape[1] <= _SMALL


def _is_narrowing(weight: TensorSpec) -> bool:
    return 2 * weight.shape[0] <= weight.shape[1] and weight.shape[2] > 1
