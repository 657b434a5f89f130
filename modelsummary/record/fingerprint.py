"""Tell two forwards apart by the operators that they run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from modelsummary.capture.execution.shape_only import ShapeOnly
from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.operators import Operators, Uncounted
from modelsummary.capture.run import running
from modelsummary.capture.values import sizes_of, tensors_of
from modelsummary.layer_info import Sizes

__all__ = ["Fingerprint", "difference", "fingerprint"]


@dataclass(frozen=True)
class Fingerprint:
    """What a forward did.

    Attributes:
        operators: each operator with the shapes and constants it was called with; empty for a real run.
        sizes: of the result.
        values: tensors of the result of a real run.
    """

    operators: list[Any]
    sizes: Sizes
    values: list[Tensor]

    def differs_from(self, other: Fingerprint) -> str:
        """The first difference; empty if there is none."""
        for number, (own, theirs) in enumerate(zip(self.operators, other.operators, strict=False)):
            if own != theirs:
                return f"operator {number} is {own[0]} instead of {theirs[0]}, or has other arguments"
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
) -> Fingerprint:
    """Run ``forward`` on shapes (or really) and note what it does; nothing is changed by it.

    Args:
        modules: all that it calls.
        grad: with gradients enabled.
        other_mode: with every module in the other mode, train or eval.
    """
    with running(modules, call, on_shapes=execution == "shape", grad=grad) as (executes, args, kwargs):
        for module in modules if other_mode else ():
            module.training = not module.training
        if isinstance(executes, ShapeOnly):
            executes.log = []
            with Operators(Uncounted(), executes):
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
) -> str:
    """Return what ``other`` runs that the model does not; empty if it runs the same, or the model cannot run so.

    Args:
        modules: roots of all that ``other`` calls.
        other_call: how ``other`` is called; None: as the model is.
        grad, other_mode: as for ``fingerprint``. A forward that takes gradients does not run without them.
    """
    every = list({id(each): each for root in (model, *modules) for each in root.modules()}.values())
    try:
        of_model = fingerprint(model, every, call, execution, grad=grad, other_mode=other_mode)
    except RuntimeError:
        if grad:
            raise
        return ""
    of_other = fingerprint(other, every, other_call or call, execution, grad=grad, other_mode=other_mode)
    return of_other.differs_from(of_model)
