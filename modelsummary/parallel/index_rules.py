"""Where the shards are after indexing: the sharded dimension is taken whole, or in whole pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from modelsummary.capture.templates import Attribute
from modelsummary.parallel.placements import (
    Blocked,
    FunctionCall,
    Operand,
    Shard,
    apart,
    dim_of,
    parts_of,
    sharded_operand,
)
from modelsummary.record.events import Value

__all__ = ["begin_of", "indexed", "looked_up", "part_at", "selected"]


def indexed(call: FunctionCall) -> Shard | None:
    """Follow ``x[...]``, which must take the sharded dimension whole, or pieces of it; None if these are whole."""
    index = call.args[1]
    if call.first.shard is None and len(call.operands) == 2 and _is_lookup(index) and call.operands[1].is_index:
        return looked_up(call, call.operands[1], call.first)
    operand, placement = sharded_operand(call)
    parts = [part for _, part in _spread(index, len(operand.shape))]
    tensors = {other.leaf: len(other.shape) for other in call.operands[1:] if other.shard is None and other.is_index}
    lookups = [part for part in parts if _is_lookup(part)]
    kinds = (slice,) if lookups else (slice, int)  # an integer beside a tensor may move its dimension to the front
    plain = [part for part in parts if part is not None and not _is_lookup(part)]
    if len(lookups) > 1 or len(tensors) != len(call.operands) - 1 or not all(isinstance(part, kinds) for part in plain):
        raise Blocked(f"{call.at} takes elements by a tensor; integers, slices or one tensor of integers work")
    dim, result = 0, 0
    for part in parts:
        if part is None:
            result += 1
            continue
        if dim == placement.dim:
            size = operand.shape[dim]
            if isinstance(part, slice) and _takes_all(part, size, placement, call.sizes):
                return placement._replace(dim=result)
            if type(part) is int and not placement.pieces:
                raise apart(call, (1,) * size, _part(call))
            bounds = _bounds(part, size)
            if bounds is None:
                raise Blocked(_part(call))
            borders = sorted({0, size, *bounds})
            sharded = parts_of(call, borders)[borders.index(bounds[0])]
            if sharded is not None and type(part) is int:
                raise Blocked(_part(call))
            return None if sharded is None else sharded._replace(dim=result)
        dim += 1
        is_slice = isinstance(part, slice)
        result += (tensors[part] if isinstance(part, (Value, Attribute)) else 1) if _is_lookup(part) else is_slice
    raise Blocked(_part(call))


def looked_up(call: FunctionCall, numbers: Operand, table: Operand) -> Shard:
    """Return the placement of the rows of a table that sharded numbers take."""
    if numbers.shard is None or table.shard is not None:
        raise Blocked(f"{call.at} takes rows of a sharded table; rows of a whole table work")
    call.meets(table, -1, 0)
    return numbers.shard


def _bounds(part: Any, size: int) -> tuple[int, int] | None:
    """Return the start and the end of what a part of an index takes of a dimension; None if it is not one stretch.

    >>> _bounds([-2, -1], 10), _bounds(slice(None, None, 2), 10)
    ((8, 10), None)
    """
    if isinstance(part, slice):
        start, stop, step = part.indices(size)
        return (start, stop) if step == 1 and start < stop else None
    if type(part) is int:
        part = [part]
    if not isinstance(part, list) or not part or not all(type(index) is int for index in part):
        return None
    start = part[0] % size
    return (
        (start, start + len(part)) if [index % size for index in part] == [*range(start, start + len(part))] else None
    )


def begin_of(index: Any, shape: Sequence[int], dim: int) -> int:
    """Return where ``x[index]`` begins along a dimension of ``x``; 0 if it does not take one stretch of it.

    >>> begin_of((Ellipsis, slice(16, None)), (2, 48), 1)
    16
    """
    parts = [part for _, part in _spread(index, len(shape)) if part is not None]
    return (_bounds(parts[dim], shape[dim]) or (0, 0))[0]


def part_at(index: Any, ndim: int, dim: int) -> int | None:
    """Return the position in an index of the slice that takes a dimension; None if the index has lookups, or no slice.

    >>> part_at((Ellipsis, slice(16, None)), 3, 2)
    1
    """
    parts = [(position, part) for position, part in _spread(index, ndim) if part is not None]
    position, part = parts[dim]
    is_slice = position >= 0 and isinstance(part, slice)
    return position if is_slice and not any(_is_lookup(part) for _, part in parts) else None


def _spread(index: Any, ndim: int) -> list[tuple[int, Any]]:
    """Return the parts of an index, each with its position in it: one for each dimension, and None for new dimensions.

    >>> _spread((None, Ellipsis, 0), 3)
    [(0, None), (-1, slice(None, None, None)), (-1, slice(None, None, None)), (2, 0)]
    """
    is_one = _is_lookup(index) or not isinstance(index, tuple)  # an attribute is a tuple
    parts = list(enumerate((index,) if is_one else index))
    taken = sum(part is not None and part is not Ellipsis for _, part in parts)
    ellipsis = next((position for position, part in parts if part is Ellipsis), len(parts))
    parts[ellipsis : ellipsis + 1] = [(-1, slice(None))] * (ndim - taken)
    return parts


def _part(call: FunctionCall) -> str:
    return f"{call.at} takes a part of {call.dimension}; equal parts of it work"


def _is_lookup(index: Any) -> bool:
    """Return True for a tensor or a list of integers."""
    is_list = isinstance(index, list) and all(type(element) is int for element in index)
    return is_list or isinstance(index, (Value, Attribute))


def _takes_all(part: slice, size: int, placement: Shard, sizes: set[int]) -> bool:
    """Return True if a slice takes a dimension whole, or the same elements of each group, such as every second one."""
    start, stop, step = part.indices(size)
    if (start, stop, step) == (0, size, 1):
        return True
    if placement.pieces:
        return False
    extent = size // placement.outer
    if step < 2 or start >= step or stop != size or extent % step:
        return False
    sizes.add(extent // step)
    return True


def selected(position: int) -> Any:
    """Return the rule of functions that take or set elements along a dimension, the argument at a position."""

    def rule(call: FunctionCall) -> Shard:
        operand, placement = sharded_operand(call)
        dim = dim_of(call.argument(position, "dim"), len(operand.shape))
        if dim == placement.dim:
            raise Blocked(_part(call))
        for index in call.operands[1:]:
            if call.name in ("gather", "scatter"):  # each row of the index is for the same row
                if index.shard is None:
                    raise call.wrong(index, placement)
                if index.shard != placement:
                    raise Blocked(call.differ)
            elif index.shard is not None:
                raise Blocked(f"{call.at} takes sharded indices; whole indices work")
        gone = len(call.result_shape) < len(operand.shape) and dim < placement.dim
        return placement._replace(dim=placement.dim - gone)

    return rule
