"""Run the model as one rank has it, on shapes: every value must have the shape that its placement says.

A forward that writes the number of heads, or a width, into a view gets the wrong shape from a local tensor. Where the
number is an attribute of the module, that attribute is divided; where nothing helps, the region is refused. Where the
forward needs values, the functions of a region are called one by one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain, combinations, islice, pairwise, product
from typing import Any

import torch
from torch import nn

from modelsummary import _torch
from modelsummary.capture.containers import tensors_of
from modelsummary.capture.devices import device_of
from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.live import LiveModel
from modelsummary.capture.templates import Attribute, leaves_of, map_template
from modelsummary.parallel.derive import Derivation
from modelsummary.parallel.function_names import Families
from modelsummary.parallel.layer_plans import parameter_shards
from modelsummary.parallel.local_sizes import LocalSizes
from modelsummary.parallel.placements import Placement, Shard, local_position, local_shape
from modelsummary.parallel.plan_entries import LocalAttribute
from modelsummary.parallel.rank_model import copied, on_meta
from modelsummary.parallel.record_calls import TRACE_RULES, Calls
from modelsummary.parallel.regions import Region
from modelsummary.parallel.rules import begin_of, part_at
from modelsummary.parallel.sequence import Chunks
from modelsummary.record.events import Event, Value, values_in
from modelsummary.record.runs import record_once

__all__ = ["alike", "calls_of_chunk", "check_locally", "chunk_failure", "chunks_failure"]

_MOST_OPTIONS = 32


def check_locally(live: LiveModel, derivation: Derivation, n_ranks: int) -> None:
    """Demote the regions whose forward does not run on local tensors, and note the attributes that have to change."""
    if live.execution == "real":
        for region in [region for region in derivation.regions if not _runs_on_shards(region, n_ranks)]:
            callers = dict.fromkeys(event.fqn for event in region.functions)
            derivation.gather(region, _does_not_run(next(iter(callers), "") or type(live.model).__name__))
        return
    groups = _groups(derivation.regions)
    options = [_options(derivation.calls, regions, n_ranks) for regions in groups]
    first = list(chain(*(ways[0] for ways in options)))
    if not groups or not _failure(live, derivation, list(chain(*groups)), first, n_ranks):
        derivation.attributes += first
        return
    chosen: list[LocalAttribute] = []
    for regions, ways in zip(groups, options, strict=True):
        why = ""
        for sizes_of_rank, attributes in product(({}, _whole_sizes(regions, n_ranks)), ways):
            failed = _failure(live, derivation, regions, attributes, n_ranks, sizes_of_rank)
            if not failed:
                chosen += attributes
                derivation.sizes |= sizes_of_rank
                break
            why = failed if attributes == ways[0] else why
        else:
            for region in regions:
                derivation.gather(region, why)
    derivation.attributes += chosen


def _runs_on_shards(region: Region, n_ranks: int) -> bool:
    """Return True if each function of a region, called with what one rank holds, returns what one rank has to hold.

    It is for a forward that needs values, such as which tokens an expert takes, which a copy on shapes lacks. A module
    that reads sizes may compute with the size of a shard, which its record does not show: the answer is False.
    """
    callers = {event.parent for event in region.functions if event.parent is not None}
    return not any(caller.reads_sizes for caller in callers) and all(
        _is_local(event, region, n_ranks) for event in region.functions
    )


def _is_local(event: Event, region: Region, n_ranks: int) -> bool:
    calls, placements = region.calls, region.placements
    if event.function is None:
        return False

    def local(leaf: Any) -> Any:
        tensor = calls.tensor_of(leaf)
        if tensor is None:
            return leaf
        placement = placements.get(leaf) if isinstance(leaf, (Value, Attribute)) else None
        return torch.empty(local_shape(tensor.shape, placement, n_ranks), dtype=tensor.dtype, device="meta")

    try:
        result = event.function(*map_template(local, event.args), **map_template(local, event.kwargs))
    except Exception:  # a shape does not fit
        return False
    expected = [local_shape(value.shape, placements.get(value), n_ranks) for value in values_in(event.result)]
    return [tuple(tensor.shape) for tensor in tensors_of(result)] == expected


def _does_not_run(where: str, said: str = "") -> str:
    """Return why the layers of a region keep whole activations."""
    return (
        f"the forward of {where} does not run on the shapes of one rank{f' ({said})' if said else ''}; sizes of its "
        "views and splits that are -1 or integer attributes of the module work"
    )


def _groups(regions: Sequence[Region]) -> list[list[Region]]:
    """Return the regions in groups of equal blocks, whose names differ by numbers alone."""
    groups: defaultdict[tuple[str, ...], list[Region]] = defaultdict(list)
    for region in regions:
        groups[_kind(region)].append(region)
    return list(groups.values())


def alike(regions: Sequence[Region], region: Region) -> list[Region]:
    """Return the regions of equal blocks, which may have other sizes, as in the stages of a vision transformer."""
    return [other for other in regions if _kind(other) == _kind(region)]


def _kind(region: Region) -> tuple[str, ...]:
    return tuple(re.sub(r"\d+", "*", fqn) for fqn in (*region.columns, *region.parameters))


def _options(calls: Calls, regions: Sequence[Region], n_ranks: int) -> list[list[LocalAttribute]]:
    """Return sets of attributes to divide, small ones first: each value equals the extent of a sharded dimension.

    Attributes that the functions of a region are called with come first: a forward may also compute sizes with others.
    """
    by_name: defaultdict[str, list[LocalAttribute]] = defaultdict(list)
    direct: set[str] = set()
    for region in regions:
        written = {leaf for event in region.functions for leaf in leaves_of((event.args, event.kwargs))}
        for fqn in dict.fromkeys(event.fqn for event in region.functions):
            for name, value in vars(calls.modules[fqn]).items():
                if type(value) is int and value in region.sizes and value % n_ranks == 0:
                    by_name[name].append(LocalAttribute(fqn, name, value, value // n_ranks))
                    direct |= {name} if value in written else set()
    names = sorted(by_name, key=lambda name: name not in direct)
    subsets = chain.from_iterable(combinations(names, size) for size in range(len(names) + 1))
    return [[attribute for name in subset for attribute in by_name[name]] for subset in islice(subsets, _MOST_OPTIONS)]


def _failure(
    live: LiveModel,
    derivation: Derivation,
    regions: Sequence[Region],
    attributes: Sequence[LocalAttribute],
    n_ranks: int,
    sizes: _Sizes | None = None,
) -> str:
    """Return why the model, sharded in these regions alone, does not do the same on local shapes; empty if it does.

    Args:
        attributes: to change.
        sizes: calls that get the sizes of one rank.
    """
    calls, placements = derivation.calls, _shards(regions)
    local, failed = _ran(live, calls, _local_model(calls, regions, attributes, n_ranks, sizes or {}))
    if failed:
        return _does_not_run(*failed)
    return _difference(calls.events, local, [placements] * len(local), n_ranks)[0]


def _shards(regions: Iterable[Region]) -> dict[Value, Shard]:
    """Return the values of which a rank has chunks in some regions, with their placements."""
    return {value: shard for region in regions for value, shard in region.shards.items()}


def _difference(
    whole: Sequence[Event],
    local: Sequence[Event],
    placements: Sequence[Mapping[Value, Shard | None]],
    n_ranks: int,
    exempt: Collection[Event] = (),
) -> tuple[str, int]:
    """Return the first difference of the calls on local shapes, and its position.

    The difference is empty if only the sharded extents differ.

    Args:
        placements: for each call, the placements of its values.
        exempt: calls whose tensors and numbers may differ.
    """
    for position, (one, two, expected) in enumerate(zip(whole, local, placements, strict=False)):
        why = _other_call(one, two) or ("" if one in exempt else _difference_of(one, two, expected, n_ranks))
        if why:
            return why, position
    if len(whole) != len(local):
        return f"the model calls {len(local)} functions on the shapes of one rank, and {len(whole)} else", -1
    return "", -1


def _at(event: Event) -> str:
    return event.fqn if event.is_module else f"{event.name}() in {event.fqn or 'the model'}"


def _numbers_in(name: str, arguments: Any) -> list[float]:
    """Return the numbers that a function computes elements with: floats, and integers other than sizes."""
    if name in ("full", "new_full"):
        (_, *arguments), kwargs = arguments
        arguments = (arguments[-1:], kwargs.get("fill_value"))
        name = ""
    kinds = (float,) if name in Families.SIZED else (int, float)
    return [leaf for leaf in leaves_of(arguments) if type(leaf) in kinds]


def _other_call(one: Event, two: Event) -> str:
    """Return why a call on the shapes of one rank is of another function or module; empty if it is of the same."""
    if (one.fqn, one.function and one.function.name) == (two.fqn, two.function and two.function.name):
        return ""
    return f"{_at(two)} is called on the shapes of one rank in place of {one.name}; a forward that calls the same works"


def _difference_of(one: Event, two: Event, expected: Mapping[Value, Shard | None], n_ranks: int) -> str:
    """Return how a call differs on the shapes of one rank; empty if only the sharded extents differ."""
    at = _at(two)
    numbers = [_numbers_in(event.name, (event.args, event.kwargs)) for event in (one, two)]
    if numbers[0] != numbers[1]:
        differ = next((pair for pair in zip(*numbers, strict=False) if pair[0] != pair[1]), tuple(numbers))
        return (
            f"{at} computes with {differ[0]}, and with {differ[1]} on the shapes of one rank; a number that does "
            "not follow from a sharded size works"
        )
    if one.is_decision and one.result != two.result:
        return f"{at} decides otherwise on the shapes of one rank; a decision by sizes that are not sharded works"
    placement = expected.get(one.args[0]) if one.name == "getitem" and isinstance(one.args[0], Value) else None
    if placement is not None:  # a slice of the same size may begin elsewhere
        begins = [begin_of(event.args[1], event.args[0].shape, placement.dim) for event in (one, two)]
        if begins[0] and local_position(begins[0], placement, n_ranks) != begins[1]:
            return f"{at} takes another part on the shapes of one rank; a part of each piece works"
    for value, part in zip(values_in(one.result), values_in(two.result), strict=False):
        shape = local_shape(value.shape, expected.get(value), n_ranks)
        if shape != part.shape:
            return (
                f"{at} returns {part.shape} on the shapes of one rank, where a rank's part is {shape}; sizes that "
                "are -1 or integer attributes of the module work"
            )
    return ""


def chunks_failure(live: LiveModel, derivation: Derivation, chunks: Chunks, n_ranks: int) -> tuple[str, int]:
    """Return why the model does not do the same on chunks of the sequence, and the position of the first such call.

    The reason is empty if it does; the position is -1 where an error ends the forward.
    """
    calls = derivation.calls
    twin = _local_model(calls, derivation.regions, derivation.attributes, n_ranks, derivation.sizes)
    _add_boundaries(twin, chunks, n_ranks)
    local, failed = _ran(live, calls, twin)
    if failed:
        why = "the forward of {} fails ({})".format(*failed)
        return f"{why}; blocks that read the number of tokens in modules of their own (attention, MLP) work", -1
    placements = _shards(derivation.regions)
    expected: list[Mapping[Value, Shard | None]] = [
        dict(zip(values_in(event.result), chunks.results[position], strict=True))
        if position in chunks.results
        else placements
        for position, event in enumerate(calls.events)
    ]
    return _difference(calls.events, local, expected, n_ranks)


def calls_of_chunk(
    live: LiveModel, calls: Calls, call: CallArguments, tables: Mapping[str, int], n_ranks: int
) -> tuple[list[Event], str]:
    """Return the calls of a model that takes a chunk of its input, and why it fails; empty if it does not.

    Args:
        call: with the chunk.
        tables: buffers that are cut along a dimension, too.
    """
    twin = copied(calls.model, on_meta)
    for name, dim in tables.items():
        table = twin.get_buffer(name)
        owner, _, buffer = name.rpartition(".")
        twin.get_submodule(owner)._buffers[buffer] = table.narrow(dim, 0, table.shape[dim] // n_ranks).clone()
    local, failed = _ran(replace(live, call=call), calls, twin)
    works = "one that takes the number of tokens from its input works"
    return local, "the forward of {} fails ({}); {}".format(*failed, works) if failed else ""


def chunk_failure(
    calls: Calls,
    local: Sequence[Event],
    placements: Mapping[Value, Shard | None],
    exempt: Collection[Event],
    n_ranks: int,
) -> str:
    """Return why the model does not do the same with a chunk of its input; empty if it does.

    What nothing takes that reaches a result, such as numbers of positions that are passed as well, may differ.

    Args:
        local: the calls with the chunk.
        exempt: calls of the whole model whose tensors and numbers may differ.
    """
    whole: Sequence[Event] = calls.events
    if len(whole) == len(local):
        alive = _reaching(calls)
        whole, local = ([event for event, kept in zip(events, alive, strict=True) if kept] for events in (whole, local))
    return _difference(whole, local, [placements] * len(local), n_ranks, exempt)[0]


def _reaching(calls: Calls) -> list[bool]:
    """Return for each call whether a result of the model, or a decision, depends on it."""
    needed, alive = set(calls.returned), []
    for event in reversed(calls.events):
        reaches = event.is_decision or any(event.writes) or not needed.isdisjoint(values_in(event.result))
        needed.update(values_in((event.args, event.kwargs)) if reaches else ())
        alive.append(reaches)
    return alive[::-1]


def _add_boundaries(twin: nn.Module, chunks: Chunks, n_ranks: int) -> None:
    """Register hooks that cut and gather tensors at the boundaries of modules, and that no record sees."""

    def changed(tensor: Any, dim: int, *, gathers: bool) -> Any:
        with _torch.DisableTorchFunction():
            return (
                torch.cat([tensor] * n_ranks, dim) if gathers else tensor.narrow(dim, 0, tensor.shape[dim] // n_ranks)
            )

    def on_entry(position: int | str, change: Callable[[Any], Any], _: nn.Module, args: Any, kwargs: Any) -> Any:
        arguments = {**dict(enumerate(args)), **kwargs}
        arguments |= {position: change(arguments[position])} if position in arguments else {}
        return tuple(arguments[position] for position in range(len(args))), {name: arguments[name] for name in kwargs}

    def on_exit(position: int, change: Callable[[Any], Any], _: nn.Module, _args: Any, result: Any) -> Any:
        if not isinstance(result, tuple):
            return change(result)
        return (*result[:position], change(result[position]), *result[position + 1 :])

    for fqn, is_input, position, before, after in chunks.boundaries():
        placement = before or after
        if placement is None:
            continue
        change = partial(changed, dim=placement.dim, gathers=before is not None)
        module = twin.get_submodule(fqn)
        if is_input:
            module.register_forward_pre_hook(partial(on_entry, position, change), with_kwargs=True)
        else:
            module.register_forward_hook(partial(on_exit, int(position), change))


def _ran(live: LiveModel, calls: Calls, twin: nn.Module) -> tuple[list[Event], tuple[str, str] | None]:
    """Return what a copy on meta calls; and the module whose forward failed, with its error in one line, if one did.

    Tensors of the copy report the device of the model, or the CPU if that is on meta, too.
    """
    device = device_of(live.model.parameters())
    try:
        record = record_once(twin, live.call, live.execution, None if device.type == "meta" else device, TRACE_RULES)
        return Calls(twin, record, calls.linears).events, None
    except Exception as raised:  # a shape does not fit
        error = raised.__cause__ or raised
    names = {id(module): fqn for fqn, module in twin.named_modules()}
    where, frame = "", error.__traceback__
    while frame is not None:
        where = names.get(id(frame.tb_frame.f_locals.get("self")), where)
        frame = frame.tb_next
    return [], (where or type(twin).__name__, f"{type(error).__name__}: {' '.join(str(error).split()):.120}")


def _local_model(
    calls: Calls, regions: Sequence[Region], attributes: Sequence[LocalAttribute], n_ranks: int, sizes: _Sizes
) -> nn.Module:
    """Return the model of one rank, sharded in some regions alone.

    Args:
        attributes: to change.
        sizes: calls that get the sizes of one rank.

    Raises:
        InputError: the model cannot be copied.
    """
    cut: dict[int, Placement | None] = {}  # id of a parameter -> what a rank computes with
    for region in regions:
        cut |= {id(calls.parameters[fqn]): placement for fqn, placement in region.parameters.items()}
        for role, fqns in (("column", region.columns), ("row", region.rows)):
            for fqn in fqns:
                for name, placement in parameter_shards(calls, fqn, role, region.pieces.get(fqn, ())).items():
                    cut[id(calls.modules[fqn].get_parameter(name))] = placement

    def local(parameter: nn.Parameter) -> torch.Tensor:
        shape = local_shape(parameter.shape, cut.get(id(parameter)), n_ranks)
        return torch.empty(shape, dtype=parameter.dtype, device="meta")

    twin = copied(calls.model, local)
    for attribute in attributes:
        setattr(twin.get_submodule(attribute.fqn), attribute.name, attribute.local)
    for fqn, changed in sizes.items():
        LocalSizes(calls=changed).wrap(twin.get_submodule(fqn), n_ranks)
    for fqn in (fqn for region in regions for fqn in region.split):
        linear = calls.linears.get(fqn)  # None for an embedding
        if linear is not None and linear.reshapes:
            layer = twin.get_submodule(fqn)
            layer.forward = partial(linear.product, layer)
    return twin


# --------------------------------------------------------------------------------------------- sizes of the whole model


# FQN of a module -> its calls, as ``LocalSizes`` takes them.
_Sizes = Mapping[str, Sequence[Mapping[str, Any]]]


def _whole_sizes(regions: Iterable[Region], n_ranks: int) -> _Sizes:
    """Return the calls in which regions write a size of the whole model where the result is sharded."""
    by_module: dict[str, list[Mapping[str, Any]]] = {}
    for region in regions:
        for event in region.functions:
            calls = by_module.setdefault(event.fqn, []) if _runs_once(event) else []
            calls += [call for call in _changed_calls(event, region, n_ranks) if call not in calls]
    return {fqn: tuple(calls) for fqn, calls in by_module.items() if calls}


def _runs_once(event: Event) -> bool:
    """Return False if a checkpoint inside of the module runs a function again, when the forward has ended."""
    return event.parent is not None and event.regions == event.parent.regions


def _changed_calls(event: Event, region: Region, n_ranks: int) -> Iterator[Mapping[str, Any]]:
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
