"""How experts are divided over ranks: the styles of their modules."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from modelsummary.capture.live import LiveModel
from modelsummary.errors import InputError
from modelsummary.parallel.expert_check import (
    arguments_of,
    mixing_experts,
    routing_by_row,
    runs_divided,
    uncalled_experts,
)
from modelsummary.parallel.experts import ExpertList, Experts, StackedExperts, find_experts
from modelsummary.parallel.placements import Blocked
from modelsummary.parallel.plan import LayerPlan, ParallelPlan
from modelsummary.parallel.record_calls import Calls

__all__ = ["does_not_divide", "expert_plans", "sending_tokens", "uncalled_plans"]


def expert_plans(live: LiveModel, calls: Calls, n_ranks: int, dispatch: str) -> tuple[list[LayerPlan], dict[str, str]]:
    """Return how experts are divided, and why other experts stay whole.

    Args:
        n_ranks: that share out the experts.
        dispatch: how tokens meet the experts of other ranks.

    Raises:
        InputError: the ranks do not divide the number of experts, or there are none that can be divided.
    """
    experts = find_experts(calls)
    _check_divides(experts, n_ranks)
    plans: list[LayerPlan] = []
    checked: set[Hashable] = set()
    arguments = arguments_of(live, [stacked.fqn for stacked in experts.stacked if stacked.events])
    for stacked in experts.stacked:
        if any(f"{stacked.fqn}.".startswith(f"{plan.fqn}.") for plan in plans):
            continue
        try:
            divided = runs_divided(calls, stacked, n_ranks, arguments.get(stacked.fqn))
            is_sent = dispatch == "all_to_all"
            plans.append(_sent_plan(calls, divided, n_ranks, checked) if is_sent else _stacked_plan(divided))
        except Blocked as blocked:
            experts.reasons[stacked.fqn] = str(blocked)
    if experts.lists and dispatch == "all_to_all":
        experts.reasons.update(mixing_experts(calls, experts.lists))
        experts.lists = [listed for listed in experts.lists if listed.fqn not in experts.reasons]
        experts.reasons.update(uncalled_experts(live, calls, experts.lists) if experts.lists else {})
        experts.lists = [listed for listed in experts.lists if listed.fqn not in experts.reasons]
    style = "ExpertListParallel" if dispatch == "all_reduce" else "ExpertListDispatch"
    for listed in experts.lists:
        options = {"width": listed.width, **({"draws": True} if listed.draws else {})}
        plans.append(LayerPlan(listed.fqn, style, options, "expert", {}, 0, mesh="expert"))
    if not plans:
        name = type(calls.model).__name__
        why = next((f"; {fqn or name}: {reason}" for fqn, reason in experts.reasons.items()), "")
        raise InputError(f"expert={n_ranks}: {name} has no experts that can be divided{why}; leave expert out")
    return plans, experts.reasons


def sending_tokens(whole: ParallelPlan, live: LiveModel, calls: Calls, n_ranks: int) -> ParallelPlan:
    """Return a plan whose ranks send tokens to each other's experts, on a mesh of ``tensor`` and ``expert`` alone.

    Its experts are whole on their rank, and what sums gradients over the ranks divides them, as FSDP and Megatron do.

    Args:
        whole: the plan of the same model without experts that are divided.
        live, calls: the model.
        n_ranks: that share out the experts.

    Raises:
        InputError: as for ``expert_plans``.
    """
    experts, _ = expert_plans(live, calls, n_ranks, "all_to_all")
    inside = tuple(f"{layer.fqn}." for layer in experts)
    layers = [layer for layer in whole.layers if not f"{layer.fqn}.".startswith(inside)]
    for layer in experts:
        undivided = {"divides": False} if layer.style == "ExpertDispatch" else {}
        layers.append(replace(layer, options={**layer.options, **undivided}))
    return replace(
        whole,
        expert=n_ranks,
        dispatch="all_to_all",
        layers=tuple(layers),
        attributes=tuple(change for change in whole.attributes if not f"{change.fqn}.".startswith(inside)),
        averaged=(),
    )


def uncalled_plans(calls: Calls, layers: Sequence[LayerPlan]) -> list[LayerPlan]:
    """Return plans for experts in lists to which no token went, like the plans of an expert beside them."""
    plans = []
    for experts in find_experts(calls).lists:
        names = [f"{experts.fqn}.{name}" if experts.fqn else name for name in calls.modules[experts.fqn]._modules]
        called = {event.fqn for event in experts.events}
        like = next(name for name in names if name in called)
        prototypes = [layer for layer in layers if f"{layer.fqn}.".startswith(f"{like}.")]
        for name in (name for name in names if name not in called):
            plans += [replace(layer, fqn=name + layer.fqn.removeprefix(like)) for layer in prototypes]
    return plans


def _check_divides(experts: Experts, n_ranks: int) -> None:
    """Raise ``InputError`` if the ranks do not divide the number of experts."""
    groups: list[StackedExperts | ExpertList] = [*experts.stacked, *experts.lists]
    counts = {group.fqn: group.number for group in groups}
    works = math.gcd(*counts.values())
    for fqn, count in counts.items():
        if count % n_ranks:
            raise does_not_divide(f"expert={n_ranks}", f"{count} experts of {fqn}", works)


def does_not_divide(ranks: str, what: str, works: int) -> InputError:
    """Return the error about a number of ranks that does not divide something; the divisors of ``works`` do."""
    divisors = ", ".join(str(divisor) for divisor in range(1, works + 1) if works % divisor == 0)
    return InputError(f"{ranks} does not divide the {what}; pass one of {divisors}, which divide all")


def _stacked_plan(stacked: StackedExperts) -> LayerPlan:
    """Return the plan of stacked experts. ``params`` is filled in where the shapes of all ranks are known."""
    options: dict[str, Any] = {
        "shards": dict.fromkeys(stacked.parameters, "Shard(0)"),
        "shared": stacked.shared,
        "summed": stacked.summed,
    }
    shards: dict[str, int | None] = {**dict.fromkeys(stacked.parameters, 0), **dict.fromkeys(stacked.shared)}
    return LayerPlan(stacked.fqn, "ExpertParallel", options, "expert", shards, 0, mesh="expert")


def _sent_plan(calls: Calls, stacked: StackedExperts, n_ranks: int, checked: set[Hashable]) -> LayerPlan:
    """Return the plan of stacked experts to which ranks send their tokens. Raises ``Blocked``."""
    routing = routing_by_row(calls, stacked, n_ranks, checked)
    layer = _stacked_plan(stacked)
    options = {name: layer.options[name] for name in ("shards", "shared")}
    return replace(layer, style="ExpertDispatch", options={**options, **routing._asdict()})
