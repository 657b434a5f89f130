"""How experts are divided over ranks: styles, attributes that change, and the collectives of a step."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from modelsummary.capture.templates import leaves_of
from modelsummary.errors import InputError
from modelsummary.parallel.experts import ExpertList, Experts, StackedExperts, argument, find_experts
from modelsummary.parallel.layouts import Blocked
from modelsummary.parallel.local_check import LocalAttribute
from modelsummary.parallel.plan import Collective, LayerPlan
from modelsummary.parallel.record_calls import Calls
from modelsummary.record.events import Value, values_in

__all__ = ["absent_parameters", "expert_plans", "uncalled_plans"]

# Stacked experts of transformers skip the experts of other ranks if this attribute of their module is True.
_SKIPS = "_is_expert_parallel"
_COUNTING = frozenset({"one_hot", "histc", "bincount", "arange"})


def expert_plans(calls: Calls, n_ranks: int) -> tuple[list[LayerPlan], list[LocalAttribute], dict[str, str]]:
    """Return how experts are divided, the attributes that change, and why other experts stay whole.

    Raises:
        InputError: the ranks do not divide the number of experts, or there are none that can be divided.
    """
    experts = find_experts(calls)
    plans, attributes = [], []
    for stacked in experts.stacked:
        try:
            own = _attributes(calls.modules[stacked.fqn], stacked, n_ranks)
        except Blocked as blocked:
            experts.reasons[stacked.fqn] = str(blocked)
            continue
        attributes += own
        plans.append(_stacked_plan(calls, stacked, n_ranks, skips=any(each.name == _SKIPS for each in own)))
    plans += [_list_plan(calls, each, n_ranks) for each in experts.lists]
    if not plans:
        name = type(calls.model).__name__
        why = next((f"; {fqn or name}: {reason}" for fqn, reason in experts.reasons.items()), "")
        raise InputError(f"expert={n_ranks}: {name} has no experts that can be divided{why}")
    _check_divides(experts, [plan.fqn for plan in plans], n_ranks)
    return plans, attributes, experts.reasons


def uncalled_plans(calls: Calls, layers: Sequence[LayerPlan]) -> list[LayerPlan]:
    """Return plans for experts in lists to which no token went, like the plans of an expert beside them."""
    found = []
    for experts in find_experts(calls).lists:
        names = [f"{experts.fqn}.{name}" if experts.fqn else name for name in calls.modules[experts.fqn]._modules]
        called = {event.fqn for event in experts.events}
        like = next(name for name in names if name in called)
        own = [layer for layer in layers if f"{layer.fqn}.".startswith(f"{like}.")]
        for name in (each for each in names if each not in called):
            found += [replace(layer, fqn=name + layer.fqn.removeprefix(like), collectives=()) for layer in own]
    return found


def absent_parameters(model: nn.Module, layers: Sequence[LayerPlan], n_ranks: int) -> set[int]:
    """Return the ids of parameters of experts in lists that the first rank does not hold."""
    found: set[int] = set()
    for layer in layers:
        if layer.style == "ExpertListParallel":
            experts = list(model.get_submodule(layer.fqn).children())
            found |= {id(each) for part in experts[len(experts) // n_ranks :] for each in part.parameters()}
    return found


def _check_divides(experts: Experts, divided: Collection[str], n_ranks: int) -> None:
    found: list[StackedExperts | ExpertList] = [*experts.stacked, *experts.lists]
    numbers = {each.fqn: each.number for each in found if each.fqn in divided}
    works = math.gcd(*numbers.values())
    for fqn, number in numbers.items():
        if number % n_ranks:
            divisors = ", ".join(str(each) for each in range(1, works + 1) if works % each == 0)
            raise InputError(
                f"expert={n_ranks} does not divide the {number} experts of {fqn}; pass one of {divisors}, which divide "
                "all"
            )


def _attributes(module: nn.Module, stacked: StackedExperts, n_ranks: int) -> list[LocalAttribute]:
    """Return the attributes of a module whose values differ on one rank. Raises ``Blocked``."""
    number = stacked.number
    counts = [name for name, value in vars(module).items() if type(value) is int and value == number]
    skips = vars(module).get(_SKIPS) is False
    if skips and "num_experts" in counts:
        counts = ["num_experts"]
    if len(counts) > 1:
        raise Blocked(f"its attributes {', '.join(counts)} are all {number}, as is the number of its experts")
    if not counts and _counts_experts(stacked):
        raise Blocked(f"its forward uses the number of experts, {number}, which is not an attribute of its module")
    found = [LocalAttribute(stacked.fqn, name, number, number // n_ranks) for name in counts]
    return [*found, LocalAttribute(stacked.fqn, _SKIPS, False, True)] if skips else found


def _counts_experts(stacked: StackedExperts) -> bool:
    """Return True if the forward of stacked experts uses their number, or takes them one by one."""
    for event in (inner for each in stacked.events for inner in each.walk() if not inner.is_module):
        numbers = [leaf for leaf in leaves_of((event.args[1:], event.kwargs)) if type(leaf) is int]
        if event.name in _COUNTING and stacked.number in numbers:
            return True
        if event.name == "eq" and any(number > 0 for number in numbers):
            return True
    return False


def _stacked_plan(calls: Calls, stacked: StackedExperts, n_ranks: int, *, skips: bool) -> LayerPlan:
    local = stacked.number // n_ranks
    options: dict[str, Any] = {
        "shards": dict.fromkeys(stacked.parameters, "Shard(0)"),
        "shared": stacked.shared,
        "summed": stacked.summed,
        "index": stacked.index,
        "weight": stacked.weight,
        "local": local,
        "skipped": local if skips or stacked.only_compares else 0,
    }
    given = [argument(event, place) for event in stacked.events for place in stacked.summed]
    made = [value for event in stacked.events for value in values_in(event.result)]
    shards: dict[str, int | None] = {**dict.fromkeys(stacked.parameters, 0), **dict.fromkeys(stacked.shared)}
    parameters = dict(calls.modules[stacked.fqn].named_parameters())
    params = sum(parameters[name].numel() // (1 if dim is None else n_ranks) for name, dim in shards.items())
    collectives = _reduced(made, given)
    return LayerPlan(stacked.fqn, "ExpertParallel", options, "expert", shards, params, collectives, mesh="expert")


def _list_plan(calls: Calls, experts: ExpertList, n_ranks: int) -> LayerPlan:
    given = [value for event in experts.events for value in values_in(event.args)]
    made = [value for event in experts.events for value in values_in(event.result)]
    own = list(calls.modules[experts.fqn].children())[: experts.number // n_ranks]
    params = sum(each.numel() for part in own for each in part.parameters())
    options, collectives = {"width": experts.width}, _reduced(made, given)
    return LayerPlan(experts.fqn, "ExpertListParallel", options, "expert", {}, params, collectives, mesh="expert")


def _reduced(made: Sequence[Value], given: Sequence[Value]) -> tuple[Collective, ...]:
    """Return the all-reduces of results in the forward, and of the gradients of arguments in the backward."""
    differentiable = [each for each in given if each.requires_grad]
    phases = (("forward", made), ("backward", differentiable))
    return tuple(
        Collective("all_reduce", phase, len(values), sum(each.nbytes for each in values))
        for phase, values in phases
        if values
    )
