"""Multiply-adds of attention scores that a mask hides: causal attention and sliding windows leave most of them out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import Parameter, Signature
from math import prod
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["MaskedAttention", "hidden_scores"]

_NAMES = "query key value attn_mask dropout_p is_causal scale enable_gqa".split()
_SIGNATURE = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in _NAMES])
_HIDDEN = -1e4  # a score with this added has probability 0


class MaskedAttention:
    """Counts of ``scaled_dot_product_attention`` in a forward.

    Args:
        values: returns the values of a mask, or None if they are not known.

    Attributes:
        macs: multiply-adds of all calls, dense.
        hidden_macs: the part of them for scores that masks hide.
        unknown: number of calls with a mask whose values are not known; they count as dense.
    """

    def __init__(self, values: Callable[[Tensor], Tensor | None]) -> None:
        self._values = values
        self.macs = self.hidden_macs = self.unknown = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Return a context in which calls are counted."""
        original = functional.scaled_dot_product_attention

        def counted(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            bound = _SIGNATURE.bind_partial(query, key, value, *args, **kwargs).arguments
            self._count(query, key, value, bound.get("attn_mask"), is_causal=bound.get("is_causal", False))
            return original(query, key, value, *args, **kwargs)

        with patch.object(functional, "scaled_dot_product_attention", counted):
            yield

    def _count(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool) -> None:
        per_score = query.shape[-1] + value.shape[-1]
        scores = prod(query.shape[:-1]) * key.shape[-2]
        self.macs += scores * per_score
        if is_causal:
            # torch aligns the mask to the top left: row i sees the keys 0 to i
            length, keys = query.shape[-2], key.shape[-2]
            seen = sum(min(row + 1, keys) for row in range(length))
            self.hidden_macs += (scores - prod(query.shape[:-2]) * seen) * per_score
        elif mask is not None:
            known = self._values(mask)
            if known is None:
                self.unknown += 1
                return
            self.hidden_macs += hidden_scores(known) * (scores // max(known.numel(), 1)) * per_score


def hidden_scores(mask: Tensor) -> int:
    """Return how many elements of a mask hide their score: False, or a number of at most -10,000.

    >>> hidden_scores(torch.tensor([True, False])), hidden_scores(torch.tensor([0.0, -0.5, float("-inf")]))
    (1, 1)
    """
    hidden = ~mask if mask.dtype == torch.bool else mask <= _HIDDEN
    return int(hidden.sum())
