"""What a tensor is in memory: a wrapper's inner tensors, the packed bytes of a quantised weight.

A tensor subclass shows the dtype it is computed in. Its bytes are those of the tensors that hold its elements.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["inner_tensors", "is_distributed", "is_wrapper", "nbytes_of", "numel_of", "shape_of", "storage_of"]

_PLAIN = (Tensor, nn.Parameter)


def nbytes_of(tensor: Any) -> int:
    """Return the bytes of a tensor or array, of a wrapper those of its inner tensors, each object once.

    Of a sparse or nested tensor these are the stored elements, without their indices.

    >>> nbytes_of(torch.ones(2, 3))
    24
    """
    if not isinstance(tensor, Tensor):
        return int(tensor.nbytes)
    return sum(map(_own_bytes, inner_tensors(tensor)))


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that hold the elements of ``tensor``, each object once; of a plain tensor itself.

    >>> x = torch.ones(2, 3)
    >>> inner_tensors(x)[0] is x
    True
    """
    kind = type(tensor)
    if kind in _PLAIN or not (hasattr(kind, "__tensor_flatten__") or "quant_state" in tensor.__dict__):
        return [tensor]
    return list({id(each): each for each in _inner(tensor)}.values())


def is_distributed(kind: type) -> bool:
    """Return True if a type is that of tensors that are spread over processes.

    >>> is_distributed(torch.Tensor)
    False
    """
    distributed = sys.modules.get("torch.distributed.tensor")  # absent: there are none
    return distributed is not None and issubclass(kind, getattr(distributed, "DTensor", ()))


def is_wrapper(tensor: Any) -> bool:
    """Return True for a tensor that computes with inner tensors and can be taken apart; False for a nested one.

    >>> is_wrapper(torch.ones(2, 3))
    False
    """
    if type(tensor) in _PLAIN or not isinstance(tensor, Tensor) or tensor.is_nested:
        return False
    return is_traceable_wrapper_subclass(tensor)


def shape_of(tensor: Tensor) -> torch.Size:
    """Return the shape that a tensor stands for: of a packed weight that of the weight.

    >>> shape_of(torch.ones(2, 3))
    torch.Size([2, 3])
    """
    state = _quant_state(tensor)
    return tensor.shape if state is None else torch.Size(state.shape)


def numel_of(tensor: Tensor) -> int:
    """Return how many elements a tensor stands for: of a packed weight those of the weight.

    >>> numel_of(torch.ones(2, 3))
    6
    """
    return tensor.numel() if _quant_state(tensor) is None else prod(shape_of(tensor))


def storage_of(tensor: Tensor) -> int:
    """Id of the memory behind a tensor; of its own where it has none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return -id(tensor)


def _inner(tensor: Tensor) -> Iterator[Tensor]:
    if is_wrapper(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = [getattr(tensor, name) for name in names]
        for part in parts:
            if isinstance(part, Tensor):  # a distributed tensor lists its mesh, too
                yield from _inner(part)
        return
    yield tensor
    state = _quant_state(tensor)
    while state is not None:  # the scales may be quantised themselves
        yield from (value for value in vars(state).values() if isinstance(value, Tensor))
        state = getattr(state, "state2", None)


def _quant_state(tensor: Tensor) -> Any:
    """Return what bitsandbytes keeps beside a packed 4-bit weight: the weight's shape, its scales and its code."""
    state = None if type(tensor) in _PLAIN else tensor.__dict__.get("quant_state")
    return state if getattr(state, "shape", None) is not None else None


def _own_bytes(tensor: Tensor) -> int:
    if tensor.is_nested:
        return tensor.values().nbytes if tensor.layout is torch.jagged else tensor.nbytes
    if tensor.layout is torch.strided:
        return tensor.nbytes
    return tensor._nnz() * tensor.element_size() if tensor.is_sparse or tensor.is_sparse_csr else 0
