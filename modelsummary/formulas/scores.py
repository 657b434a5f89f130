"""Masks of attention that is written as two products and a softmax: the scores are followed from one to the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from modelsummary import _torch
from modelsummary._torch import disable_current_modes
from modelsummary.operators.operator_facts import OpRule, tensors_in

__all__ = ["Scores", "hidden_scores"]

_HIDDEN = -1e4  # a score with this added has probability 0


@dataclass(frozen=True)
class _Product:
    """A product whose result may be scores.

    Attributes:
        per_score: multiply-adds per element of the result.
        hidden: number of elements that a mask hides.
        is_unknown: whether something was added whose values are not known.
        is_normed: whether a softmax followed.
    """

    per_score: int
    hidden: int = 0
    is_unknown: bool = False
    is_normed: bool = False


class Scores:
    """Scores that are followed by their storage, from a product through a mask and a softmax to the next product.

    Args:
        values: returns the values of a mask, or None if they are not known.

    Attributes:
        hidden_macs: multiply-adds of both products for scores that masks hide.
        unknown: softmaxes over scores whose mask is not known; they count as dense.
    """

    def __init__(self, values: Callable[[Tensor], Tensor | None]) -> None:
        self._values = values
        self._products: dict[int, _Product] = {}  # by storage
        self.hidden_macs = self.unknown = 0

    def note(self, rule: OpRule, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, macs: int) -> None:
        """Follow one operator of a forward that has run."""
        if not isinstance(out, Tensor) or not out.is_floating_point() or out.layout is not torch.strided:
            return
        tensors = [tensor for tensor in tensors_in((args, kwargs)) if tensor.layout is torch.strided]
        scores = next((tensor for tensor in tensors if _storage(tensor) in self._products), None)
        before = None if scores is None else self._products[_storage(scores)]
        if macs:
            if before is not None and scores is not None and before.is_normed and scores.numel():
                self.hidden_macs += before.hidden * (before.per_score + macs // scores.numel())
            # Scores have at least a batch of matrices.
            after = _Product(macs // max(out.numel(), 1)) if out.dim() > 2 else None
        elif before is None or scores is None:
            after = None
        else:
            after = self._after(rule, before, scores, args, out)
        if after is not None:
            self._products[_storage(out)] = after
        else:
            self._products.pop(_storage(out), None)

    def _after(self, rule: OpRule, before: _Product, scores: Tensor, args: Sequence[Any], out: Tensor) -> _Product:
        effect = rule.facts.on_scores
        if effect == "softmax":
            self.unknown += before.is_unknown
            return replace(before, is_normed=True)
        mask: Tensor | None = None
        if effect == "sum":
            mask = next(
                (argument for argument in args[:2] if isinstance(argument, Tensor) and argument is not scores), None
            )
        elif effect:
            call = rule.signature.bind(args, {})
            value = call.get("value", _HIDDEN)
            if not isinstance(value, Tensor) and value <= _HIDDEN:
                mask = call["mask" if effect == "fill" else "condition"]
        if mask is None or before.is_normed or _storage(mask) in self._products:
            return before
        values = self._values(mask)
        if values is None:
            return replace(before, is_unknown=before.is_unknown or mask.dim() > 1)
        # A filled element is hidden where the mask is True, a masked one where it is False.
        hidden = values.numel() - hidden_scores(values) if effect == "fill" else hidden_scores(values)
        return replace(before, hidden=before.hidden + hidden * (out.numel() // max(values.numel(), 1)))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def hidden_scores(mask: Tensor) -> int:
    """Return how many elements of a mask hide their score: False, or a number of at most -10,000.

    >>> hidden_scores(torch.tensor([True, False])), hidden_scores(torch.tensor([0.0, -0.5, float("-inf")]))
    (1, 1)
    """
    with disable_current_modes(), _torch.DisableTorchFunction():  # these are not operators of the model
        hidden = ~mask if mask.dtype == torch.bool else mask <= _HIDDEN
        return int(hidden.sum())
