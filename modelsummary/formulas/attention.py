"""Multiply-adds of attention scores that a mask hides: causal attention and sliding windows leave most of them out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import Parameter, Signature
from math import prod
from typing import Any

from torch import Tensor
from torch.nn import functional

from modelsummary._torch import swapped
from modelsummary.formulas.scores import hidden_scores

__all__ = ["MaskedAttention"]

_NAMES = "query key value attn_mask dropout_p is_causal scale enable_gqa".split()
_SIGNATURE = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in _NAMES])


class MaskedAttention:
    """Counts of ``scaled_dot_product_attention`` in a forward.

    Args:
        values: returns the values of a mask, or None if they are not known.

    Attributes:
        macs: multiply-adds of all calls, dense.
        hidden_macs: the part of them for scores that masks hide.
        unknown: number of calls with a mask whose values are not known; they count as dense.
        is_inside: whether a call is running.
    """

    def __init__(self, values: Callable[[Tensor], Tensor | None]) -> None:
        self._values = values
        self.macs = self.hidden_macs = self.unknown = 0
        self.is_inside = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Return a context in which calls are counted."""
        original = functional.scaled_dot_product_attention

        def counted(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            bound = _SIGNATURE.bind_partial(query, key, value, *args, **kwargs).arguments
            self._count(query, key, value, bound.get("attn_mask"), is_causal=bound.get("is_causal", False))
            self.is_inside = True
            try:
                return original(query, key, value, *args, **kwargs)
            finally:
                self.is_inside = False

        with swapped(functional, "scaled_dot_product_attention", counted):
            yield

    def _count(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool) -> None:
        macs_per_score = query.shape[-1] + value.shape[-1]
        scores = prod(query.shape[:-1]) * key.shape[-2]
        self.macs += scores * macs_per_score
        if is_causal:
            # torch aligns the mask to the top left: row i sees the keys 0 to i
            length, keys = query.shape[-2], key.shape[-2]
            visible = sum(min(row + 1, keys) for row in range(length))
            self.hidden_macs += (scores - prod(query.shape[:-2]) * visible) * macs_per_score
        elif mask is not None:
            mask_values = self._values(mask)
            if mask_values is None:
                self.unknown += 1
                return
            self.hidden_macs += hidden_scores(mask_values) * (scores // max(mask_values.numel(), 1)) * macs_per_score
