"""Tell two forwards apart by the operators that they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

__all__ = ["Fingerprint", "fingerprint"]


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
