"""What parallelism puts between layers: functions whose forward and backward are collectives.

The collectives are torch's own operators, so the record of a step holds them among the others, with their sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from modelsummary import _torch

__all__ = ["dispatch", "enter", "gather", "join", "leave", "scatter", "share_out", "take"]

_OPS: Any = _torch.functional_collectives()
_GROUP, _EXPERTS = "tensor", "expert"


class _Both(torch.autograd.Function):
    """A function with one way for the forward and another for the gradient."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, ahead: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Keep the way back, and return the result."""
        ctx.back = back
        return ahead(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradient of the input."""
        return ctx.back(grads[0]), None, None


def enter(tensor: Tensor) -> Tensor:
    """Return the input of column-parallel layers: its gradient is reduced."""
    return _applied(tensor, _viewed, _all_reduce)


def leave(tensor: Tensor) -> Tensor:
    """Return the result of a row-parallel layer: it is reduced."""
    return _applied(tensor, _all_reduce, _same)


def gather(tensor: Tensor, ranks: int, dim: int) -> Tensor:
    """Return the input of column-parallel layers under sequence parallelism: it is gathered, its gradient reduced."""

    def back(grad: Tensor) -> Tensor:
        share = _reduce_scatter(grad, ranks, dim)
        _all_gather(share, ranks, dim)  # what the layers took, for the gradient of their weights
        return share

    return _applied(tensor, lambda share: _all_gather(share, ranks, dim), back)


def scatter(tensor: Tensor, ranks: int, dim: int) -> Tensor:
    """Return the result of a row-parallel layer under sequence parallelism."""
    return _applied(
        tensor, lambda whole: _reduce_scatter(whole, ranks, dim), lambda share: _all_gather(share, ranks, dim)
    )


def take(tensor: Tensor, ranks: int, dim: int) -> Tensor:
    """Return the share of one rank of a tensor that all ranks hold: no collective, but for the gradient."""
    return _applied(tensor, lambda whole: _part(whole, ranks, dim), lambda share: _all_gather(share, ranks, dim))


def join(tensor: Tensor, ranks: int, dim: int) -> Tensor:
    """Return the whole of a tensor that is sharded along a dimension."""
    return _applied(tensor, lambda share: _all_gather(share, ranks, dim), lambda whole: _part(whole, ranks, dim))


def share_out(tensor: Tensor, ranks: int, dim: int) -> Tensor:
    """Return the share of one rank of the tokens; the layer that made them returns it by a reduce-scatter."""
    shape = tensor.shape
    share = [size // ranks if axis == dim else size for axis, size in enumerate(shape)]
    return _applied(tensor, lambda whole: whole.new_empty(share), lambda grad: grad.new_empty(shape))


def dispatch(tensor: Tensor, copies: int) -> Tensor:
    """Return tokens that are sent to the ranks of their experts, or what these made of them that is sent back.

    As many rows return, so the tensor stays as it is.

    Args:
        tensor: the tokens.
        copies: experts that each token goes to.
    """

    def exchanged(tokens: Tensor) -> Tensor:
        rows = tokens.new_empty(copies, tokens.numel() // tokens.shape[-1], tokens.shape[-1])
        _OPS.all_to_all_single(rows, [copies], [copies], _EXPERTS)
        return tokens

    return _applied(tensor, lambda tokens: _viewed(exchanged(tokens)), exchanged)


# --------------------------------------------------------------------------------------------------- of a rank


def _applied(tensor: Tensor, ahead: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    result: Tensor = _Both.apply(tensor, ahead, back)
    return result


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _viewed(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


def _part(tensor: Tensor, ranks: int, dim: int) -> Tensor:
    return tensor.narrow(dim, 0, tensor.shape[dim] // ranks).clone()


def _all_reduce(tensor: Tensor) -> Tensor:
    reduced: Tensor = _OPS.all_reduce(tensor, "sum", _GROUP)
    return reduced


def _all_gather(tensor: Tensor, ranks: int, dim: int) -> Tensor:
    rows = _OPS.all_gather_into_tensor(tensor.reshape(-1, tensor.shape[-1]), ranks, _GROUP)
    gathered: Tensor = rows.view(*tensor.shape[:dim], tensor.shape[dim] * ranks, *tensor.shape[dim + 1 :])
    return gathered


def _reduce_scatter(tensor: Tensor, ranks: int, dim: int) -> Tensor:
    rows = _OPS.reduce_scatter_tensor(tensor.reshape(-1, tensor.shape[-1]), "sum", ranks, _GROUP)
    scattered: Tensor = rows.view(*tensor.shape[:dim], tensor.shape[dim] // ranks, *tensor.shape[dim + 1 :])
    return scattered
