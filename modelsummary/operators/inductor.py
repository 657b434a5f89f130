"""Choices of Inductor, the compiler behind ``torch.compile``, that decide which kernels a compiled step runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from modelsummary.operators.operator_calls import OperatorCall, TensorSpec
from modelsummary.operators.operator_work import ALIGNED_BYTES, Work

__all__ = ["padded", "prefers_channels_last"]

_NODES_PER_CONVOLUTION = 300
_SMALL = 64  # channels
# Multiply-adds per element that a product of half precision reads and writes, above which padding is tried on an A100.
_PADDED_INTENSITY = 100
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


def padded(work: Work) -> Work:
    """Return a product with the rows that Inductor gives it.

    Rows of large products are padded until they begin at multiples of 16 bytes (torch/_inductor/fx_passes/pad_mm.py).
    Inductor measures whether that is faster, as it is where unaligned products take twice their time. The copies are
    left out: a tensor that generated code writes is written with the padding, and others are small beside the product.

    >>> import torch
    >>> head = Work("aten.mm", "gemm", torch.bfloat16, (1, 16384, 50257, 768), 0, 0, alignment=2)
    >>> padded(head).alignment, padded(head._replace(sizes=(1, 64, 50257, 768))).alignment
    (16, 2)
    """
    if work.op_class != "gemm" or len(work.sizes) != 4 or work.alignment >= ALIGNED_BYTES:
        return work
    _, m, n, k = work.sizes
    intensity = m * n * k / max(m * k + n * k + m * n, 1)
    return work._replace(alignment=ALIGNED_BYTES) if intensity > _PADDED_INTENSITY else work


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
