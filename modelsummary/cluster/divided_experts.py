"""Stacked experts that are divided over ranks, to which tokens travel.

Each rank holds the same number of experts, and tokens are taken to be spread evenly over all of them: a rank sends as
many rows as it gets. So it runs the module on its own tokens, with the experts that it holds. An all-to-all goes before
and after it: a row for each token and each expert that the token goes to.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from modelsummary import _torch
from modelsummary.capture.containers import map_tensors
from modelsummary.cluster.plan import Recipe
from modelsummary.cluster.weights import Weights, weight_of
from modelsummary.errors import InputError
from modelsummary.parallel.expert_plans import check_divides, no_experts
from modelsummary.parallel.experts import StackedExperts, find_experts, routing_of
from modelsummary.parallel.placements import Blocked
from modelsummary.parallel.plan import LayerPlan
from modelsummary.parallel.rank_model import LocalAttribute, local_shapes, model_of_rank
from modelsummary.parallel.record_calls import Calls

__all__ = [
    "NO_EXPERTS",
    "DividedExperts",
    "add_exchange",
    "divide",
    "expert_weights",
    "may_have_experts",
    "number_of_experts",
]

_OPS: Any = _torch.functional_collectives()


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

    def of_rank(self, model: nn.Module, ranks: int) -> nn.Module:
        """Return a copy of a model with the experts that one rank holds."""
        shapes = local_shapes(model, self.layers, {"expert": ranks})
        return model_of_rank(model, lambda parameter: shapes[id(parameter)], self.attributes, {}, 1)


NO_EXPERTS = DividedExperts()


def divide(calls: Calls, ranks: int) -> DividedExperts:
    """Return how the experts of a model are divided.

    Raises:
        InputError: there are none, their number does not divide by the ranks, or they are modules in a list.
    """
    experts = find_experts(calls)
    check_divides(experts, ranks)
    layers, attributes = [], []
    for stacked in experts.stacked:
        try:
            layer, numbers = _layer(stacked), _attributes(calls.modules[stacked.fqn], stacked, ranks)
        except Blocked as blocked:
            experts.reasons[stacked.fqn] = str(blocked)
            continue
        layers.append(layer)
        attributes += numbers
    if experts.lists:
        raise InputError(
            f"expert={ranks}: the experts in {experts.lists[0].fqn} are modules in a list; stack their weights in one "
            "parameter, or pass dispatch='all_reduce' or expert=1"
        )
    if not layers:
        raise no_experts(calls, experts, ranks)
    return DividedExperts(tuple(layers), tuple(attributes))


def _layer(stacked: StackedExperts) -> LayerPlan:
    """Return how the parameters of a module are divided. Raises ``Blocked``."""
    routes = {routing_of(event) for event in stacked.events}
    if len(routes) != 1:
        raise Blocked(
            f"the calls of {stacked.fqn} take expert numbers and weights as different arguments; equal arguments work"
        )
    ((index, weight),) = routes
    options = {"summed": stacked.summed, "index": index, "weight": weight}
    shards: dict[str, int | None] = {**dict.fromkeys(stacked.parameters, 0), **dict.fromkeys(stacked.shared)}
    return LayerPlan(stacked.fqn, "ExpertParallel", options, "expert", shards, 0, mesh="expert")


def _attributes(module: nn.Module, stacked: StackedExperts, ranks: int) -> list[LocalAttribute]:
    """Return the numbers of experts in attributes of a module, which a rank runs with its own number of experts."""
    n_experts = stacked.number
    names = [name for name, value in vars(module).items() if type(value) is int and value == n_experts]
    names = ["num_experts"] if "num_experts" in names else names
    if len(names) > 1:
        raise Blocked(
            f"its attributes {', '.join(names)} are all {n_experts}, as is the number of its experts; one such "
            "attribute, or one with the name num_experts, works"
        )
    return [LocalAttribute(stacked.fqn, name, n_experts, n_experts // ranks) for name in names]


def may_have_experts(model: nn.Module) -> bool:
    """Return True if a class that is not torch's has several matrices in one parameter."""
    return any(
        parameter is not None and parameter.dim() >= 3 and parameter.shape[0] > 1
        for module in model.modules()
        if not type(module).__module__.startswith("torch.nn.")
        for parameter in module._parameters.values()
    )


def number_of_experts(calls: Calls) -> int:
    """Return the largest number of ranks that divides all stacked experts; 1 without experts."""
    return gcd(*(stacked.number for stacked in _routed(calls))) or 1


def _routed(calls: Calls) -> list[StackedExperts]:
    """Return the stacked experts that take the numbers of experts as an argument."""
    experts = []
    for stacked in find_experts(calls).stacked:
        with suppress(Blocked):
            _layer(stacked)
            experts.append(stacked)
    return experts


def expert_weights(calls: Calls, counts: Mapping[str, int], recipe: Recipe) -> Weights:
    """Return the weights of all stacked experts.

    Args:
        calls: of a model in which equal blocks run once.
        counts: FQN of a block -> how many blocks are equal to it.
        recipe: what is trained with.
    """
    weights = []
    for stacked in _routed(calls):
        block = next((fqn for fqn in counts if f"{stacked.fqn}.".startswith(f"{fqn}.")), None)
        for name in stacked.parameters:
            parameter = calls.modules[stacked.fqn].get_parameter(name)
            kind = "trained" if parameter.requires_grad else "frozen"
            weights += [weight_of(parameter, parameter, recipe, kind)] * (1 if block is None else counts[block])
    return Weights.of(weights)


def add_exchange(model: nn.Module, layer: LayerPlan) -> None:
    """Let a module of the model of a rank send tokens to its experts, and their results back.

    As many rows return, so the tensors stay as they are.
    """
    index, options = layer.options["index"], layer.options
    token_keys = [key for key in options["summed"] if key != options["weight"]]
    copies, takes_gradients = 1, False

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        nonlocal copies, takes_gradients
        takes_gradients = any(parameter.requires_grad for parameter in module.parameters())
        arguments = {**dict(enumerate(args)), **kwargs}
        chosen = arguments[index].numel()
        for key in token_keys:
            rows = arguments[key].numel() // arguments[key].shape[-1]
            copies = max(chosen // rows, 1)
            takes_gradients |= arguments[key].requires_grad
            arguments[key] = _Exchange.apply(arguments[key], copies, True)
        return tuple(arguments[position] for position in range(len(args))), {name: arguments[name] for name in kwargs}

    def after(_module: nn.Module, _args: Any, out: Any) -> Any:
        # Gradients of the weights of experts alone are computed where the tokens are.
        return map_tensors(lambda tensor: _Exchange.apply(tensor, copies, takes_gradients), out)

    module = model.get_submodule(layer.fqn)
    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


class _Exchange(torch.autograd.Function):
    """An exchange of rows, of which each token has so many, and of their gradients if these are sent, too."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, copies: int, sends_gradients: bool) -> Tensor:
        """Send the rows of tokens."""
        ctx.copies, ctx.sends_gradients = copies, sends_gradients
        _send(tokens, copies)
        return tokens.view_as(tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Send the rows of a gradient."""
        if ctx.sends_gradients:
            _send(gradients[0], ctx.copies)
        return gradients[0], None, None


def _send(tokens: Tensor, copies: int) -> None:
    rows = tokens.new_empty(copies, tokens.numel() // tokens.shape[-1], tokens.shape[-1])
    _OPS.all_to_all_single(rows, [copies], [copies], "expert")
