"""Tensors in memory: the inner tensors of a wrapper, the packed bytes of a quantised weight.

A tensor subclass reports the dtype that it computes in; its bytes are the bytes of the tensors that hold its elements.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from modelsummary import _torch
from modelsummary._torch import is_traceable_wrapper_subclass

__all__ = [
    "inner_tensors",
    "is_distributed",
    "is_wrapper",
    "nbytes_of",
    "numel_of",
    "shape_of",
    "storage_of",
    "stored_tensors",
    "unpacked",
]

_PLAIN = (Tensor, nn.Parameter)


def nbytes_of(tensor: Any) -> int:
    """Return the bytes of a tensor or array; a wrapper has the bytes of its inner tensors, each object once.

    A sparse or nested tensor has the bytes of its stored elements, without their indices.

    >>> nbytes_of(torch.ones(2, 3))
    24
    """
    if not isinstance(tensor, Tensor):
        return int(tensor.nbytes)
    return sum(map(_own_bytes, inner_tensors(tensor)))


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that hold the elements of ``tensor``, each object once; a plain tensor holds its own.

    >>> x = torch.ones(2, 3)
    >>> inner_tensors(x)[0] is x
    True
    """
    kind = type(tensor)
    if kind in _PLAIN or not (hasattr(kind, "__tensor_flatten__") or "quant_state" in tensor.__dict__):
        return [tensor]
    return list({id(inner): inner for inner in _inner(tensor)}.values())


def stored_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that have the memory of ``tensor``: its inner tensors; of a sparse one, indices and values.

    >>> [stored.nbytes for stored in stored_tensors(torch.eye(3).to_sparse())]
    [48, 12]
    """
    tensors: list[Tensor] = []
    with _torch.DisableTorchDispatch():  # modes need not see these questions
        for inner in inner_tensors(tensor):
            if inner.layout is torch.sparse_coo:
                tensors += [inner._indices(), inner._values()]
            elif inner.layout in (torch.sparse_csr, torch.sparse_bsr):
                tensors += [inner.crow_indices(), inner.col_indices(), inner.values()]
            elif inner.layout in (torch.sparse_csc, torch.sparse_bsc):
                tensors += [inner.ccol_indices(), inner.row_indices(), inner.values()]
            else:
                tensors.append(inner)
    return tensors


def unpacked(arguments: Iterable[Any]) -> tuple[Tensor, Tensor | None]:
    """Return copies of the weight and the bias in the packed object among the arguments of a quantised operator."""
    packed: Any = next(argument for argument in arguments if hasattr(argument, "unpack"))
    weight, bias = packed.unpack()
    return weight, bias


def is_distributed(kind: type) -> bool:
    """Return True if tensors of a type are sharded over processes.

    >>> is_distributed(torch.Tensor)
    False
    """
    distributed = sys.modules.get("torch.distributed.tensor")  # not imported: no such tensor exists
    return distributed is not None and issubclass(kind, getattr(distributed, "DTensor", ()))


def is_wrapper(tensor: Any) -> bool:
    """Return True if a tensor wraps inner tensors and can be taken apart; False for a nested tensor.

    >>> is_wrapper(torch.ones(2, 3))
    False
    """
    if type(tensor) in _PLAIN or not isinstance(tensor, Tensor) or tensor.is_nested:
        return False
    return is_traceable_wrapper_subclass(tensor)


def shape_of(tensor: Tensor) -> torch.Size:
    """Return the shape of a tensor; a packed weight has the shape of the weight before packing.

    >>> shape_of(torch.ones(2, 3))
    torch.Size([2, 3])
    """
    state = _quant_state(tensor)
    return tensor.shape if state is None else torch.Size(state.shape)


def numel_of(tensor: Tensor) -> int:
    """Return the number of elements of a tensor; a packed weight counts the elements before packing.

    >>> numel_of(torch.ones(2, 3))
    6
    """
    return tensor.numel() if _quant_state(tensor) is None else prod(shape_of(tensor))


def storage_of(tensor: Tensor) -> int:
    """Return an id of the storage behind a tensor; of the tensor object if it has no storage.

    >>> x = torch.ones(2, 3)
    >>> storage_of(x) == storage_of(x.t())
    True
    """
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return -id(tensor)


def _inner(tensor: Tensor) -> Iterator[Tensor]:
    if is_wrapper(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = [getattr(tensor, name) for name in names]
        for part in parts:
            if isinstance(part, Tensor):  # a distributed tensor also lists its mesh
                yield from _inner(part)
        return
    yield tensor
    state = _quant_state(tensor)
    while state is not None:  # the scales may be quantised themselves
        yield from (value for value in vars(state).values() if isinstance(value, Tensor))
        state = getattr(state, "state2", None)


def _quant_state(tensor: Tensor) -> Any:
    """Return the state that bitsandbytes keeps beside a packed 4-bit weight: its shape, scales and code."""
    state = None if type(tensor) in _PLAIN else tensor.__dict__.get("quant_state")
    return state if getattr(state, "shape", None) is not None else None


def _own_bytes(tensor: Tensor) -> int:
    if tensor.is_nested:
        return tensor.values().nbytes if tensor.layout is torch.jagged else tensor.nbytes
    if tensor.layout is torch.strided:
        return tensor.nbytes
    return tensor._nnz() * tensor.element_size() if tensor.is_sparse or tensor.is_sparse_csr else 0
