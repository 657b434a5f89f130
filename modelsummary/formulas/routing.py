"""Parameters that one token's forward touches: of a mixture's experts, as many as the router chooses.

A router is recognised by its operator: ``topk`` (or ``argmax``) over E scores. The experts are the parameters nearby
that exist E times: stacked along the first dimension, or in E equal modules of a list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import Tensor, nn

from modelsummary.capture.calls import Watch
from modelsummary.capture.module_calls import calls_wrapped
from modelsummary.capture.operators import Execution, Operators
from modelsummary.costs.operators import OpRule

__all__ = ["Choice", "RoutedWatch", "active_params"]

_CHOICES = {"aten.topk": None, "aten.argmax": 1}  # operator -> number chosen, if its name says so
_FEWEST = 2  # experts


@dataclass(frozen=True)
class Choice:
    """A choice of ``chosen`` out of ``size`` scores, made while ``module`` ran."""

    module: nn.Module
    size: int
    chosen: int


class RoutedWatch(Watch):
    """A run in which choices are noted, in addition to calls and costs.

    Attributes:
        choices: the distinct choices, in order.
        recomputed_macs: multiply-adds of scores that fused backwards of attention compute again.
    """

    def __init__(self, model: nn.Module, execution: Execution) -> None:
        super().__init__(model, execution)
        self.choices: dict[Choice, None] = {}
        self.recomputed_macs = 0
        self._operators = Operators(self, _Noting(execution, self))

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model, count its operators, and return its result."""
        with calls_wrapped(self._wrapper), self._operators:
            return self.root.module(*args, **kwargs)

    def backward(self, loss: Tensor) -> int:
        """Run the backward of a loss; return its multiply-adds without recomputation, of checkpoints or of kernels."""
        n_calls, before = len(self.calls), self.root.macs
        with calls_wrapped(self._wrapper), self._operators:  # calls during a backward recompute a checkpoint
            loss.backward()
        del self.calls[n_calls:]
        return self.root.macs - before - self.recomputed_macs


class _Noting:
    """An execution that notes operators before it runs them."""

    def __init__(self, execution: Execution, watch: RoutedWatch) -> None:
        self.input = execution.input
        self._execution = execution
        self._watch = watch

    def run(self, func: Any, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if rule.name in _CHOICES:
            self._note_choice(rule.name, args, kwargs)
        elif "_attention" in rule.name and rule.name.endswith("_backward"):
            query, key = (args[0], args[1]) if rule.name.startswith("flex") else (args[1], args[2])
            self._watch.recomputed_macs += query.numel() * key.shape[-2]
        return self._execution.run(func, rule, args, kwargs)

    def _note_choice(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        scores, constant = args[0], _CHOICES[name]
        dim = kwargs.get(
            "dim", args[2 if constant is None else 1] if len(args) > (2 if constant is None else 1) else -1
        )
        if not isinstance(scores, Tensor) or not isinstance(dim, int) or not scores.dim():
            return
        chosen = constant or kwargs.get("k", args[1] if len(args) > 1 else 1)
        self._watch.choices[Choice(self._watch.running.module, scores.shape[dim], chosen)] = None


def active_params(model: nn.Module, choices: list[Choice]) -> int:
    """Return how many parameter elements one token's forward touches, rounded; every other tensor counts in full.

    >>> experts = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(8)])
    >>> model = nn.ModuleDict({"router": nn.Linear(4, 8, bias=False), "experts": experts})
    >>> active_params(model, [Choice(model["router"], 8, 2)])  # router 32, two of eight experts 2 * 16
    64
    """
    parts: dict[int, Fraction] = {}
    parents = {id(child): parent for parent in model.modules() for child in parent.children()}
    for choice in choices:
        around: nn.Module | None = choice.module
        while around is not None:
            experts = {id(each) for each in _experts(around, choice.size)}
            if experts:
                parts.update(dict.fromkeys(experts, Fraction(min(choice.chosen, choice.size), choice.size)))
                break
            around = parents.get(id(around))
    return round(sum(each.numel() * parts.get(id(each), Fraction(1)) for each in model.parameters()))


def _experts(around: nn.Module, size: int) -> Iterator[Tensor]:
    """Yield the parameters below a module that exist ``size`` times."""
    if size < _FEWEST:
        return
    for module in around.modules():
        own = [each for each in module.parameters(recurse=False) if each.dim() and each.shape[0] == size]
        if any(each.dim() >= 3 for each in own):  # the router's own weight has two dimensions
            yield from own
        children = list(module.children())
        if len(children) == size and len({_shapes(child) for child in children}) == 1:
            yield from module.parameters()


def _shapes(module: nn.Module) -> tuple[Any, ...]:
    return type(module), tuple(tuple(each.shape) for each in module.parameters())
