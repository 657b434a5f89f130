"""Multiply-adds of solves with triangular factors, and of distances between rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from modelsummary.costs.macs import SPARSE, existing, register_op_cost, stored

__all__: list[str] = []

aten = torch.ops.aten


@register_op_cost(aten.linalg_solve_triangular)
def _solve_triangular(a: Tensor, b: Tensor, *args: Any, out: Tensor, **kwargs: Any) -> int:
    """Count each element of the (n, n) matrix, zeros included, times each right-hand side: n x n x m.

    (Golub and Van Loan, Matrix Computations, 3.1: n x n x m flops for the triangle, so half as many multiply-adds.)
    """
    return out.numel() * a.shape[-1]


@register_op_cost(aten.triangular_solve)
def _triangular_solve(b: Tensor, a: Tensor, *args: Any, out: Sequence[Tensor], **kwargs: Any) -> int:
    columns = out[0].shape[-1] if out[0].dim() > 1 else 1
    return stored(a) * columns if a.layout in SPARSE else out[0].numel() * a.shape[-1]


@register_op_cost(aten.cholesky_solve)
def _cholesky_solve(b: Tensor, factor: Tensor, *args: Any, out: Tensor, **kwargs: Any) -> int:
    """Count two substitutions: with the factor, and with its transpose."""
    return 2 * out.numel() * factor.shape[-1]


@register_op_cost(existing(aten, "linalg_lu_solve", "linalg_ldl_solve"))
def _factored_solve(factors: Tensor, pivots: Tensor, b: Tensor, *args: Any, out: Tensor, **kwargs: Any) -> int:
    """Count two substitutions, one per factor."""
    return 2 * out.numel() * factors.shape[-1]


@register_op_cost([aten._cdist_forward, *existing(aten, "_euclidean_dist")])
def _cdist(a: Tensor, b: Tensor, *args: Any, out: Tensor, **kwargs: Any) -> int:
    return out.numel() * a.shape[-1]


@register_op_cost(existing(aten, "_cdist_backward"))
def _cdist_backward(grad: Tensor, a: Tensor, *args: Any, **kwargs: Any) -> int:
    """Count the gradient of one set of rows: per pair, one multiply-add per dimension."""
    return grad.numel() * a.shape[-1]


@register_op_cost(existing(aten, "_pdist_forward"))
def _pdist(a: Tensor, *args: Any, out: Tensor, **kwargs: Any) -> int:
    return out.numel() * a.shape[-1]


@register_op_cost(existing(aten, "_pdist_backward"))
def _pdist_backward(grad: Tensor, a: Tensor, *args: Any, **kwargs: Any) -> int:
    return grad.numel() * a.shape[-1]
