"""FSDP units: what is gathered together."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from modelsummary.errors import InputError
from modelsummary.layer_info import LayerInfo
from modelsummary.memory.checkpointing import blocks_of
from modelsummary.parallel.record_calls import Calls
from modelsummary.record.events import Record, attributes_in, values_in

__all__ = ["fsdp_units", "unit_bytes", "used_parameters"]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_LARGE = 100_000_000  # parameters from which one layer is a unit, as in torch's size_based_auto_wrap_policy


def fsdp_units(model: nn.Module, root: LayerInfo, calls: Calls) -> tuple[list[list[str]], dict[str, str]]:
    """Return the FQNs of each unit in the order of their calls, and FQN -> why of the candidates that are in none.

    What is in no unit is gathered with the root. Candidates are the repeated blocks with parameters; if there are none,
    the children of the model. Blocks that share a parameter are one unit. A candidate is not a unit if it shares a
    parameter with the root, is one small layer, if a tensor that it takes or returns is written in place, or if a
    function outside of it reads one of its parameters, which FSDP has not gathered then. Blocks that the forward does
    not call, such as an encoder of images where the input is text, are units behind all others.

    Raises:
        InputError: a parameter has no dimensions.
    """
    scalar = next((name for name, each in model.named_parameters() if not each.dim()), None)
    if scalar is not None:
        raise InputError(
            f"{scalar!r} has no dimensions, and fully_shard takes no such parameter; give it the shape (1,)"
        )
    rows = sorted(blocks_of(root), key=lambda row: math.inf if row.call_order is None else row.call_order)
    called = {row.fqn: row for row in rows if not row.fqn.endswith(")")}
    uncalled = [row.fqn for row in _uncalled_blocks(root, called, used_parameters(calls))]
    candidates = [fqn for fqn in dict.fromkeys([*called, *uncalled]) if fqn and _elements(model, fqn)]
    reasons = _written(calls.record, candidates, type(model).__name__) | _read(model, calls, candidates)
    for fqn in candidates:
        if fqn in called and _is_layer(called[fqn]) and _elements(model, fqn) < _LARGE:
            reasons[fqn] = f"one layer of fewer than {_LARGE:,} parameters; a block of several layers can be a unit"
    blocks = [fqn for fqn in candidates if fqn not in reasons]
    places = _places(model, blocks)
    inside = {name: next((places[each] for each in places if name.startswith(each)), None) for name in _names(model)}
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
        if in_root & set(group):
            reasons[fqn] = "it shares a parameter with a module in no unit; a parameter of its own works"
        elif group[0] == fqn:
            units.append(group)
    return units, {fqn: reasons[fqn] for fqn in candidates if fqn in reasons}


def _written(record: Record, fqns: Container[str], model_class: str) -> dict[str, str]:
    """Return modules that cannot be units because a tensor that they take or return is written in place -> why.

    FSDP hands a unit views of what it takes, made by a function of its own, into which autograd lets nobody write. It
    registers a hook on what a unit returns; a view gets a new node in the graph when it is written, without the hook
    that gathers the parameters for the backward.

    Args:
        fqns: of the modules.
    """
    found: dict[str, str] = {}
    views: dict[int, list[str]] = {}  # id of memory -> modules that returned a view of it
    for event in record.root.walk():
        written = event.writes[0] if event.writes else frozenset()
        if event.is_module and event.fqn in fqns:
            if any(
                each.requires_grad and each.storages[0] in written for each in values_in((event.args, event.kwargs))
            ):
                found[event.fqn] = (
                    "it writes into what it takes, which torch refuses in a unit; x = x + y instead of x += y works"
                )
            for each in values_in(event.result):
                if each.requires_grad and each.is_view:
                    views.setdefault(each.storages[0], []).append(event.fqn)
        if event.children:
            continue
        for fqn in (fqn for storage in written for fqn in views.get(storage, ())):
            if not f"{event.fqn}.".startswith(f"{fqn}."):
                why = f"it returns a view, which loses FSDP's hook where {event.fqn or model_class} writes into it"
                found.setdefault(fqn, f"{why}; x = x + y instead of x += y works")
    return found


def _read(model: nn.Module, calls: Calls, fqns: Sequence[str]) -> dict[str, str]:
    """Return modules of which a function outside reads a parameter -> why they cannot be units.

    Args:
        fqns: of the modules.
    """
    holders: dict[int, list[str]] = {}
    for fqn in fqns:
        for parameter in model.get_submodule(fqn).parameters():
            holders.setdefault(id(parameter), []).append(fqn)
    found: dict[str, str] = {}
    for event in calls.events:
        if event.is_module:
            continue
        for name in (each.fqn for each in attributes_in((event.args, event.kwargs)) if each.fqn in calls.parameters):
            units = holders.get(id(calls.parameters[name]), ())
            if any(f"{event.fqn}.".startswith(f"{fqn}.") for fqn in units):
                continue
            why = f"{event.fqn or type(model).__name__} reads {name}, which a unit gathers for its own forward alone"
            found.update((fqn, why) for fqn in units if fqn not in found)
    return found


def _is_layer(row: LayerInfo) -> bool:
    """Return True if a module calls no module, apart from parametrizations."""
    others = [each for each in row.children if not isinstance(each.module, ParametrizationList)]
    return all(not each.executed and _is_layer(each) for each in others)  # a ModuleList is not executed


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
    used: Container[int],
) -> list[tuple[int, int]]:
    """Return the bytes that each unit gathers, and the bytes of gradients that it reduces; the root is the last unit.

    FSDP pads the rows of each parameter to a multiple of the ranks. It reduces no gradient of a parameter that the
    forward does not use.

    Args:
        shapes: id of a parameter -> its shape after tensor and expert parallelism.
        dtype: of gathered parameters; gradients are then reduced in float32. None: their own.
        used: ids of the parameters that the forward uses.
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
            if id(parameter) in used:
                reduced += padded * (parameter.itemsize if dtype is None else 4) * parameter.requires_grad
        found.append((gathered, reduced))
    return found


def _names(model: nn.Module) -> dict[str, int]:
    return {name: id(each) for name, each in model.named_parameters(remove_duplicate=False)}


def _places(model: nn.Module, fqns: Sequence[str]) -> dict[str, str]:
    """Return the prefixes of names in modules, under each name that a module has -> the FQN among ``fqns``."""
    blocks = {id(model.get_submodule(fqn)): fqn for fqn in fqns}
    named = ((fqn, blocks.get(id(module))) for fqn, module in model.named_modules(remove_duplicate=False))
    return {f"{fqn}.": block for fqn, block in named if block is not None}


def _elements(model: nn.Module, fqn: str) -> int:
    return sum(each.numel() for each in model.get_submodule(fqn).parameters())
