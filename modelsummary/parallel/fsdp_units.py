"""FSDP units: what is gathered together."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence

import torch
from torch import nn

from modelsummary.errors import InputError
from modelsummary.layer_info import LayerInfo
from modelsummary.memory.checkpointing import blocks_of
from modelsummary.parallel.record_calls import Calls
from modelsummary.record.events import attributes_in

__all__ = ["calls_each_once", "fsdp_units", "unit_bytes", "used_parameters"]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def fsdp_units(model: nn.Module, root: LayerInfo, used: Container[int] | None = None) -> list[list[str]]:
    """Return the FQNs of the modules of each unit, in the order of their calls; what is in none belongs to the root.

    A unit is a repeated block with parameters. Blocks that share a parameter are one unit; a block that shares one with
    a module outside of all blocks is not a unit: the parameter belongs to the root. Blocks that the forward does not
    call, such as an encoder of images where the input is text, are units behind all others.

    Args:
        used: ids of the parameters that the forward uses; None: all.

    Raises:
        InputError: a parameter has no dimensions.
    """
    scalar = next((name for name, each in model.named_parameters() if not each.dim()), None)
    if scalar is not None:
        raise InputError(
            f"{scalar!r} has no dimensions, and fully_shard takes no such parameter; give it the shape (1,)"
        )
    rows = sorted(blocks_of(root), key=lambda row: math.inf if row.call_order is None else row.call_order)
    called = [row.fqn for row in rows if not row.fqn.endswith(")")]
    uncalled = [] if used is None else [row.fqn for row in _uncalled_blocks(root, set(called), used)]
    blocks = [fqn for fqn in dict.fromkeys([*called, *uncalled]) if fqn and _has_parameters(model, fqn)]
    inside = {name: next((fqn for fqn in blocks if name.startswith(f"{fqn}.")), None) for name in _names(model)}
    together: dict[int, set[str | None]] = {}
    for name, number in _names(model).items():
        together.setdefault(number, set()).add(inside[name])
    groups = {fqn: {fqn} for fqn in blocks}
    in_root: set[str] = set()
    for holders in together.values():
        shared = {fqn for fqn in holders if fqn is not None}
        if len(holders) > 1 and None in holders:
            in_root |= shared
        elif len(shared) > 1:
            merged = set().union(*(groups[fqn] for fqn in shared))
            for fqn in merged:
                groups[fqn] = merged
    units: list[list[str]] = []
    for fqn in blocks:
        group = [each for each in blocks if each in groups[fqn]]
        if group[0] == fqn and not in_root & set(group):
            units.append(group)
    return units


def calls_each_once(root: LayerInfo) -> bool:
    """Return True if the forward calls each module with parameters once."""
    return not any(
        (row.inner_layers and not row.executed) or (row.is_recursive and (row.inner_layers or not row.is_leaf))
        for row in root.walk()
    )


def used_parameters(calls: Calls) -> set[int]:
    """Return the ids of the parameters that a layer or a function of a recorded forward uses."""
    found: set[int] = set()
    for event in calls.events:
        if event.is_module:
            found.update(map(id, calls.modules[event.fqn].parameters()))
        else:
            taken = attributes_in((event.args, event.kwargs))
            found.update(id(calls.parameters[each.fqn]) for each in taken if each.fqn in calls.parameters)
    return found


def _uncalled_blocks(root: LayerInfo, called: Container[str], used: Container[int]) -> Iterator[LayerInfo]:
    """Yield the outermost modules in containers, with modules in them, of which the forward uses no parameter."""
    pending = list(reversed(root.children))
    while pending:
        row = pending.pop()
        in_container = row.parent_info is not None and isinstance(row.parent_info.module, _CONTAINERS)
        module = row.module
        is_block = in_container and bool(row.children) and not isinstance(module, _CONTAINERS)
        if module is not None and is_block and not any(each.executed for each in row.walk()):
            if not any(id(each) in used for each in module.parameters()):
                yield row
        elif row.fqn not in called:
            pending.extend(reversed(row.children))


def unit_bytes(
    model: nn.Module,
    units: Sequence[Sequence[str]],
    shapes: Mapping[int, Sequence[int]],
    shard: int,
    dtype: torch.dtype | None,
    used: Container[int] | None = None,
) -> list[tuple[int, int]]:
    """Return the bytes that each unit gathers, and the bytes of gradients that it reduces; the root is the last unit.

    FSDP pads the rows of each parameter to a multiple of the ranks. It reduces no gradient of a parameter that the
    forward does not use.

    Args:
        shapes: id of a parameter -> its shape after tensor and expert parallelism.
        dtype: of gathered parameters; gradients are then reduced in float32. None: their own.
        used: ids of the parameters that the forward uses; None: all.
    """
    seen: set[int] = set()
    found = []
    for fqns in (*units, [""]):
        gathered = reduced = 0
        for parameter in (each for fqn in fqns for each in model.get_submodule(fqn).parameters()):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            rows, *others = shapes[id(parameter)] or (1,)
            padded = -(-rows // shard) * shard * math.prod(others)
            gathered += padded * (dtype or parameter.dtype).itemsize
            if used is None or id(parameter) in used:
                reduced += padded * (parameter.itemsize if dtype is None else 4) * parameter.requires_grad
        found.append((gathered, reduced))
    return found


def _names(model: nn.Module) -> dict[str, int]:
    return {name: id(each) for name, each in model.named_parameters(remove_duplicate=False)}


def _has_parameters(model: nn.Module, fqn: str) -> bool:
    return next(model.get_submodule(fqn).parameters(), None) is not None
