"""Parameters that one token's forward touches: of a mixture's experts, as many as the router chooses.

A router is recognised by its operator: ``topk`` (or a maximum) over E scores. The experts are the parameters nearby
that exist E times: stacked along the first dimension, or in E equal modules of a list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from modelsummary._torch import ConvNd
from modelsummary.capture.calls import Call, Watch
from modelsummary.capture.operator_mode import Execution, Operators
from modelsummary.capture.step import loss_of
from modelsummary.operators.attention import scores_again
from modelsummary.operators.operator_rules import OpCost, OpRule
from modelsummary.operators.table import Arguments

__all__ = ["RoutedWatch", "RoutingChoice", "active_params"]

_TOPK = "aten.topk"
_CHOICES = frozenset({_TOPK, "aten.argmax", "aten.max"})
_NEARBY = 3  # the module that chooses, the module around it, and the layer around that
_FEWEST = 2  # experts


@dataclass(frozen=True)
class RoutingChoice:
    """A choice of ``chosen`` out of ``size`` scores, made while ``module`` ran."""

    module: nn.Module
    size: int
    chosen: int


class RoutedWatch(Watch):
    """A run in which choices and multiply-adds are noted, in addition to calls.

    Args:
        on_operator: called with each operator of the forward: its rule, arguments, result and multiply-adds.

    Attributes:
        chosen: whether it was a ``topk`` and the call that made it -> number of scores -> number chosen.
        macs: multiply-adds so far.
        skipped_macs: the part of them that block masks skip, as far as their values are known.
        has_unknown_masks: whether the values of a block mask are not known.
        recomputed_macs: multiply-adds of the forward that the backward computes again: of checkpoints, and of scores in
            fused attention.
        phase: ``"forward"``, ``"loss"`` or ``"backward"``, whichever runs or ran last.
    """

    def __init__(self, model: nn.Module, execution: Execution, on_operator: Callable[..., object]) -> None:
        super().__init__(model)
        self.on_operator = on_operator
        self.chosen: dict[tuple[bool, Call], Counter[int]] = {}
        self.macs = self.recomputed_macs = 0
        self.skipped_macs, self.has_unknown_masks = 0, False
        self._execution, self._operators, self.phase = execution, Operators(self), "forward"

    def choices(self) -> list[RoutingChoice]:
        """Return the choices, maxima first: where a layer takes both, ``topk`` is the router."""
        ordered = sorted(self.chosen.items(), key=lambda item: item[0][0])
        return [RoutingChoice(call.module, size, k) for (_, call), sizes in ordered for size, k in sizes.items()]

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model, count its operators, and return its result."""
        with self._operators:
            return self.call(args, kwargs)

    def backward(self, output: Any, loss: Callable[[Any], Tensor] | None) -> None:
        """Run the loss of a result, and the backward of it.

        Raises:
            InputError: the loss is not a scalar that requires a gradient.
        """
        with self._operators:
            self.phase = "loss"
            scalar = loss_of(output, loss)
            self.phase = "backward"
            scalar.backward()

    def run(self, func: Any, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, OpCost]:
        """Run one operator and note it; return its result and cost."""
        if rule.name in _CHOICES and self.innermost is not None:
            self._note_choice(self.innermost, rule.name, rule.signature.bind(args, kwargs))
        if rule.facts.recomputes_scores:
            self.recomputed_macs += scores_again(rule, rule.signature.bind(args, kwargs))
        out, cost = self._execution.run(func, rule, args, kwargs)
        self.macs += cost.macs
        self.skipped_macs += cost.skipped_macs or 0
        self.has_unknown_masks |= cost.skipped_macs is None
        if self.phase == "forward":
            self.on_operator(rule, args, kwargs, out, cost.macs)
        elif self.phase == "backward" and torch.is_grad_enabled():  # a backward runs without; a checkpoint's forward
            self.recomputed_macs += cost.macs
        return out, cost

    def _note_choice(self, call: Call, name: str, bound: Arguments) -> None:
        """Note a ``topk``, or a maximum along a dimension; a router that takes the maximum k times chooses k."""
        scores, dim, k = bound["self"], bound.get("dim"), bound.get("k", 1)
        if scores.dim() and isinstance(dim, int):
            counts = self.chosen.setdefault((name == _TOPK, call), Counter())
            counts[scores.shape[dim]] = k if name == _TOPK else counts[scores.shape[dim]] + k


def active_params(model: nn.Module, choices: list[RoutingChoice]) -> int:
    """Return how many parameter elements one token's forward touches, rounded; every other tensor counts in full.

    >>> experts = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(8)])
    >>> model = nn.ModuleDict({"router": nn.Linear(4, 8, bias=False), "experts": experts})
    >>> active_params(model, [RoutingChoice(model["router"], 8, 2)])  # router 32, two of eight experts 2 * 16
    64
    """
    shares: dict[int, Fraction] = {}
    parents = {id(child): parent for parent in model.modules() for child in parent.children()}
    for choice in choices:
        module: nn.Module | None = choice.module
        for _ in range(_NEARBY):
            experts = {id(expert) for expert in _experts(module, choice.size)} if module is not None else set()
            if experts:
                shares.update(dict.fromkeys(experts, Fraction(min(choice.chosen, choice.size), choice.size)))
                break
            module = parents.get(id(module))
    return round(sum(parameter.numel() * shares.get(id(parameter), Fraction(1)) for parameter in model.parameters()))


def _experts(root: nn.Module, size: int) -> Iterator[Tensor]:
    """Yield the parameters below a module that exist ``size`` times."""
    if size < _FEWEST:
        return
    for module in root.modules():
        if isinstance(module, ConvNd):  # its filters have as many dimensions as stacked experts
            continue
        parameters = [
            parameter
            for parameter in module.parameters(recurse=False)
            if parameter.dim() and parameter.shape[0] == size
        ]
        if any(parameter.dim() >= 3 for parameter in parameters):  # the router's own weight has two dimensions
            yield from parameters
        children = list(module.children())
        if len(children) == size and len({_shapes(child) for child in children}) == 1:
            yield from module.parameters()


def _shapes(module: nn.Module) -> tuple[Any, ...]:
    return type(module), tuple(tuple(parameter.shape) for parameter in module.parameters())
