"""Where the shards are after indexing: the sharded dimension is taken whole."""

from __future__ import annotations

from typing import Any

import torch

from modelsummary.parallel.layouts import Blocked, FunctionCall, Sharded, dim_of, sharded_operand
from modelsummary.record.events import Value

__all__ = ["indexed", "selected"]


def indexed(call: FunctionCall) -> Sharded:
    """Follow ``x[...]``, which must take the sharded dimension whole."""
    operand, layout = sharded_operand(call)
    index = call.event.args[1]
    parts = list(index) if isinstance(index, (tuple, list)) else [index]
    tensors = [each for each in call.operands[1:] if each.layout is None and isinstance(each.leaf, Value)]
    is_lookup = len(tensors) == len(call.operands) - 1 <= 1 and all(_is_index(each.leaf) for each in tensors)
    plain = [each for each in parts if not isinstance(each, Value)]
    if not is_lookup or any(not (each is None or each is Ellipsis or isinstance(each, (int, slice))) for each in plain):
        raise Blocked("x[...] takes elements by a tensor")
    taken = sum(each is not None and each is not Ellipsis for each in parts)
    if Ellipsis not in parts:
        parts.append(Ellipsis)
    place = parts.index(Ellipsis)
    parts[place : place + 1] = [slice(None)] * (len(operand.shape) - taken)
    dim, result = 0, 0
    for each in parts:
        if each is None:
            result += 1
            continue
        if dim == layout.dim:
            if not isinstance(each, slice) or not _takes_all(each, operand.shape[dim], layout, call.sizes):
                raise Blocked("x[...] takes a part of the sharded dimension")
            return layout._replace(dim=result)
        dim += 1
        result += len(each.shape) if isinstance(each, Value) else isinstance(each, slice)
    raise Blocked("x[...] takes a part of the sharded dimension")


def _is_index(leaf: Any) -> bool:
    return not leaf.dtype.is_floating_point and leaf.dtype != torch.bool


def _takes_all(part: slice, size: int, layout: Sharded, sizes: set[int]) -> bool:
    """Return True if a slice takes a dimension whole, or the same elements of each group, such as every second one."""
    start, stop, step = part.indices(size)
    if (start, stop, step) == (0, size, 1):
        return True
    extent = size // layout.outer
    if step < 2 or start >= step or stop != size or extent % step:
        return False
    sizes.add(extent // step)
    return True


def selected(position: int) -> Any:
    """Return the rule of functions that take elements along a dimension, given by the argument at a position."""

    def rule(call: FunctionCall) -> Sharded:
        operand, layout = sharded_operand(call)
        dim = dim_of(call.argument(position, "dim"), len(operand.shape))
        if dim == layout.dim:
            raise Blocked(f"{call.name}() takes a part of the sharded dimension")
        for each in call.operands[1:]:
            if each.layout is not None:
                raise Blocked(f"{call.name}() takes sharded indices")
        gone = len(call.result_shape) < len(operand.shape) and dim < layout.dim
        return layout._replace(dim=layout.dim - gone)

    return rule
