"""Attention with dropout on shapes as CUDA runs it: one fused kernel, which draws the dropout itself.

The CPU has no fused kernel with dropout. Torch would compute and keep the matrices of scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.nn import functional as F

__all__ = ["fused_attention"]

_DROPOUT = 4  # position of the argument


@contextmanager
def fused_attention() -> Iterator[None]:
    """Return a context in which attention runs without its dropout, so that torch chooses a fused kernel."""
    original = F.scaled_dot_product_attention

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        if "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        if len(args) > _DROPOUT:
            args = (*args[:_DROPOUT], 0.0, *args[_DROPOUT + 1 :])
        return original(*args, **kwargs)

    with patch.object(F, "scaled_dot_product_attention", attention):
        yield
