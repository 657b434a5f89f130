"""Multiply-adds of attention scores that a mask hides: causal attention and sliding windows leave most of them out.

Attention is a call of ``scaled_dot_product_attention``, or two products with a softmax between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import Parameter, Signature
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from modelsummary import _torch
from modelsummary._torch import disable_current_modes
from modelsummary.operators.operator_rules import OpRule, tensors_in
from modelsummary.operators.tensor_bytes import storage_of

__all__ = ["HiddenScores"]

_HIDDEN = -1e4  # a score with this added has probability 0
_ARGUMENTS = "query key value attn_mask dropout_p is_causal scale enable_gqa".split()
_SIGNATURE = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in _ARGUMENTS])


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


class HiddenScores:
    """Scores that are followed by their storage, from a product through a mask and a softmax to the next product.

    Args:
        values: returns the values of a mask, or None if they are not known.

    Attributes:
        hidden_macs: multiply-adds of both products for scores that masks hide.
        unknown: number of attentions whose mask is not known; they count as dense.
    """

    def __init__(self, values: Callable[[Tensor], Tensor | None]) -> None:
        self._values = values
        self._products: dict[int, _Product] = {}  # by storage
        self._is_in_attention = False
        self.hidden_macs = self.unknown = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Return a context in which calls of ``scaled_dot_product_attention`` are counted, and not their operators."""
        original = functional.scaled_dot_product_attention

        def counted(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            bound = _SIGNATURE.bind_partial(query, key, value, *args, **kwargs).arguments
            self._count(query, key, value, bound.get("attn_mask"), is_causal=bound.get("is_causal", False))
            self._is_in_attention = True
            try:
                return original(query, key, value, *args, **kwargs)
            finally:
                self._is_in_attention = False

        with _torch.swapped(functional, "scaled_dot_product_attention", counted):
            yield

    def _count(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool) -> None:
        macs_per_score = query.shape[-1] + value.shape[-1]
        length, keys = query.shape[-2], key.shape[-2]
        if is_causal:  # torch aligns the mask to the top left: row i sees the keys 0 to i
            hidden = length * keys - sum(min(row + 1, keys) for row in range(length))
            self.hidden_macs += prod(query.shape[:-2]) * hidden * macs_per_score
        elif mask is not None:
            values = self._values(mask)
            if values is None:
                self.unknown += 1
            else:
                repeats = prod(query.shape[:-1]) * keys // max(values.numel(), 1)
                self.hidden_macs += _hidden_in(values) * repeats * macs_per_score

    def note(self, rule: OpRule, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, macs: int) -> None:
        """Follow one operator of a forward that has run."""
        is_followed = isinstance(out, Tensor) and out.is_floating_point() and out.layout is torch.strided
        if self._is_in_attention or not is_followed:
            for tensor in tensors_in(out):  # a new tensor may have the address of one that was freed
                if tensor.layout is torch.strided:
                    self._products.pop(storage_of(tensor), None)
            return
        tensors = [tensor for tensor in tensors_in((args, kwargs)) if tensor.layout is torch.strided]
        scores = next((tensor for tensor in tensors if storage_of(tensor) in self._products), None)
        before = None if scores is None else self._products[storage_of(scores)]
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
            self._products[storage_of(out)] = after
        else:
            self._products.pop(storage_of(out), None)

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
        if mask is None or before.is_normed or storage_of(mask) in self._products:
            return before
        values = self._values(mask)
        if values is None:
            return replace(before, is_unknown=before.is_unknown or mask.dim() > 1)
        # A filled element is hidden where the mask is True, a masked one where it is False.
        hidden = values.numel() - _hidden_in(values) if effect == "fill" else _hidden_in(values)
        return replace(before, hidden=before.hidden + hidden * (out.numel() // max(values.numel(), 1)))


def _hidden_in(mask: Tensor) -> int:
    """Return how many elements of a mask hide their score: False, or a number of at most -10,000.

    >>> _hidden_in(torch.tensor([True, False])), _hidden_in(torch.tensor([0.0, -0.5, float("-inf")]))
    (1, 1)
    """
    with disable_current_modes(), _torch.DisableTorchFunction():  # these are not operators of the model
        hidden = ~mask if mask.dtype == torch.bool else mask <= _HIDDEN
        return int(hidden.sum())
