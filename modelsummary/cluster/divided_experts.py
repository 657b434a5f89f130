"""Stacked experts that are divided over ranks, to which tokens travel.

Each rank holds the same number of experts, and tokens are taken to be spread evenly over all of them: a rank sends as
many rows as it gets. So it runs the module on its own tokens, with the experts that it holds. An all-to-all goes before
and after it: a row for each token and each expert that the token goes to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import gcd
from typing import Any, NamedTuple

from torch import nn

from modelsummary.capture.values import map_tensors
from modelsummary.cluster.plan import Recipe
from modelsummary.cluster.tensor_functions import Dispatch
from modelsummary.cluster.weights import Weights, weight_of
from modelsummary.errors import InputError
from modelsummary.parallel.expert_plans import expert_plans
from modelsummary.parallel.experts import find_experts
from modelsummary.parallel.local_check import LocalAttribute
from modelsummary.parallel.plan import LayerPlan
from modelsummary.parallel.record_calls import Calls

__all__ = ["DividedExperts", "divide", "exchange", "expert_weights", "may_have_experts", "number_of_experts"]


class DividedExperts(NamedTuple):
    """The experts of a model on one of several ranks.

    Attributes:
        layers: their modules.
        attributes: numbers of experts in attributes, and what they are on one rank.
    """

    layers: tuple[LayerPlan, ...] = ()
    attributes: tuple[LocalAttribute, ...] = ()

    def has(self, fqn: str) -> bool:
        """Return True if a module is among the experts, or in one of them."""
        return any(f"{fqn}.".startswith(f"{layer.fqn}.") for layer in self.layers)


def divide(calls: Calls, ranks: int) -> DividedExperts:
    """Return how the experts of a model are divided.

    Raises:
        InputError: there are none, their number does not divide by the ranks, or they are modules in a list.
    """
    layers, attributes, _ = expert_plans(calls, ranks)
    listed = next((layer.fqn for layer in layers if not layer.shards), None)
    if listed is not None:
        raise InputError(
            f"expert={ranks}: the experts in {listed} are modules in a list; stack their weights in one parameter, or "
            "pass expert=1"
        )
    return DividedExperts(tuple(layers), tuple(attributes))


def may_have_experts(model: nn.Module) -> bool:
    """Return True if a class that is not torch's has several matrices in one parameter."""
    return any(
        each is not None and each.dim() >= 3 and each.shape[0] > 1
        for module in model.modules()
        if not type(module).__module__.startswith("torch.nn.")
        for each in module._parameters.values()
    )


def number_of_experts(calls: Calls) -> int:
    """Return the largest number of ranks that divides all stacked experts; 1 without experts."""
    return gcd(*(each.number for each in find_experts(calls).stacked)) or 1


def expert_weights(calls: Calls, counts: Mapping[str, int], recipe: Recipe) -> Weights:
    """Return the weights of all stacked experts.

    Args:
        calls: of a model in which equal blocks run once.
        counts: FQN of a block -> how many blocks are equal to it.
        recipe: what is trained with.
    """
    weights = []
    for stacked in find_experts(calls).stacked:
        block = next((fqn for fqn in counts if f"{stacked.fqn}.".startswith(f"{fqn}.")), None)
        for name in stacked.parameters:
            parameter = calls.modules[stacked.fqn].get_parameter(name)
            kind = "trained" if parameter.requires_grad else "frozen"
            weights += [weight_of(parameter, parameter, recipe, kind)] * (1 if block is None else counts[block])
    return Weights.of(weights)


def exchange(layer: LayerPlan) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return hooks for experts: before their forward tokens are sent to them, and after it results are sent back."""
    index, options = layer.options["index"], layer.options
    tokens = [place for place in options["summed"] if place != options["weight"]]
    copies = 1

    def before(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        nonlocal copies
        given = {**dict(enumerate(args)), **kwargs}
        chosen = given[index].numel()
        for place in tokens:
            rows = given[place].numel() // given[place].shape[-1]
            copies = max(chosen // rows, 1)
            given[place] = Dispatch.apply(given[place], copies)
        return tuple(given[place] for place in range(len(args))), {name: given[name] for name in kwargs}

    def after(_module: nn.Module, _args: Any, out: Any) -> Any:
        return map_tensors(lambda made: Dispatch.apply(made, copies), out)

    return before, after
