"""FSDP units: what is gathered together."""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from modelsummary.errors import InputError
from modelsummary.layer_info import LayerInfo
from modelsummary.memory.checkpointing import blocks_of
from modelsummary.parallel.record_calls import Calls
from modelsummary.record.events import Event, Record, attributes_in, values_in

__all__ = ["fsdp_units", "read_from_outside"]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_GATHERED = "which a unit gathers for its own forward alone"
_LARGE = 100_000_000  # parameters from which one layer is a unit, as in torch's size_based_auto_wrap_policy


def fsdp_units(model: nn.Module, root: LayerInfo, calls: Calls, apart: Mapping[int, str]) -> dict[str, Any]:
    """Return the units of FSDP, as fields of ``ParallelPlan``. The root gathers what is in none.

    Candidates are the repeated blocks with parameters, or the children of a model without such blocks, and the modules
    that are called before, between and behind them. Blocks that share a parameter are one unit; so is what is called
    behind all blocks, such as the final norm and the output head. A candidate is not a unit if a tensor that it takes
    or returns is written in place, if a function outside of it reads one of its parameters, or calls one of its layers,
    which FSDP has not gathered then, if it shares a parameter with the root, or is one small layer without blocks
    around it. A module outside of the blocks is not a unit either if it is called several times or shares a parameter,
    and needs a tenth of a block's parameters. Blocks that the forward does not call, such as an encoder of images where
    the input is text, are units behind all others.

    Args:
        apart: id of a parameter that is sharded by itself, in no unit -> FQN of the module around it.

    Raises:
        InputError: a parameter has no dimensions, before torch 2.7.
    """
    scalar = next((name for name, parameter in model.named_parameters() if not parameter.dim()), None)
    if scalar is not None and torch.__version__ < "2.7":
        raise InputError(
            f"{scalar!r} has no dimensions, and fully_shard of torch {torch.__version__} cannot leave it out; give it "
            "the shape (1,), or use torch >= 2.7"
        )
    rows = sorted(blocks_of(root), key=lambda row: math.inf if row.call_order is None else row.call_order)
    called = {row.fqn: row for row in rows if not row.fqn.endswith(")")}
    uncalled = [row.fqn for row in _uncalled_blocks(root, called, _used_parameters(calls))]
    blocks = [fqn for fqn in dict.fromkeys([*called, *uncalled]) if fqn and _elements(model, fqn)]
    ends = _ends(root, called)
    outside = [row.fqn for row in ends if _elements(model, row.fqn)]
    begin = max((row.call_order or 0 for row in root.walk() if row.fqn in called), default=0)
    behind = [row.fqn for row in ends if row.fqn in outside and (row.call_order or 0) > begin]
    candidates = [*blocks, *outside]
    reasons = _written(calls.record, candidates, type(model).__name__) | read_from_outside(model, calls, candidates)
    for fqn in (fqn for fqn in blocks if fqn in called):
        if _is_layer(called[fqn]) and _elements(model, fqn) < _LARGE:
            reasons[fqn] = f"one layer of fewer than {_LARGE:,} parameters; a block of several layers can be a unit"
    for fqn in (fqn for fqn in outside if calls.n_calls[fqn] != 1):
        reasons.setdefault(fqn, f"{calls.n_calls[fqn]} calls of a module that is not a repeated block; one works")
    holders = _holders(model, candidates)
    for names in holders:
        for fqn in (fqn for fqn in outside if len(names) > 1 and fqn in names and not names.keys() <= {*behind}):
            other = next(name for holder, name in names.items() if holder != fqn)
            reasons[fqn] = f"{names[fqn]} is {other}, too, and is gathered from the first of these calls to the last"
    # A collective of its own takes longer than the memory is worth.
    small = max((_elements(model, fqn) for fqn in blocks if fqn in called), default=0) / 10
    last = [fqn for fqn in behind if fqn not in reasons]
    last = last if sum(_elements(model, fqn) for fqn in last) >= small else []
    for fqn in (fqn for fqn in outside if fqn not in last and _elements(model, fqn) < small):
        reasons[fqn] = ""
    groups = {fqn: {fqn} for fqn in candidates if fqn not in reasons} | {fqn: {*last} for fqn in last}
    in_root: set[str] = set()
    for names in holders:
        shared = [fqn for fqn in names if fqn in groups]
        if len(shared) < len(names):
            in_root.update(shared)
        merged = set[str]().union(*(groups[fqn] for fqn in shared))
        groups.update(dict.fromkeys(merged, merged))
    for fqn in groups.keys() & in_root:
        why = "it shares a parameter with a module in no unit; a parameter of its own works"
        reasons |= dict.fromkeys(groups[fqn], why)
    orders = {row.fqn: row.call_order for row in root.walk() if row.call_order is not None and not row.call_index}
    units: list[list[str]] = []
    for fqn in sorted(groups, key=lambda fqn: orders.get(fqn, math.inf)):
        if fqn not in reasons and not any(fqn in unit for unit in units):
            units.append([other for other in candidates if other in groups[fqn]])
    last = [] if any(fqn in reasons for fqn in last) else last
    inside = tuple({f"{fqn}." for fqn in apart.values()})
    units = [[fqn for fqn in unit if not f"{fqn}.".startswith(inside)] for unit in units]
    units = [unit for unit in units if unit]
    held = {*apart, *(id(parameter) for fqn in chain(*units) for parameter in model.get_submodule(fqn).parameters())}
    return {
        "units": tuple(map(tuple, units)),
        "last_unit": tuple(fqn for fqn in last if not f"{fqn}.".startswith(inside)),
        "unit_calls": tuple(max(calls.n_calls[fqn] for fqn in unit) for unit in units),
        "root_gathers": any(parameter.dim() and id(parameter) not in held for parameter in model.parameters()),
        "gathered_with_root": {fqn: reasons[fqn] for fqn in candidates if reasons.get(fqn)},
    }


def _ends(root: LayerInfo, blocks: Collection[str]) -> list[LayerInfo]:
    """Return the outermost called modules outside of the blocks that hold no block, in the order of their calls."""
    ends = []
    inside = tuple(f"{fqn}." for fqn in blocks)
    pending = list(root.children)
    while pending:
        row = pending.pop()
        if row.fqn in blocks or row.call_index:
            continue
        if row.executed and not any(inner.fqn in blocks for inner in row.walk()):
            ends += [] if row.fqn.startswith(inside) else [row]
        else:
            pending.extend(row.children)
    return sorted(ends, key=lambda row: row.call_order or 0)


def _holders(model: nn.Module, fqns: Sequence[str]) -> list[dict[str | None, str]]:
    """Return for each parameter the modules that hold it -> a name of it there; None stands for the root."""
    modules = {id(model.get_submodule(fqn)): fqn for fqn in fqns}
    named = ((fqn, modules.get(id(module))) for fqn, module in model.named_modules(remove_duplicate=False))
    prefixes = {f"{name}.": fqn for name, fqn in named if fqn is not None}
    holders: dict[int, dict[str | None, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holder = next((fqn for prefix, fqn in prefixes.items() if name.startswith(prefix)), None)
        holders.setdefault(id(parameter), {}).setdefault(holder, name)
    return list(holders.values())


def _written(record: Record, fqns: Container[str], model_class: str) -> dict[str, str]:
    """Return modules that cannot be units because a tensor that they take or return is written in place -> why.

    FSDP hands a unit views of what it takes, made by a function of its own, into which autograd lets nobody write. It
    registers a hook on what a unit returns; a view gets a new node in the graph when it is written, without the hook
    that gathers the parameters for the backward.

    Args:
        fqns: of the modules.
    """
    reasons: dict[str, str] = {}
    views: dict[int, list[str]] = {}  # id of memory -> modules that returned a view of it
    for event in record.root.walk():
        written = event.writes[0] if event.writes else frozenset()
        if event.is_module and event.fqn in fqns:
            if any(
                value.requires_grad and value.storages[0] in written for value in values_in((event.args, event.kwargs))
            ):
                reasons[event.fqn] = (
                    "it writes into what it takes, which torch refuses in a unit; x = x + y instead of x += y works"
                )
            for value in values_in(event.result):
                if value.requires_grad and value.is_view:
                    views.setdefault(value.storages[0], []).append(event.fqn)
        if event.children:
            continue
        for fqn in (fqn for storage in written for fqn in views.get(storage, ())):
            if not f"{event.fqn}.".startswith(f"{fqn}."):
                why = f"it returns a view, which loses FSDP's hook where {event.fqn or model_class} writes into it"
                reasons.setdefault(fqn, f"{why}; x = x + y instead of x += y works")
    return reasons


def read_from_outside(model: nn.Module, calls: Calls, fqns: Sequence[str]) -> dict[str, str]:
    """Return modules of which a function outside reads a parameter, or calls a layer -> what does so.

    Args:
        fqns: of the modules.
    """
    holders: dict[int, list[str]] = {}
    for fqn in fqns:
        for parameter in model.get_submodule(fqn).parameters():
            holders.setdefault(id(parameter), []).append(fqn)
    reasons: dict[str, str] = {}
    for event in calls.events:
        around = list(_and_callers(event))
        running = {call.fqn for call in around}
        if event.is_module:
            for fqn in (fqn for fqn in fqns if event.fqn.startswith(f"{fqn}.") and fqn not in running):
                called, caller = next(
                    (call, call.parent) for call in reversed(around) if call.fqn.startswith(f"{fqn}.")
                )
                who = (caller.fqn if caller is not None else "") or type(model).__name__
                if _elements(model, event.fqn):
                    reasons.setdefault(fqn, f"{who} calls {called.fqn}, {_GATHERED}")
            continue
        for name in (
            attribute.fqn
            for attribute in attributes_in((event.args, event.kwargs))
            if attribute.fqn in calls.parameters
        ):
            units = holders.get(id(calls.parameters[name]), ())
            if running.isdisjoint(units):
                why = f"{event.fqn or type(model).__name__} reads {name}, {_GATHERED}"
                reasons.update((fqn, why) for fqn in units if fqn not in reasons)
    return reasons


def _and_callers(event: Event) -> Iterator[Event]:
    """Yield a call and the calls around it, the innermost first."""
    caller: Event | None = event
    while caller is not None:
        yield caller
        caller = caller.parent


def _is_layer(row: LayerInfo) -> bool:
    """Return True if a module calls no module, apart from parametrizations."""
    children = [child for child in row.children if not isinstance(child.module, ParametrizationList)]
    return all(not child.executed and _is_layer(child) for child in children)  # a ModuleList is not executed


def _used_parameters(calls: Calls) -> set[int]:
    """Return the ids of the parameters that a layer or a function of a recorded forward uses."""
    used: set[int] = set()
    for event in calls.events:
        if event.is_module:
            used.update(map(id, calls.modules[event.fqn].parameters()))
        else:
            taken = attributes_in((event.args, event.kwargs))
            used.update(id(calls.parameters[attribute.fqn]) for attribute in taken if attribute.fqn in calls.parameters)
    return used


def _uncalled_blocks(root: LayerInfo, called: Container[str], used: Container[int]) -> Iterator[LayerInfo]:
    """Yield the outermost modules in containers, with modules in them, of which the forward uses no parameter."""
    pending = list(reversed(root.children))
    while pending:
        row = pending.pop()
        in_container = row.parent_info is not None and isinstance(row.parent_info.module, _CONTAINERS)
        module = row.module
        is_block = in_container and bool(row.children) and not isinstance(module, _CONTAINERS)
        if module is not None and is_block and not any(inner.executed for inner in row.walk()):
            if not any(id(parameter) in used for parameter in module.parameters()):
                yield row
        elif row.fqn not in called:
            pending.extend(reversed(row.children))


def _elements(model: nn.Module, fqn: str) -> int:
    return sum(parameter.numel() for parameter in model.get_submodule(fqn).parameters())
