"""Calls that a forward gives sizes of the whole model, which a rank with a part of the heads does not have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from modelsummary.capture.templates import leaves_of
from modelsummary.parallel.index_rules import part_at
from modelsummary.parallel.placements import Shard, local_position, local_shape
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
    before, after = region.placement(tensor), region.placement(event.result)
    if isinstance(before, Shard):
        at, local = before.dim - len(tensor.shape), local_shape(tensor.shape, before, n_ranks)[before.dim]
    elif isinstance(after, Shard):  # it copies a tensor that all heads share, once for each head
        at, local = after.dim - len(event.result.shape), 1
    else:
        return
    name = event.name
    if name in ("view", "reshape"):
        if isinstance(before, Shard) and isinstance(after, Shard) and not before.pieces:
            yield from _view(event, others, before, after, region, n_ranks)
        return
    if name in ("split", "split_with_sizes") and isinstance(before, Shard):
        numbers = _of_split(event, others[0], before, n_ranks)
    elif name == "getitem" and isinstance(before, Shard):
        numbers = _of_slice(tensor, others[0], before, n_ranks)
    elif isinstance(after, Shard) and not (isinstance(before, Shard) and (name != "expand" or not before.is_plain)):
        numbers = _of_copies(event, others, after, n_ranks)
    else:
        return
    changed = tuple(numbers)
    if changed:
        yield {"name": name, "at": at, "local": local, "n_leaves": len(leaves_of(others)), "numbers": changed}


_Numbers = Iterator[tuple[int, int, int]]  # position among the arguments behind the tensor, whole number, local number


def _of_split(event: Event, sizes: Any, placement: Shard, n_ranks: int) -> _Numbers:
    """Yield the sizes of the parts that a function takes apart along the sharded dimension."""
    ends = accumulate(value.shape[placement.dim] for value in values_in(event.result))
    borders = [local_position(border, placement, n_ranks) for border in (0, *ends)]
    parts = [after - before for before, after in pairwise(borders)]
    if borders[-1] != local_shape(event.args[0].shape, placement, n_ranks)[placement.dim]:
        return  # along another dimension
    if type(sizes) is not int:
        yield from ((number, whole, local) for number, (whole, local) in enumerate(zip(sizes, parts, strict=True)))
    elif len(set(parts[:-1])) <= 1 and parts[-1] <= parts[0]:
        yield 0, sizes, parts[0]


def _of_slice(tensor: Value, index: Any, placement: Shard, n_ranks: int) -> _Numbers:
    """Yield the bounds of the slice that takes a part of the sharded dimension."""
    part = part_at(index, len(tensor.shape), placement.dim)
    parts = index if isinstance(index, tuple) else (index,)
    if part is None or parts[part].step is not None:
        return
    first, whole = len(leaves_of(parts[:part])), tensor.shape[placement.dim]
    for position, bound in enumerate((parts[part].start, parts[part].stop), first):
        if bound is not None:
            yield position, bound, _local_bound(bound, whole, placement, n_ranks)


def _of_copies(event: Event, others: Sequence[Any], placement: Shard, n_ranks: int) -> _Numbers:
    """Yield the size of the sharded dimension that a function expands or repeats a tensor to."""
    whole = event.result.shape[placement.dim]
    sizes = others[0] if isinstance(others[0], (tuple, list)) else others
    is_interleaved = event.name == "repeat_interleave"
    position = 0 if is_interleaved else placement.dim
    has_sizes = event.name in ("expand", "repeat") and len(sizes) == len(event.result.shape)
    if (is_interleaved or has_sizes) and type(sizes[position]) is int and sizes[position] == whole:
        yield position, whole, whole // n_ranks


def _local_bound(bound: int, whole: int, placement: Shard, n_ranks: int) -> int:
    """Return a bound of a slice on one rank; one that counts from the end still does."""
    position = local_position(bound % (whole + 1) if bound >= 0 else bound + whole, placement, n_ranks)
    return position if bound >= 0 else position - local_position(whole, placement, n_ranks)


def _view(
    event: Event, others: Sequence[Any], placement: Shard, result: Shard, region: Region, n_ranks: int
) -> Iterator[Mapping[str, Any]]:
    before, after = event.args[0].shape, event.result.shape
    written = others[0] if isinstance(others[0], (tuple, list)) else others
    dims, sizes = _group(before, after, result.dim)
    is_written = len(written) == len(after) and all(type(size) is int for size in written) and written[result.dim] != -1
    if not is_written or not dims[0] <= placement.dim < dims[1]:
        return
    whole = after[result.dim]
    # A number of heads or features is the same in each call; another one may follow the length of the sequence.
    is_constant = dims[1] - dims[0] == 1 and whole in region.sizes
    local = before[placement.dim] // n_ranks if is_constant else -1
    yield {
        "name": event.name, "ndim": len(before), "dims": dims, "n_sizes": len(after), "sizes": sizes,
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
