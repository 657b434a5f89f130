"""Calls that a forward gives sizes of the whole model, which a rank with a part of the heads does not have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from modelsummary.parallel.index_rules import part_at
from modelsummary.parallel.placements import Shard, local_position
from modelsummary.parallel.regions import Region
from modelsummary.record.events import Event, Value, values_in

__all__ = ["Sizes", "whole_sizes"]

# FQN of a module -> its calls, as ``LocalSizes`` takes them.
Sizes = Mapping[str, Sequence[Mapping[str, Any]]]


def whole_sizes(regions: Iterable[Region], n_ranks: int) -> Sizes:
    """Return the calls in which regions write a size of the whole model where the result is sharded."""
    by_module: dict[str, list[Mapping[str, Any]]] = {}
    for region in regions:
        for event in region.functions:
            calls = by_module.setdefault(event.fqn, []) if _runs_once(event) else []
            calls += [call for call in _calls(event, region, n_ranks) if call not in calls]
    return {fqn: tuple(calls) for fqn, calls in by_module.items() if calls}


def _runs_once(event: Event) -> bool:
    """Return False if a checkpoint inside of the module runs a function again, when the forward has ended."""
    return event.parent is not None and event.regions == event.parent.regions


def _calls(event: Event, region: Region, n_ranks: int) -> Iterator[Mapping[str, Any]]:
    tensor, *others = event.args or (None,)
    if not isinstance(tensor, Value) or not others:
        return
    placement = region.placement(tensor)
    if not isinstance(placement, Shard):
        yield from _copies(event, others[0], region)
        return
    whole = tensor.shape[placement.dim]
    at, local = placement.dim - len(tensor.shape), local_position(whole, placement, n_ranks)
    name = event.name
    if name in ("split", "split_with_sizes"):
        ends = accumulate(value.shape[placement.dim] for value in values_in(event.result))
        borders = [local_position(border, placement, n_ranks) for border in (0, *ends)]
        local_sizes = tuple(after - before for before, after in pairwise(borders))
        whole_parts = others[0] if type(others[0]) is int else tuple(others[0])
        if sum(local_sizes) == local:
            yield {"name": name, "kind": "split", "at": at, "whole": whole_parts, "local": local, "sizes": local_sizes}
    elif name == "getitem" and (part := part_at(others[0], len(tensor.shape), placement.dim)) is not None:
        parts = others[0] if isinstance(others[0], tuple) else (others[0],)
        bounds = (parts[part].start, parts[part].stop)
        if parts[part].step is None and bounds != (None, None):
            local_bounds = tuple(b if b is None else _local_bound(b, whole, placement, n_ranks) for b in bounds)
            yield {
                "name": name, "kind": "slice", "at": at, "n_parts": len(parts), "part": part, "whole": bounds,
                "local": local, "bounds": local_bounds,
            }  # fmt: skip
    sizes = others[0] if isinstance(others[0], (tuple, list)) else others
    result, after = event.result, region.placement(event.result)
    if not isinstance(after, Shard) or len(sizes) != len(result.shape):
        return
    if not all(type(size) is int for size in sizes):
        return
    if sizes[after.dim] == -1:
        return
    if name == "expand" and placement.is_plain:
        yield {"name": name, "kind": "expand", "at": after.dim - len(sizes), "n_sizes": len(sizes), "local": local}
    elif name in ("view", "reshape") and not placement.pieces:
        yield from _view(name, tensor.shape, result.shape, placement, after, region, n_ranks)


def _copies(event: Event, sizes: Any, region: Region) -> Iterator[Mapping[str, Any]]:
    """Yield a call that copies a tensor which all heads share, once for each head."""
    result, placement = event.result, region.placement(event.result)
    if not isinstance(placement, Shard):
        return
    at, n_sizes = placement.dim - len(result.shape), len(result.shape)
    whole = result.shape[at]
    if event.name == "repeat_interleave" and sizes == whole:
        yield {"name": event.name, "kind": "copies", "at": at, "n_sizes": 1, "whole": whole}
    elif event.name in ("expand", "repeat"):
        yield {"name": event.name, "kind": "copies", "at": at, "n_sizes": n_sizes, "whole": whole}


def _local_bound(bound: int, whole: int, placement: Shard, n_ranks: int) -> int:
    """Return a bound of a slice on one rank; one that counts from the end still does."""
    position = local_position(bound % (whole + 1) if bound >= 0 else bound + whole, placement, n_ranks)
    return position if bound >= 0 else position - local_position(whole, placement, n_ranks)


def _view(
    name: str,
    before: Sequence[int],
    after: Sequence[int],
    placement: Shard,
    result: Shard,
    region: Region,
    n_ranks: int,
) -> Iterator[Mapping[str, Any]]:
    dims, sizes = _group(before, after, result.dim)
    if not dims[0] <= placement.dim < dims[1]:
        return
    whole = after[result.dim]
    # A number of heads or features is the same in each call; another one may follow the length of the sequence.
    is_constant = dims[1] - dims[0] == 1 and whole in region.sizes
    local = before[placement.dim] // n_ranks if is_constant else -1
    yield {
        "name": name, "kind": "view", "ndim": len(before), "dims": dims, "n_sizes": len(after), "sizes": sizes,
        "at": result.dim, "whole": whole, "local": local,
    }  # fmt: skip


def _group(before: Sequence[int], after: Sequence[int], dim: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the dimensions that a view makes ``dim`` and the ones around it of, and these: the fewest.

    >>> _group((2, 8, 64), (2, 8, 4, 16), 2)
    ((2, 3), (2, 4))
    """
    i = j = 0
    while True:
        begin, first, one, other = i, j, before[i], after[j]
        i, j = i + 1, j + 1
        while one != other:
            if one < other:
                one, i = one * before[i], i + 1
            else:
                other, j = other * after[j], j + 1
        if dim < j:
            return (begin, i), (first, j)
