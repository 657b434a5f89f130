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


def _part(tensor: Tensor, ranks: int, dim: int) -> Tensor:
    return tensor.narrow(dim, 0, tensor.shape[dim] // ranks)


def _all_to_all(tensor: Tensor, copies: int) -> None:
    """Exchange ``copies`` rows for each row of ``tensor`` with the other ranks."""
    rows = tensor.new_empty(copies, tensor.numel() // tensor.shape[-1], tensor.shape[-1])
    _OPS.all_to_all_single(rows, [copies], [copies], _EXPERTS)


class Dispatch(torch.autograd.Function):
    """Tokens that are sent to the ranks of their experts, or what these made of them that is sent back.

    As many rows return, so the tensor stays as it is.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, copies: int) -> Tensor:
        """Keep the experts per token for the backward, and return the result."""
        ctx.copies = copies
        _all_to_all(tensor, copies)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradient of the input."""
        _all_to_all(grads[0], ctx.copies)
        return grads[0], None


class Enter(torch.autograd.Function):
    """The input of column-parallel layers: its gradient is reduced."""

    @staticmethod
    def forward(_ctx: Any, tensor: Tensor) -> Tensor:
        """Return the result."""
        return tensor.view_as(tensor)

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> Any:
        """Return the gradient of the input."""
        return _all_reduce(grads[0])


class Leave(torch.autograd.Function):
    """The result of a row-parallel layer: it is reduced."""

    @staticmethod
    def forward(_ctx: Any, tensor: Tensor) -> Tensor:
        """Return the result."""
        return _all_reduce(tensor)

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> Any:
        """Return the gradient of the input."""
        return grads[0]


class Gather(torch.autograd.Function):
    """The input of column-parallel layers under sequence parallelism: it is gathered, its gradient reduced."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: int, dim: int) -> Tensor:
        """Keep the arguments for the backward, and return the result."""
        ctx.ranks, ctx.dim = ranks, dim
        return _all_gather(tensor, ranks, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradient of the input."""
        share = _reduce_scatter(grads[0], ctx.ranks, ctx.dim)
        _all_gather(share, ctx.ranks, ctx.dim)  # what the layers took, for the gradient of their weights
        return share, None, None


class Scatter(torch.autograd.Function):
    """The result of a row-parallel layer under sequence parallelism."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: int, dim: int) -> Tensor:
        """Keep the arguments for the backward, and return the result."""
        ctx.ranks, ctx.dim = ranks, dim
        return _reduce_scatter(tensor, ranks, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradient of the input."""
        return _all_gather(grads[0], ctx.ranks, ctx.dim), None, None


class Take(torch.autograd.Function):
    """The share of one rank of a tensor that all ranks hold: no collective, but for the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: int, dim: int) -> Tensor:
        """Keep the arguments for the backward, and return the result."""
        ctx.ranks, ctx.dim = ranks, dim
        return _part(tensor, ranks, dim).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradient of the input."""
        return _all_gather(grads[0], ctx.ranks, ctx.dim), None, None


class ShareOut(torch.autograd.Function):
    """The share of one rank of the tokens; the layer that made them returns it by a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: int, dim: int) -> Tensor:
        """Keep the shape for the backward, and return the result."""
        ctx.shape = tensor.shape
        return tensor.new_empty([size // ranks if axis == dim else size for axis, size in enumerate(tensor.shape)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradient of the input."""
        return grads[0].new_empty(ctx.shape), None, None


class Join(torch.autograd.Function):
    """The whole of a tensor whose last dimension is sharded."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: int, dim: int) -> Tensor:
        """Keep the arguments for the backward, and return the result."""
        ctx.ranks, ctx.dim = ranks, dim
        return _all_gather(tensor, ranks, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradient of the input."""
        return _part(grads[0], ctx.ranks, ctx.dim).clone(), None, None
