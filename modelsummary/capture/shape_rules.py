"""Direct shape rules for normalisations, whose meta kernels take about a millisecond a call.

Torch writes these kernels in Python, as decompositions into some twenty operators each. A rule gives the very
shapes, strides and dtypes that the kernel gives, or None where it is not sure; then the kernel runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["SHAPE_RULES"]

_PLAIN_DTYPES = (torch.float32, torch.float64)


def _is_plain(x: Tensor, *others: Tensor | None) -> bool:
    """Contiguous, and of one dtype that is also the dtype of the statistics."""
    return (
        x.dtype in _PLAIN_DTYPES
        and x.numel() > 0
        and x.stride() == torch.empty_like(x, memory_format=torch.contiguous_format).stride()
        and all(other is None or other.dtype == x.dtype for other in others)
    )


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """``aten.native_batch_norm``. One value a channel has no variance: the kernel refuses it."""
    if not _is_plain(x, weight, bias, mean, var) or x.dim() < 2 or x.numel() == x.shape[1]:
        return None
    return torch.empty_like(x), x.new_empty(x.shape[1]), x.new_empty(x.shape[1])


def _layer_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, *_: object
) -> tuple[Tensor, Tensor, Tensor] | None:
    """``aten.native_layer_norm``: mean and reciprocal deviation of each normalised part."""
    kept = x.dim() - len(normalized_shape)
    if not _is_plain(x, weight, bias) or kept <= 0 or list(x.shape[kept:]) != list(normalized_shape):
        return None
    statistics = (*x.shape[:kept], *[1] * len(normalized_shape))
    return torch.empty_like(x), x.new_empty(statistics), x.new_empty(statistics)


SHAPE_RULES: dict[Any, Callable[..., tuple[Tensor, ...] | None]] = {
    torch.ops.aten.native_batch_norm.default: _batch_norm,
    torch.ops.aten.native_layer_norm.default: _layer_norm,
}
