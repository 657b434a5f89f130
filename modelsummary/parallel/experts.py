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

from modelsummary.capture.templates import Attribute
from modelsummary.parallel.layouts import Blocked, FunctionCall, Needs, Operand, Sharded
from modelsummary.parallel.record_calls import Calls
from modelsummary.parallel.rules import layout_after
from modelsummary.parallel.stacked import PARTIAL, follow_partial, is_stack, summed_arguments
from modelsummary.record.events import Event, Value, attributes_in, values_in

__all__ = ["ExpertList", "Experts", "StackedExperts", "find_experts"]

_GROUPED = frozenset({"grouped_mm", "grouped_mm_fallback"})
_BY_NUMBER = _GROUPED | {"getitem", "index_select"}
_ROUTES = frozenset({"softmax", "sigmoid", "topk", "max", "argmax", "sort", "argsort"})
_EXPERTS = Sharded(0)


@dataclass(frozen=True)
class StackedExperts:
    """A module whose parameters hold all experts in their first dimension.

    Attributes:
        fqn: of the module.
        number: of experts.
        index: argument with the numbers of the experts that each token goes to: its position, or its name.
        weight: argument of the same shape, with the weights of these experts; the result is linear in it.
        summed: arguments that are floating point tensors.
        parameters: names of its parameters that hold experts in their first dimension.
        shared: names of its other parameters, and of its modules' parameters, which all experts share.
        only_compares: the forward compares the numbers with numbers of experts, and does nothing else with them.
        events: its calls.
    """

    fqn: str
    number: int
    index: int | str
    weight: int | str
    summed: tuple[int | str, ...]
    parameters: tuple[str, ...]
    shared: tuple[str, ...]
    only_compares: bool
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
                found.stacked.append(_stacked(calls, fqn, events[fqn]))
            elif isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                names = [f"{fqn}.{name}" if fqn else name for name in module._modules]
                own = {name: events.get(name, []) for name in names}
                if _are_experts(calls, own):
                    found.lists.append(_list(calls, fqn, own))
        except Blocked as blocked:
            found.reasons[fqn] = str(blocked)
    found.stacked += _uncalled(calls, found.stacked, set(calls.modules) - set(events))
    return found


# ------------------------------------------------------------------------------------------------ stacked


def _stacked(calls: Calls, fqn: str, events: Sequence[Event]) -> StackedExperts:
    """Return the stacked experts of a module. Raises ``Blocked``."""
    module = calls.modules[fqn]
    own = {name: each for name, each in module._parameters.items() if each is not None}
    number = next(each.shape[0] for each in own.values() if each.dim() >= 3)
    parameters = tuple(name for name, each in own.items() if each.shape[:1] == (number,))
    shared = tuple(name for name, _ in module.named_parameters() if name not in parameters)
    for name in (each for each in calls.modules if f"{each}.".startswith(f"{fqn}.")):
        users = calls.holders[name] | calls.users.get(name, set())
        if any(not f"{user}.".startswith(f"{fqn}.") for user in users):
            raise Blocked(f"another module or function takes parameters of {name}, too; parameters of its own work")
    routes = {_routing(event) for event in events}
    if len(routes) > 1:
        raise Blocked(
            f"the calls of {fqn} take expert numbers and weights as different arguments; equal arguments work"
        )
    ((index, weight),) = routes
    for event in events:
        _check_mixture(calls, event, argument(event, weight), {f"{fqn}.{name}" for name in parameters})
    chosen = [argument(event, index) for event in events]
    takers = {taker.name for value in chosen for taker in calls.takers.get(value, ()) if taker.fqn == fqn}
    summed = tuple(summed_arguments(events[0]))
    return StackedExperts(fqn, number, index, weight, summed, parameters, shared, takers == {"eq"}, tuple(events))


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


def argument(event: Event, position: int | str) -> Any:
    """Return the template of an argument of a module."""
    return event.kwargs[position] if isinstance(position, str) else event.args[position]


def _routing(event: Event) -> tuple[int | str, int | str]:
    """Return the arguments with the numbers of experts and with their weights. Raises ``Blocked``."""
    given = [(place, each) for place, each in (*enumerate(event.args), *event.kwargs.items())]
    tensors = [(place, each) for place, each in given if isinstance(each, Value)]
    numbers = [(place, each) for place, each in tensors if each.dtype in (torch.int64, torch.int32)]
    if len(numbers) != 1:
        raise Blocked(
            f"{event.fqn} has {len(numbers)} arguments that are integer tensors, expected one: the numbers of the "
            "experts that tokens go to; a router outside of the module works"
        )
    ((index, chosen),) = numbers
    weights = [place for place, each in tensors if each.dtype.is_floating_point and each.shape == chosen.shape]
    if len(weights) != 1:
        raise Blocked(
            f"{event.fqn} has {len(weights)} arguments with the shape {chosen.shape} of expert numbers, expected one: "
            "the weights of these experts"
        )
    return index, weights[0]


def _check_mixture(calls: Calls, module: Event, weight: Value, own: Collection[str]) -> None:
    """Check that a call takes experts by their number alone, and that its result is linear in their weights.

    Then it is a sum over experts, and an expert whose weight is zero adds nothing.

    Args:
        own: FQNs of the parameters that hold experts.

    Raises:
        Blocked: it does not.
    """
    begin, end = calls.entered[module]
    given = set(values_in((module.args, module.kwargs)))
    states: dict[Any, Sharded] = {weight: PARTIAL}

    def operand(leaf: Any) -> Operand | None:
        found = calls.operand(leaf, states.get)
        if found is None or not isinstance(leaf, Attribute):
            return found
        return replace(found, layout=_EXPERTS if leaf.fqn in own else None)

    for event in calls.events[begin:end]:
        for value in values_in((event.args, event.kwargs)):
            maker = calls.maker.get(value)
            is_outside = maker is None or calls.position[maker] < begin
            if is_outside and value.requires_grad and value not in given:
                raise Blocked(
                    f"{event.name} in {event.fqn} takes a tensor from outside of {module.fqn}; pass it as an argument"
                )
        for each in attributes_in((event.args, event.kwargs)):
            if not each.fqn.startswith(f"{module.fqn}.") and calls.needs_grad(each):
                raise Blocked(
                    f"each rank would have a part of the gradient of {each.fqn}, which is outside of {module.fqn}; "
                    "parameters of the module itself work"
                )
        state = _layer_state(calls, event, states) if event.is_module else _function_state(calls, event, operand)
        if state is not None:
            states.update(dict.fromkeys(values_in(event.result), state))
    results = values_in(module.result)
    if len(results) != 1 or states.get(results[0]) != PARTIAL:
        raise Blocked(
            f"the result of {module.fqn} is not one tensor that is linear in the weights of shape {weight.shape}; a "
            "sum over experts, each times its weight, can be divided"
        )


def _layer_state(calls: Calls, event: Event, states: dict[Any, Sharded]) -> Sharded | None:
    """Return the state of what a layer returns; None if it takes no weights."""
    taken = {states[each] for each in values_in((event.args, event.kwargs)) if each in states}
    if not taken:
        return None
    if not isinstance(calls.modules[event.fqn], nn.Identity):
        raise Blocked(
            f"{event.fqn} ({type(calls.modules[event.fqn]).__name__}) takes the weights of experts, or a product with "
            "them; functions that are linear in the weights work"
        )
    return PARTIAL


def _function_state(calls: Calls, event: Event, operand: Any) -> Sharded | None:
    """Return ``PARTIAL`` for what is linear in the weights, and the layout of all experts; None for anything else."""
    call = FunctionCall(event, operand, set())
    layouts = {each.layout for each in call.operands if each.layout is not None}
    if not layouts:
        return None
    if PARTIAL in layouts:
        if call.name in _GROUPED and call.first.layout == PARTIAL:
            return PARTIAL  # linear in its rows, and each expert has its own
        follow_partial(call)
        added = call.operands if call.name in ("add", "iadd", "sub", "isub") else ()
        added = call.operands[:1] if call.name in ("index_add", "scatter_add") else added
        if any(each.layout is None and not calls.is_zeros(each.leaf) for each in added):
            raise Blocked(
                f"{call.at} adds a tensor without the weights of experts, which each rank would add; add it elsewhere"
            )
        return PARTIAL
    if call.name in _BY_NUMBER:
        _check_by_number(call)
        return None
    try:
        layout = layout_after(call)
    except (Blocked, Needs):
        layout = None
    if layout != _EXPERTS:
        raise Blocked(
            f"{call.at} takes all experts at once; functions that take experts by their number can be divided"
        )
    return layout


def _check_by_number(call: FunctionCall) -> None:
    """Check that a function takes experts by their number. Raises ``Blocked``."""
    if call.name == "getitem":
        index = call.event.args[1]
        first = index[0] if isinstance(index, (tuple, list)) else index
        fits = type(first) is int or (isinstance(first, Value) and first.dtype in (torch.int64, torch.int32))
    elif call.name == "index_select":
        fits = call.argument(1, "dim") == 0
    else:
        fits = call.first.layout is None
    if not fits:
        raise Blocked(
            f"{call.at} does not take experts by their number; an integer index, or a tensor of integers, works"
        )


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
