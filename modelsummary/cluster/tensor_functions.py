"""What parallelism puts between layers: functions whose forward and backward are collectives.

The collectives are torch's own operators, so the record of a step holds them among the others, with their sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelsummary import _torch

__all__ = ["Dispatch", "Enter", "Gather", "Join", "Leave", "Scatter", "ShareOut", "Take"]

_OPS: Any = _torch.functional_collectives()
_GROUP, _EXPERTS = "tensor", "expert"


def _all_reduce(x: Tensor) -> Tensor:
    reduced: Tensor = _OPS.all_reduce(x, "sum", _GROUP)
    return reduced


def _all_gather(x: Tensor, ranks: int, dim: int) -> Tensor:
    rows = _OPS.all_gather_into_tensor(x.reshape(-1, x.shape[-1]), ranks, _GROUP)
    gathered: Tensor = rows.view(*x.shape[:dim], x.shape[dim] * ranks, *x.shape[dim + 1 :])
    return gathered


def _reduce_scatter(x: Tensor, ranks: int, dim: int) -> Tensor:
    rows = _OPS.reduce_scatter_tensor(x.reshape(-1, x.shape[-1]), "sum", ranks, _GROUP)
    scattered: Tensor = rows.view(*x.shape[:dim], x.shape[dim] // ranks, *x.shape[dim + 1 :])
    return scattered


def _part(x: Tensor, ranks: int, dim: int) -> Tensor:
    return x.narrow(dim, 0, x.shape[dim] // ranks)


def _all_to_all(x: Tensor, copies: int) -> None:
    """Exchange ``copies`` rows for each row of ``x`` with the other ranks."""
    rows = x.new_empty(copies, x.numel() // x.shape[-1], x.shape[-1])
    _OPS.all_to_all_single(rows, [copies], [copies], _EXPERTS)


class Dispatch(torch.autograd.Function):
    """Tokens that are sent to the ranks of their experts, or what these made of them that is sent back.

    As many rows return, so the tensor stays as it is.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: int) -> Tensor:
        """Keep the experts per token for the backward, and return the result."""
        ctx.copies = copies
        _all_to_all(x, copies)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradient of the input."""
        _all_to_all(grads[0], ctx.copies)
        return grads[0], None


class Enter(torch.autograd.Function):
    """The input of column-parallel layers: its gradient is reduced."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        """Return the result."""
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> Any:
        """Return the gradient of the input."""
        return _all_reduce(grads[0])


class Leave(torch.autograd.Function):
    """The result of a row-parallel layer: it is reduced."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        """Return the result."""
        return _all_reduce(x)

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> Any:
        """Return the gradient of the input."""
        return grads[0]


class Gather(torch.autograd.Function):
    """The input of column-parallel layers under sequence parallelism: it is gathered, its gradient reduced."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, dim: int) -> Tensor:
        """Keep the arguments for the backward, and return the result."""
        ctx.ranks, ctx.dim = ranks, dim
        return _all_gather(x, ranks, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradient of the input."""
        own = _reduce_scatter(grads[0], ctx.ranks, ctx.dim)
        _all_gather(own, ctx.ranks, ctx.dim)  # what the layers took, for the gradient of their weights
        return own, None, None


class Scatter(torch.autograd.Function):
    """The result of a row-parallel layer under sequence parallelism."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, dim: int) -> Tensor:
        """Keep the arguments for the backward, and return the result."""
        ctx.ranks, ctx.dim = ranks, dim
        return _reduce_scatter(x, ranks, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradient of the input."""
        return _all_gather(grads[0], ctx.ranks, ctx.dim), None, None


class Take(torch.autograd.Function):
    """The share of one rank of a tensor that all ranks hold: no collective, but for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, dim: int) -> Tensor:
        """Keep the arguments for the backward, and return the result."""
        ctx.ranks, ctx.dim = ranks, dim
        return _part(x, ranks, dim).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradient of the input."""
        return _all_gather(grads[0], ctx.ranks, ctx.dim), None, None


class ShareOut(torch.autograd.Function):
    """The share of one rank of the tokens; the layer that made them returns it by a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, dim: int) -> Tensor:
        """Keep the shape for the backward, and return the result."""
        ctx.shape = x.shape
        return x.new_empty([size // ranks if place == dim else size for place, size in enumerate(x.shape)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradient of the input."""
        return grads[0].new_empty(ctx.shape), None, None


class Join(torch.autograd.Function):
    """The whole of a tensor whose last dimension is sharded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, dim: int) -> Tensor:
        """Keep the arguments for the backward, and return the result."""
        ctx.ranks, ctx.dim = ranks, dim
        return _all_gather(x, ranks, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradient of the input."""
        return _part(grads[0], ctx.ranks, ctx.dim).clone(), None, None
