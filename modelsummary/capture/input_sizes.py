"""Inputs given by their sizes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from modelsummary.errors import InputError

__all__ = ["InputSize", "from_sizes", "in_short", "sizes_in"]


@dataclass(frozen=True)
class InputSize:
    """An input given by its size. The tensor is made once the execution is known.

    >>> InputSize((2,), torch.long).random(torch.device("cpu"))
    tensor([0, 0])
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def random(self, device: torch.device) -> Tensor:
        """Return a tensor of this size: uniform random numbers in [0, 1), or zeros for integers."""
        if self.dtype.is_floating_point or self.dtype.is_complex:
            return torch.rand(self.shape, dtype=self.dtype, device=device)
        return torch.zeros(self.shape, dtype=self.dtype, device=device)  # an index that every table has


def sizes_in(input_data: Any) -> list[Sequence[Any]] | None:
    """Return the sizes if ``input_data`` is one size or a list of sizes; None if it is anything else."""
    if not isinstance(input_data, (list, tuple)) or not input_data:
        return None
    if all(map(_is_number, input_data)):
        return [input_data]
    are_sizes = [isinstance(each, (list, tuple)) and all(map(_is_number, each)) for each in input_data]
    if all(are_sizes) and any(input_data):  # () among others is the size of a scalar
        return list(input_data)
    if any(are_sizes) and any(isinstance(each, Tensor) for each in input_data):
        raise InputError(f"input_data={in_short(input_data)} mixes sizes and tensors; pass only tensors or only sizes")
    return None


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor) or getattr(value, "ndim", False):  # tensors and arrays also have an __index__
        return False
    return isinstance(value, (int, float)) or hasattr(value, "__index__")


def from_sizes(
    model: nn.Module,
    sizes: list[Sequence[Any]],
    batch_dim: int | None,
    dtypes: torch.dtype | Sequence[torch.dtype] | None,
) -> tuple[InputSize, ...]:
    """Return inputs of these sizes. Raise ``InputError`` for dtypes or sizes that are unusable."""
    if dtypes is None:
        floats = (each.dtype for each in model.parameters() if each.dtype.is_floating_point)
        each_dtype = [next(floats, torch.get_default_dtype())] * len(sizes)
    else:
        each_dtype = [dtypes] if isinstance(dtypes, torch.dtype) else list(dtypes)
        if len(each_dtype) != len(sizes):
            raise InputError(
                f"dtypes has {len(each_dtype)} entries for {len(sizes)} size(s): {in_short(sizes)}; pass one per size"
            )
        # torchinfo also accepts tensor types such as torch.LongTensor, which have a dtype
        each_dtype = [getattr(dtype, "dtype", dtype) for dtype in each_dtype]
        for dtype in each_dtype:
            if not isinstance(dtype, torch.dtype):
                raise InputError(f"dtypes holds {dtype!r}; expected a torch.dtype such as torch.long")
    shapes = (_with_batch(_checked_size(size), batch_dim) for size in sizes)
    return tuple(InputSize(shape, dtype) for shape, dtype in zip(shapes, each_dtype, strict=True))


def _checked_size(size: Sequence[Any]) -> tuple[int, ...]:
    for number in size:
        if isinstance(number, (bool, float)) or operator.index(number) < 0:
            raise InputError(f"input size {tuple(size)} holds {number!r}; sizes are integers >= 0")
    return tuple(operator.index(number) for number in size)


def _with_batch(shape: tuple[int, ...], batch_dim: int | None) -> tuple[int, ...]:
    if batch_dim is None:
        return shape
    if batch_dim > len(shape):
        raise InputError(f"batch_dim={batch_dim} does not fit the input size {shape}; expected 0 to {len(shape)}")
    return (*shape[:batch_dim], 1, *shape[batch_dim:])


def in_short(value: Any) -> str:
    """Return the repr of a value in one line of at most 80 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
