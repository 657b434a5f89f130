"""Operators with one result per element, and operators that move elements."""

from __future__ import annotations

from itertools import zip_longest
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from modelsummary.operators.shape_rules import Shape, are_plain_floats, like, new_contiguous
from modelsummary.operators.table import register

__all__: list[str] = []


def _same(x: Tensor, *options: Any, **named: Any) -> Tensor | None:
    """Return the result of an operator with one result per element, of the dtype of ``x``."""
    return like(x) if all(map(_is_usual, (*options, *named.values()))) else None


def _is_usual(option: Any) -> bool:
    if isinstance(option, str):
        return option in ("none", "tanh")  # approximations of gelu
    return option is None or isinstance(option, Real)


def _broadcast(a: Tensor, b: Tensor) -> torch.Size | None:
    """Return the broadcast shape of plain tensors; None if the strides of the result are complicated."""
    if a.shape == b.shape:
        return a.shape
    pairs = list(zip_longest(reversed(a.shape), reversed(b.shape), fillvalue=1))[::-1]
    if any(own != other and 1 not in (own, other) for own, other in pairs):
        return None
    shape = torch.Size(map(max, pairs))
    return None if 1 in shape[1:] else shape


def _arithmetic(a: Any, b: Any, *, alpha: Any = 1) -> Tensor | None:
    if not isinstance(a, Tensor) or not isinstance(alpha, Real):
        return None
    if isinstance(b, Real):
        return like(a)
    if not isinstance(b, Tensor) or a.dtype is not b.dtype:
        return None
    if a.layout is b.layout is torch.strided and a.shape == b.shape and a.stride() == b.stride():
        return like(a)
    if not are_plain_floats(a, b):
        return None
    shape = _broadcast(a, b)
    return None if shape is None else new_contiguous(shape, a.dtype)


def _roll(x: Tensor, shifts: Shape, dims: Shape = ()) -> Tensor | None:
    if not len(shifts) == len(dims) > 0 or not all(-x.dim() <= dim < x.dim() for dim in dims):
        return None
    is_valid = len({dim % x.dim() for dim in dims}) == len(dims) and are_plain_floats(x)
    return new_contiguous(x.shape, x.dtype) if is_valid else None


register(
    "aten",
    "relu gelu silu sigmoid tanh hardswish hardsigmoid hardtanh leaky_relu elu mish softplus exp log neg abs sqrt rsqrt"
    " reciprocal sin cos erf clamp_min",
    overload="default",
    shape=_same,
)
register("aten", "pow", overload="Tensor_Scalar", shape=_same)
register("aten", "add sub mul div", overload="Tensor", shape=_arithmetic)
register("aten", "add sub mul div", overload="Scalar", shape=_arithmetic)
register("aten", "roll", overload="default", shape=_roll)
