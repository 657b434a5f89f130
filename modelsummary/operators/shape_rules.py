"""What shape rules share: shapes of results without torch's meta kernels.

Torch writes many of these kernels in Python, as decompositions into some twenty operators each. A shape rule returns
exactly the shapes, strides and dtypes that the kernel returns. It returns None for a case that it does not handle; then
the kernel runs, and raises the errors of the operator. Each rule but those for what meta kernels refuse saves at least
3 % of ``Statistics`` on one of ResNet-50, ViT-B/16, Swin-T and a decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = [
    "FLOATS",
    "META",
    "Shape",
    "are_plain_floats",
    "contiguous_strides",
    "dtype_of_statistics",
    "in_format",
    "is_plain",
    "like",
    "new_contiguous",
]

META = torch.device("meta")
FLOATS = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
Shape: TypeAlias = Sequence[int]


@lru_cache(maxsize=4096)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides that torch gives a contiguous tensor.

    >>> contiguous_strides((2, 0, 3))
    (3, 3, 1)
    """
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


@lru_cache(maxsize=4096)
def _strides_in_order(shape: torch.Size, strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the strides of a dense tensor with its dimensions in the order of ``strides``; None if several may be.

    Results element by element keep the order of the dimensions of their operand (``reorder_dimensions`` in
    TensorIterator.cpp).
    """
    inner_first = sorted(range(len(shape)), key=strides.__getitem__)
    is_first_inside = shape[:1] == (1,) and inner_first[-1] != 0
    if is_first_inside or 0 in shape or 1 in shape[1:] or 0 in strides or len(set(strides)) < len(strides):
        return None
    dense, elements = [0] * len(shape), 1
    for dim in inner_first:
        dense[dim] = elements
        elements *= shape[dim]
    return tuple(dense)


def is_plain(x: Any) -> bool:
    """Return True for a tensor that is contiguous, also in the strides of dimensions of size 1, and not empty."""
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        return False
    shape = x.shape
    return 0 not in shape and x.stride() == contiguous_strides(shape)


def are_plain_floats(x: Tensor, *others: Tensor | None) -> bool:
    """Return True if all tensors are plain and of one floating point dtype; ``others`` may be None."""
    dtype = x.dtype
    return (
        dtype in FLOATS
        and is_plain(x)
        and all(other is None or (is_plain(other) and other.dtype is dtype) for other in others)
    )


def new_contiguous(shape: Shape, dtype: torch.dtype) -> Tensor:
    """Return a contiguous tensor on meta."""
    shape = torch.Size(shape)
    return torch.empty_strided(shape, contiguous_strides(shape), dtype=dtype, device=META)


def like(x: Tensor) -> Tensor | None:
    """Return a tensor of the shape and dtype of ``x`` with its dimensions in the same order."""
    if x.dtype not in FLOATS or x.layout is not torch.strided:
        return None
    strides = contiguous_strides(x.shape) if is_plain(x) else _strides_in_order(x.shape, x.stride())
    return None if strides is None else torch.empty_strided(x.shape, strides, dtype=x.dtype, device=META)


def in_format(tensor: Tensor, memory_format: torch.memory_format | None) -> Tensor:
    """Return a tensor in a memory format; None keeps its own."""
    return tensor if memory_format is None else tensor.contiguous(memory_format=memory_format)


def dtype_of_statistics(x: Tensor, *parameters: Tensor | None) -> torch.dtype:
    """Return the dtype of the parameters, which may be float32 for a half-precision input.

    See ``param_scalar_type`` in ATen/native/cpu.
    """
    return next((parameter.dtype for parameter in parameters if parameter is not None), x.dtype)
