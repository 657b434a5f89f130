"""Experts that can be divided over ranks by their number.

Experts are stacked in the first dimension of a module's parameters, or they are modules in a list. Every rank takes all
tokens, runs its own experts, and results are summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from modelsummary.parallel.layouts import Blocked
from modelsummary.parallel.record_calls import Calls
from modelsummary.parallel.stacked import is_stack, summed_arguments
from modelsummary.record.events import Event, Value, attributes_in, values_in

__all__ = ["ExpertList", "Experts", "StackedExperts", "find_experts"]

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
        events: the calls of experts.
    """

    fqn: str
    number: int
    width: int
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
    found = Experts()
    events: dict[str, list[Event]] = {}
    for event in calls.record.root.walk():
        if event.is_module:
            events.setdefault(event.fqn, []).append(event)
    for fqn, module in calls.modules.items():
        try:
            if is_stack(module) and all(event in calls.entered for event in events.get(fqn, [])) and fqn in events:
                number = _number_of_experts(module, events[fqn])
                if number:
                    found.stacked.append(_stacked(calls, fqn, number, events[fqn]))
            elif isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                names = [f"{fqn}.{name}" if fqn else name for name in module._modules]
                own = {name: events.get(name, []) for name in names}
                if _are_experts(calls, own):
                    found.lists.append(_list(calls, fqn, own))
                else:
                    _check_equal(calls, fqn, own)
        except Blocked as blocked:
            found.reasons[fqn] = str(blocked)
    found.stacked += _uncalled(calls, found.stacked, set(calls.modules) - set(events))
    return found


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
    sizes = [each.shape[0] for each in module._parameters.values() if each is not None and each.dim() >= 3]
    return next((size for size in sizes if size > 1 and size in scored), 0)


def _stacked(calls: Calls, fqn: str, number: int, events: Sequence[Event]) -> StackedExperts:
    """Return the stacked experts of a module. Raises ``Blocked``."""
    module = calls.modules[fqn]
    own = {name: each for name, each in module._parameters.items() if each is not None}
    parameters = tuple(name for name, each in own.items() if each.shape[:1] == (number,))
    shared = tuple(name for name, _ in module.named_parameters() if name not in parameters)
    for name in (each for each in calls.modules if f"{each}.".startswith(f"{fqn}.")):
        users = calls.holders[name] | calls.users.get(name, set())
        if any(not f"{user}.".startswith(f"{fqn}.") for user in users):
            raise Blocked(f"another module or function takes parameters of {name}, too; parameters of its own work")
    for event in events:
        _check_gradients(calls, event)
    return StackedExperts(fqn, number, tuple(summed_arguments(events[0])), parameters, shared, tuple(events))


def _check_gradients(calls: Calls, module: Event) -> None:
    """Raise ``Blocked`` if gradients enter or leave a call by more than arguments, parameters and results."""
    begin, end = calls.entered[module]
    given, results = set(values_in((module.args, module.kwargs))), set(values_in(module.result))
    for event in calls.events[begin:end]:
        if event.checkpointed:
            raise Blocked(f"{module.fqn} recomputes activations itself; parallel_plan(checkpoint=...) works")
        for value in values_in((event.args, event.kwargs)):
            maker = calls.maker.get(value)
            is_outside = maker is None or calls.position[maker] < begin
            if is_outside and value.requires_grad and value not in given:
                raise Blocked(
                    f"{event.name} in {event.fqn} takes a tensor from outside of {module.fqn}; pass it as an argument"
                )
        for each in attributes_in((event.args, event.kwargs)):
            if not each.fqn.startswith(f"{module.fqn}." if module.fqn else "") and calls.needs_grad(each):
                raise Blocked(
                    f"each rank would have a part of the gradient of {each.fqn}, which is outside of {module.fqn}; "
                    "parameters of the module itself work"
                )
        for value in values_in(event.result):
            if value.requires_grad and value not in results and calls.last_use.get(value, begin) >= end:
                if value in calls.kept:
                    raise Blocked(f"{module.fqn} keeps results of experts in an attribute; returning them works")
                raise Blocked(
                    f"the model takes what {event.name} makes in {module.fqn}, which is not among its results; "
                    "return it"
                )


def _uncalled(calls: Calls, found: Sequence[StackedExperts], uncalled: Collection[str]) -> list[StackedExperts]:
    """Return experts that the forward does not call, such as experts of images, by the called ones of the class."""
    more = []
    for fqn in (each for each in calls.modules if each in uncalled):
        module = calls.modules[fqn]
        like = next((each for each in found if type(calls.modules[each.fqn]) is type(module)), None)
        if like is not None and all(module._parameters.get(name) is not None for name in like.parameters):
            number = module.get_parameter(like.parameters[0]).shape[0]
            more.append(replace(like, fqn=fqn, number=number, events=()))
    return more


# -------------------------------------------------------------------------------------------------- lists


def _are_experts(calls: Calls, own: dict[str, list[Event]]) -> bool:
    """Return True if a router sends tokens to these modules.

    They are equal, none takes what another one made, and the scores of a router have as many elements.

    Args:
        own: FQN of a module of a list -> its calls.
    """
    modules = [calls.modules.get(fqn) for fqn in own]
    called = [event for events in own.values() for event in events]
    if len(modules) < 2 or not called or len({_structure(each) for each in modules}) > 1 or not _structure(modules[0]):
        return False
    callers = dict.fromkeys(event.parent for event in called)
    return all(caller is not None and _is_routed(caller, own) for caller in callers)


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
    shapes = tuple((name, tuple(each.shape)) for name, each in module.named_parameters())
    return (type(module), shapes) if shapes else ()


def _is_routed(caller: Event, own: dict[str, list[Event]]) -> bool:
    made: set[Value] = set()
    for event in caller.children:
        taken = values_in((event.args, event.kwargs))
        if event.fqn in own and event.is_module:
            if made.intersection(taken):
                return False
            made.update(values_in(event.result))
        elif made.intersection(taken):
            made.update(values_in(event.result))
    around = caller.parent or caller
    return any(_scores(event, len(own)) for event in _outside(around, own))


def _outside(event: Event, own: dict[str, list[Event]]) -> Iterator[Event]:
    """Yield the functions under a call, except the functions of experts."""
    for child in event.children:
        if not child.is_module:
            yield child
        elif child.fqn not in own:
            yield from _outside(child, own)


def _scores(event: Event, number: int) -> bool:
    """Return True if a function scores as many experts or chooses among them."""
    given = values_in(event.args)
    return event.name in _ROUTES and bool(given) and given[0].shape[-1:] == (number,)


def _list(calls: Calls, fqn: str, own: dict[str, list[Event]]) -> ExpertList:
    """Return the experts of a list. Raises ``Blocked``."""
    for name, inner in calls.modules.items():
        expert = next((each for each in own if f"{name}.".startswith(f"{each}.")), None)
        if expert is None:
            continue
        outside = [each for each in calls.holders[name] if not f"{each}.".startswith(f"{expert}.")]
        if outside or any(not f"{user}.".startswith(f"{expert}.") for user in calls.users.get(name, ())):
            raise Blocked(f"another module or function takes a parameter of {name}, too; parameters of its own work")
        if any(each is not None for each in inner._buffers.values()):
            raise Blocked(
                f"{name} has buffers, which ranks without that expert would lack; experts without buffers work"
            )
    widths: set[int] = set()
    events = [event for each in own.values() for event in each]
    for event in events:
        given, made = values_in((event.args, event.kwargs)), values_in(event.result)
        if len(event.args) != 1 or event.kwargs or given != [event.args[0]] or made != [event.result]:
            raise Blocked(
                f"{event.fqn} takes {len(given)} tensors and returns {len(made)}; one by position and one result work"
            )
        if given[0].dtype != made[0].dtype or given[0].shape[:-1] != made[0].shape[:-1]:
            raise Blocked(
                f"{event.fqn} takes {given[0].shape} {given[0].dtype} and returns {made[0].shape} {made[0].dtype}; an "
                "expert that changes only the features works"
            )
        widths.add(made[0].shape[-1])
    if len(widths) > 1:
        raise Blocked(f"the experts of {fqn} return {', '.join(map(str, sorted(widths)))} features; equal numbers work")
    return ExpertList(fqn, len(own), widths.pop(), tuple(events))
