"""Operators that select rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelsummary.operators.shape_rules import new_contiguous
from modelsummary.operators.table import register

__all__: list[str] = []

_GROUPED = frozenset({torch.float32, torch.bfloat16, torch.float16})
_SUM, _MAX = 0, 2  # modes of embedding bags


def _cpu_embedding_bag(
    out: Any,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    _: Any = False,
    mode: int = 0,
    __: Any = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    """Return an empty ``offset2bag`` where sums add up rows in place (``is_fast_path`` in EmbeddingBag.cpp)."""
    bags = offsets.shape[0] - bool(include_last_offset)
    is_fast = (
        mode == _SUM
        and padding_idx < 0
        and weight.stride(1) == 1
        and weight.dtype in ((torch.float32,) if per_sample_weights is not None else _GROUPED)
    )
    number_of_bag = new_contiguous((0,) if is_fast else (indices.shape[0] + 1,), offsets.dtype)[: indices.shape[0]]
    size_of_bag = new_contiguous(offsets.shape, offsets.dtype)[:bags]
    chosen = new_contiguous((bags, weight.shape[1]) if mode == _MAX else (bags,), offsets.dtype)
    return out[0], number_of_bag, size_of_bag, chosen


register("aten", "_embedding_bag _embedding_bag_forward_only", overload="default", cpu_result=_cpu_embedding_bag)
