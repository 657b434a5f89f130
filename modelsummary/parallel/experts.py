"""Experts that can be divided over ranks by their number.

Experts are stacked in the first dimension of a module's parameters, or they are modules in a list. Every rank takes all
tokens, runs its own experts, and results are summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from modelsummary.parallel.function_names import Families
from modelsummary.parallel.placements import Blocked
from modelsummary.parallel.record_calls import Calls
from modelsummary.parallel.regions import is_stack, summed_arguments
from modelsummary.parallel.rules import DROPOUT_LAYERS
from modelsummary.record.events import Event, Value, attributes_in, values_in

__all__ = ["ExpertList", "Experts", "StackedExperts", "find_experts", "routing_of"]

_ROUTES = frozenset({"softmax", "sigmoid", "topk", "max", "argmax", "sort", "argsort"})


@dataclass(frozen=True)
class StackedExperts:
    """A module whose parameters hold all experts in their first dimension.

    Attributes:
        fqn: of the module.
        number: of experts.
        summed: arguments that are floating point tensors.
        parameters: names of its parameters that hold experts in their first dimension.
        shared: names of its other parameters, and of its modules' parameters, which all experts share.
        events: its calls.
    """

    fqn: str
    number: int
    summed: tuple[int | str, ...]
    parameters: tuple[str, ...]
    shared: tuple[str, ...]
    events: tuple[Event, ...]


@dataclass(frozen=True)
class ExpertList:
    """A list of equal modules, to which a router sends tokens.

    Attributes:
        fqn: of the list.
        number: of experts.
        width: last dimension of what an expert returns.
        draws: an expert draws random numbers.
        events: the calls of experts.
    """

    fqn: str
    number: int
    width: int
    draws: bool
    events: tuple[Event, ...]


@dataclass
class Experts:
    """The experts of a model.

    Attributes:
        stacked: modules that hold all their experts in each parameter.
        lists: lists of modules.
        reasons: FQN of a module with experts that cannot be divided -> why.
    """

    stacked: list[StackedExperts] = field(default_factory=list)
    lists: list[ExpertList] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)


def find_experts(calls: Calls) -> Experts:
    """Return the experts of a recorded model."""
    experts = Experts()
    events: dict[str, list[Event]] = {}
    for event in calls.record.root.walk():
        if event.is_module:
            events.setdefault(event.fqn, []).append(event)
    for fqn, module in calls.modules.items():
        try:
            if is_stack(module) and all(event in calls.entered for event in events.get(fqn, [])) and fqn in events:
                n_experts = _number_of_experts(module, events[fqn])
                if n_experts:
                    experts.stacked.append(_stacked(calls, fqn, n_experts, events[fqn]))
            elif isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                names = [f"{fqn}.{name}" if fqn else name for name in module._modules]
                members = {name: events.get(name, []) for name in names}
                if _are_experts(calls, members):
                    experts.lists.append(_list(calls, fqn, members))
                else:
                    _check_equal(calls, fqn, members)
        except Blocked as blocked:
            experts.reasons[fqn] = str(blocked)
    experts.stacked += _uncalled(calls, experts.stacked, set(calls.modules) - set(events))
    return experts


# ------------------------------------------------------------------------------------------------ stacked


def _number_of_experts(module: nn.Module, events: Sequence[Event]) -> int:
    """Return the number of experts in a module's stacked parameters, which a router scores; 0 without a router."""
    around = [event.parent or event for event in events]
    around += [event.parent for event in around if event.parent is not None]
    scored = {
        size
        for event in around
        for inner in event.walk()
        if not inner.is_module and inner.name in _ROUTES
        for value in values_in(inner.args)[:1]
        for size in value.shape
    }
    sizes = [
        parameter.shape[0]
        for parameter in module._parameters.values()
        if parameter is not None and parameter.dim() >= 3
    ]
    return next((size for size in sizes if size > 1 and size in scored), 0)


def _stacked(calls: Calls, fqn: str, n_experts: int, events: Sequence[Event]) -> StackedExperts:
    """Return the stacked experts of a module. Raises ``Blocked``."""
    module = calls.modules[fqn]
    tensors = {name: tensor for name, tensor in module._parameters.items() if tensor is not None}
    parameters = tuple(name for name, tensor in tensors.items() if tensor.shape[:1] == (n_experts,))
    shared = tuple(name for name, _ in module.named_parameters() if name not in parameters)
    for name in (name for name in calls.modules if f"{name}.".startswith(f"{fqn}.")):
        _check_unshared(calls, name, fqn)
    for event in events:
        _check_gradients(calls, event)
    return StackedExperts(fqn, n_experts, tuple(summed_arguments(events[0])), parameters, shared, tuple(events))


def _check_unshared(calls: Calls, name: str, experts: str) -> None:
    """Raise ``Blocked`` if a parameter of the module ``name`` is held or taken outside of the experts around it."""
    users = calls.holders[name] | calls.users.get(name, set())
    if not all(f"{user}.".startswith(f"{experts}.") for user in users):
        raise Blocked(f"another module or function takes a parameter of {name}, too; parameters of its own work")


def routing_of(event: Event) -> tuple[int | str, int | str]:
    """Return the arguments with the numbers of experts and with their weights. Raises ``Blocked``."""
    arguments = [(key, value) for key, value in (*enumerate(event.args), *event.kwargs.items())]
    tensors = [(key, value) for key, value in arguments if isinstance(value, Value)]
    where = event.fqn or "the model"
    numbers = [(key, value) for key, value in tensors if value.dtype in (torch.int64, torch.int32)]
    if len(numbers) != 1:
        raise Blocked(
            f"{where} has {len(numbers)} arguments that are integer tensors, expected one: the numbers of the "
            "experts that tokens go to; a router outside of the module works"
        )
    ((index, chosen),) = numbers
    weights = [key for key, value in tensors if value.dtype.is_floating_point and value.shape == chosen.shape]
    if len(weights) != 1:
        raise Blocked(
            f"{where} has {len(weights)} arguments with the shape {chosen.shape} of expert numbers, expected one: "
            "the weights of these experts; a router outside of the module works"
        )
    return index, weights[0]


def _check_gradients(calls: Calls, module: Event) -> None:
    """Raise ``Blocked`` if gradients enter or leave a call by more than arguments, parameters and results."""
    begin, end = calls.entered[module]
    arguments, results = set(values_in((module.args, module.kwargs))), set(values_in(module.result))
    for event in calls.events[begin:end]:
        if event.checkpointed:
            raise Blocked(f"{module.fqn} recomputes activations itself; parallel_plan(checkpoint=...) works")
        for value in values_in((event.args, event.kwargs)):
            maker = calls.maker.get(value)
            is_outside = maker is None or calls.position[maker] < begin
            if is_outside and value.requires_grad and value not in arguments:
                raise Blocked(
                    f"{event.name} in {event.fqn} takes a tensor from outside of {module.fqn}; pass it as an argument"
                )
        for attribute in attributes_in((event.args, event.kwargs)):
            if not attribute.fqn.startswith(f"{module.fqn}." if module.fqn else "") and calls.needs_grad(attribute):
                raise Blocked(
                    f"each rank would have a part of the gradient of {attribute.fqn}, which is outside of "
                    f"{module.fqn}; parameters of the module itself work"
                )
        for value in values_in(event.result):
            if value.requires_grad and value not in results and calls.last_use.get(value, begin) >= end:
                if value in calls.kept:
                    raise Blocked(f"{module.fqn} keeps results of experts in an attribute; returning them works")
                raise Blocked(
                    f"the model takes what {event.name} makes in {module.fqn}, which is not among its results; "
                    "return it"
                )


def _uncalled(calls: Calls, stacked: Sequence[StackedExperts], uncalled: Collection[str]) -> list[StackedExperts]:
    """Return experts that the forward does not call, such as experts of images, by the called ones of the class."""
    more = []
    for fqn in (fqn for fqn in calls.modules if fqn in uncalled):
        module = calls.modules[fqn]
        like = next((experts for experts in stacked if type(calls.modules[experts.fqn]) is type(module)), None)
        if like is not None and all(module._parameters.get(name) is not None for name in like.parameters):
            n_experts = module.get_parameter(like.parameters[0]).shape[0]
            more.append(replace(like, fqn=fqn, number=n_experts, events=()))
    return more


# -------------------------------------------------------------------------------------------------- lists


def _are_experts(calls: Calls, members: dict[str, list[Event]]) -> bool:
    """Return True if a router sends tokens to these modules.

    They are equal, none takes what another one made, and the scores of a router have as many elements.

    Args:
        members: FQN of a module of a list -> its calls.
    """
    modules = [calls.modules.get(fqn) for fqn in members]
    called = [event for events in members.values() for event in events]
    if (
        len(modules) < 2
        or not called
        or len({_structure(module) for module in modules}) > 1
        or not _structure(modules[0])
    ):
        return False
    callers = dict.fromkeys(event.parent for event in called)
    return all(caller is not None and _is_routed(caller, members) for caller in callers)


def _check_equal(calls: Calls, fqn: str, events: dict[str, list[Event]]) -> None:
    """Raise ``Blocked`` if a list holds experts and another module, such as a dropout."""
    structures = {name: _structure(calls.modules.get(name)) for name in events}
    for structure in set(structures.values()):
        equal = {name: events[name] for name, other in structures.items() if other == structure}
        if _are_experts(calls, equal):
            other = next((name for name in events if name not in equal), fqn)
            raise Blocked(f"{other} differs from the experts of {fqn}; a list of experts alone works")


def _structure(module: nn.Module | None) -> tuple[Any, ...]:
    """Return the class of a module, with names and shapes of its parameters; empty without parameters."""
    if module is None:
        return ()
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())
    return (type(module), shapes) if shapes else ()


def _is_routed(caller: Event, members: dict[str, list[Event]]) -> bool:
    results: set[Value] = set()
    for event in caller.children:
        taken = values_in((event.args, event.kwargs))
        if event.fqn in members and event.is_module:
            if results.intersection(taken):
                return False
            results.update(values_in(event.result))
        elif results.intersection(taken):
            results.update(values_in(event.result))
    around = caller.parent or caller
    return any(_scores(event, len(members)) for event in _outside(around, members))


def _outside(event: Event, members: dict[str, list[Event]]) -> Iterator[Event]:
    """Yield the functions under a call, except the functions of experts."""
    for child in event.children:
        if not child.is_module:
            yield child
        elif child.fqn not in members:
            yield from _outside(child, members)


def _scores(event: Event, n_experts: int) -> bool:
    """Return True if a function scores as many experts or chooses among them."""
    operands = values_in(event.args)
    return event.name in _ROUTES and bool(operands) and operands[0].shape[-1:] == (n_experts,)


def _list(calls: Calls, fqn: str, members: dict[str, list[Event]]) -> ExpertList:
    """Return the experts of a list. Raises ``Blocked``."""
    for name, inner in calls.modules.items():
        expert = next((member for member in members if f"{name}.".startswith(f"{member}.")), None)
        if expert is None:
            continue
        _check_unshared(calls, name, expert)
        if any(buffer is not None for buffer in inner._buffers.values()):
            raise Blocked(
                f"{name} has buffers, which ranks without that expert would lack; experts without buffers work"
            )
    widths: set[int] = set()
    events = [event for events in members.values() for event in events]
    for event in events:
        inputs, outputs = values_in((event.args, event.kwargs)), values_in(event.result)
        if len(event.args) != 1 or event.kwargs or inputs != [event.args[0]] or outputs != [event.result]:
            raise Blocked(
                f"{event.fqn} takes {len(inputs)} tensors and returns {len(outputs)}; one by position and "
                "one result work"
            )
        if inputs[0].dtype != outputs[0].dtype or inputs[0].shape[:-1] != outputs[0].shape[:-1]:
            raise Blocked(
                f"{event.fqn} takes {inputs[0].shape} {inputs[0].dtype} and returns {outputs[0].shape} "
                f"{outputs[0].dtype}; an expert that changes only the features works"
            )
        widths.add(outputs[0].shape[-1])
    if len(widths) > 1:
        raise Blocked(f"the experts of {fqn} return {', '.join(map(str, sorted(widths)))} features; equal numbers work")
    draws = any(
        isinstance(calls.modules[inner.fqn], DROPOUT_LAYERS) if inner.is_module else inner.name in Families.RANDOM
        for event in events
        for inner in event.walk()
    )
    return ExpertList(fqn, len(members), widths.pop(), draws, tuple(events))
