"""Compare two forwards by the operators that they run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from modelsummary.capture.execution.shape_only import ShapeOnly
from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.modules import modules_of
from modelsummary.capture.operator_mode import Operators, Uncounted
from modelsummary.capture.run import running
from modelsummary.capture.values import sizes_of, tensors_of
from modelsummary.layer_info import Sizes
from modelsummary.record.events import EqualCalls
from modelsummary.record.folded_calls import FoldedCalls

__all__ = ["Fingerprint", "difference", "fingerprint"]


@dataclass(frozen=True)
class Fingerprint:
    """The operators or results of a forward, for comparison.

    Attributes:
        operators: each operator with its shapes and constants; empty for a real run.
        sizes: sizes of the result.
        values: tensors of the result of a real run; empty for a run on shapes.
    """

    operators: list[Any]
    sizes: Sizes
    values: list[Tensor]

    def differs_from(self, other: Fingerprint) -> str:
        """Return the first difference; empty if there is none.

        >>> Fingerprint([], [2, 3], []).differs_from(Fingerprint([], [2, 4], []))
        'a result of the sizes [2, 3] instead of [2, 4]'
        """
        for index, (operator, theirs) in enumerate(zip(self.operators, other.operators, strict=False)):
            if operator != theirs:
                return f"operator {index} is {operator[0]} instead of {theirs[0]}, or has other arguments"
        if len(self.operators) != len(other.operators):
            return f"{len(self.operators)} operators instead of {len(other.operators)}"
        if self.sizes != other.sizes:
            return f"a result of the sizes {self.sizes} instead of {other.sizes}"
        same = all(torch.allclose(*pair, equal_nan=True) for pair in zip(self.values, other.values, strict=True))
        return "" if same else "other values"


def fingerprint(
    forward: Callable[..., Any],
    modules: Sequence[nn.Module],
    call: CallArguments,
    execution: str,
    *,
    grad: bool = False,
    other_mode: bool = False,
    model: nn.Module | None = None,
    equal: EqualCalls | None = None,
) -> Fingerprint:
    """Run ``forward`` on shapes or for real, leaving everything untouched, and return its fingerprint.

    Args:
        modules: all modules that it calls.
        grad: whether gradients are enabled.
        other_mode: whether to switch every module to the other mode, train or eval.
        model: root of the names in ``equal``.
        equal: calls on shapes of which only the first of equal ones runs; None: every call runs.
    """
    with running(modules, call, on_shapes=execution == "shape", grad=grad) as (executes, args, kwargs):
        for module in modules if other_mode else ():
            module.training = not module.training
        if isinstance(executes, ShapeOnly):
            executes.log = []
            folded = nullcontext() if model is None or equal is None else FoldedCalls(model, equal, executes).folding()
            with folded, Operators(Uncounted(), executes):
                out = forward(*args, **kwargs)
            return Fingerprint(executes.log, sizes_of(out), [])
        with Operators(Uncounted(), executes):
            out = forward(*args, **kwargs)
        return Fingerprint([], sizes_of(out), [tensor.clone() for tensor in tensors_of(out)])


def difference(
    model: nn.Module,
    other: Callable[..., Any],
    modules: Iterable[nn.Module],
    call: CallArguments,
    execution: str,
    *,
    grad: bool,
    other_mode: bool = False,
    other_call: CallArguments | None = None,
    equal: EqualCalls | None = None,
) -> str:
    """Return how ``other`` differs from the model; empty if both run the same, or the model cannot run this way.

    Args:
        modules: roots of all modules that ``other`` calls.
        other_call: arguments of ``other``; None: the arguments of the model.
        grad, other_mode: see ``fingerprint``. A forward that computes gradients does not run without them.
        equal: calls that both make. Both run only the first of equal ones, unless this shows a difference.
    """
    every = list({id(module): module for root in (model, *modules) for module in modules_of(root)}.values())

    def difference_of(equal: EqualCalls | None) -> str:
        options: dict[str, Any] = {"grad": grad, "other_mode": other_mode, "model": model, "equal": equal}
        try:
            of_model = fingerprint(model, every, call, execution, **options)
        except RuntimeError:
            if grad:
                raise
            return ""
        of_other = fingerprint(other, every, other_call or call, execution, **options)
        return of_other.differs_from(of_model)

    if equal is not None and equal.first_of:
        with suppress(Exception):  # a call that was left out may be the reason
            if not difference_of(equal) and not equal.problem:
                return ""
    return difference_of(None)
