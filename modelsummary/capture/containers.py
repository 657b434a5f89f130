"""Walk the nested arguments and results of a forward: shapes, bytes, and copies with other tensors."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from modelsummary._torch import tree_leaves, tree_map
from modelsummary.capture.execution.shape_tensor import ShapeTensor
from modelsummary.layer_info import UNKNOWN, Sizes
from modelsummary.operators.tensor_bytes import nbytes_of

__all__ = [
    "argument_sizes",
    "is_array",
    "map_leaves",
    "map_tensors",
    "replace_in_objects",
    "result_sizes",
    "sizes_of",
    "tensors_of",
]

# How deep to look for tensors inside objects that are not containers (a distribution, a cache of layers),
# and inside any value, as a container may hold itself.
_OBJECT_DEPTH = 3
_DEPTH = 50
_PLAIN = (ShapeTensor, Tensor)
_LEAVES = frozenset({ShapeTensor, Tensor, nn.Parameter, int, float, bool, str, type(None)})
_LEAVES |= {torch.dtype, torch.device, torch.layout, torch.memory_format}
_KEYS = (str, bytes, int, float, Enum, type(None), torch.dtype, torch.device)
_SEQUENCES = (list, tuple, set, frozenset, deque)


def _parts(value: Any, objects_left: int) -> dict[str, Any] | Sequence[Any] | None:
    """Return the parts of a container or an object that may hold tensors; None for anything else."""
    if isinstance(value, Mapping):
        return {_key(key, position): inner for position, (key, inner) in enumerate(value.items())}
    if isinstance(value, _SEQUENCES):
        return tuple(value)
    if objects_left <= 0:
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, nn.Module)):
        return {field.name: _field(value, field.name) for field in dataclasses.fields(value)}
    return _attributes(value)


def _key(key: Any, position: int) -> str:
    """Return a key as text. The text of a tensor has its values, which a run on shapes lacks."""
    parts = key if isinstance(key, tuple) else (key,)
    return str(key) if all(isinstance(part, _KEYS) for part in parts) else f"{type(key).__name__} {position}"


def _field(value: Any, name: str) -> Any:
    """Return a field of a dataclass; None for a missing one, or one that its class guards."""
    try:
        return getattr(value, name, None)
    except Exception:  # a configuration of transformers raises if its layers differ
        return None


def sizes_of(
    value: Any, seen: dict[int, Any] | None = None, objects_left: int = _OBJECT_DEPTH, left: int = _DEPTH
) -> Sizes:
    """Return the shapes of the tensors in ``value`` with its structure kept; ``seen`` collects the tensors by id.

    >>> sizes_of((torch.ones(2, 3), {"mask": torch.ones(4), "scale": 0.5}))
    ([2, 3], {'mask': [4], 'scale': None})
    """
    if isinstance(value, Tensor):
        if seen is not None:
            seen[id(value)] = value
        return _shape(value)
    if is_array(value):
        if seen is not None:
            seen[id(value)] = value
        return list(value.shape)
    parts = _parts(value, objects_left) if left else None
    if parts is None:
        return None
    is_object = not isinstance(value, (Mapping, *_SEQUENCES))
    if isinstance(parts, dict):
        inner = {key: sizes_of(part, seen, objects_left - is_object, left - 1) for key, part in parts.items()}
        # Of an object, keep only the attributes that hold tensors.
        return {key: sizes for key, sizes in inner.items() if sizes is not None} or None if is_object else inner
    structure = tuple(sizes_of(part, seen, objects_left, left - 1) for part in parts)
    return None if all(part is None for part in structure) else structure


def is_array(value: Any) -> bool:
    """Return True for a numpy array, without importing numpy."""
    return type(value).__module__ == "numpy" and hasattr(value, "__array__")


def _shape(tensor: Tensor) -> list[int] | str:
    """Return the tensor's shape; ``UNKNOWN`` for a nested tensor, whose shape is not a list of integers."""
    return UNKNOWN if tensor.is_nested else [int(size) for size in tensor.shape]


def argument_sizes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sizes, int]:
    """Return the shapes and bytes of a call's arguments. A sole argument with tensors is given without its tuple.

    >>> argument_sizes((torch.ones(2, 3),), {"mask": torch.ones(4)})
    (([2, 3], {'mask': [4]}), 40)
    """
    if len(args) == 1 and not kwargs:  # true of nearly every call
        return _sizes_and_bytes(args[0])
    seen: dict[int, Any] = {}
    positional = [sizes_of(argument, seen) for argument in args]
    named = {name: sizes for name, value in kwargs.items() if (sizes := sizes_of(value, seen)) is not None}
    with_tensors = [sizes for sizes in positional if sizes is not None]
    structure: Sizes
    if named:
        structure = named if not with_tensors else (*positional, named)
    elif len(with_tensors) <= 1:
        structure = with_tensors[0] if with_tensors else None
    else:
        structure = tuple(positional)
    return structure, bytes_of(seen)


def result_sizes(value: Any) -> tuple[Sizes, int]:
    """Return the shapes and bytes of a call's result."""
    sizes, nbytes = _sizes_and_bytes(value)
    if sizes is None and value is not None and not isinstance(value, (bool, int, float, str)):
        sizes = UNKNOWN
    return sizes, nbytes


def _sizes_and_bytes(value: Any) -> tuple[Sizes, int]:
    if type(value) in _PLAIN and value.layout is torch.strided and not value.is_nested:
        return list(value.shape), value.nbytes
    seen: dict[int, Any] = {}
    return sizes_of(value, seen), bytes_of(seen)


def bytes_of(tensors: dict[int, Any]) -> int:
    """Return the bytes of the tensors and arrays, by their dtypes."""
    return sum(nbytes_of(tensor) for tensor in tensors.values())


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in a nested value, each object once; of a packed sequence only the data."""
    if type(value) in _PLAIN:  # true of most results
        yield value
        return
    seen: dict[int, Any] = {}
    sizes_of(value, seen)
    packed = (leaf for leaf in tree_leaves(value, is_leaf=_is_packed) if _is_packed(leaf))
    structure = {id(part) for sequence in packed for part in sequence[1:]}
    yield from (tensor for tensor in seen.values() if isinstance(tensor, Tensor) and id(tensor) not in structure)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return ``value`` with ``function`` applied to its tensors: containers are rebuilt, other objects kept.

    >>> map_tensors(torch.neg, {"x": torch.tensor([1]), "scale": 2})
    {'x': tensor([-1]), 'scale': 2}
    """
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return ``value`` with ``function`` applied to everything in it that is not a container.

    Only the data of a packed sequence is a leaf; its batch sizes are structure and must stay on the CPU.
    """
    kind = type(value)
    if kind is tuple or kind is list:  # nearly every container; torch's ``tree_map`` takes ten times as long
        return kind(map_leaves(function, inner) for inner in value)
    if kind is dict:
        return {key: map_leaves(function, inner) for key, inner in value.items()}
    if kind in _LEAVES:
        return function(value)

    def replace(leaf: Any) -> Any:
        return leaf._replace(data=function(leaf.data)) if _is_packed(leaf) else function(leaf)

    return tree_map(replace, value, is_leaf=_is_packed)


def replace_in_objects(function: Callable[[Tensor], Tensor], value: Any) -> None:
    """Replace every tensor that an object in ``value`` holds by ``function(tensor)``.

    Containers in ``value`` itself are not changed (``map_leaves`` rebuilds them); containers inside objects are.
    """
    seen: set[int] = set()

    def visit(inner: Any, left: int, *, inside: bool) -> None:
        if id(inner) in seen or left == 0:
            return
        seen.add(id(inner))
        is_object = not isinstance(inner, (Mapping, *_SEQUENCES))
        parts = _attributes(inner) if is_object else inner
        if isinstance(parts, (dict, list)):
            for key, part in list(parts.items() if isinstance(parts, dict) else enumerate(parts)):
                if type(part) is Tensor and (inside or is_object):
                    parts[key] = function(part)
        for part in parts.values() if isinstance(parts, Mapping) else parts or ():
            if not isinstance(part, Tensor):
                visit(part, left - 1, inside=inside or is_object)

    visit(value, 2 * _OBJECT_DEPTH, inside=False)


def _attributes(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object that may hold tensors; None for other values."""
    if isinstance(value, (type, nn.Module, Tensor, str, bytes)) or callable(value):
        return None
    attributes = getattr(value, "__dict__", None)
    return attributes if isinstance(attributes, dict) else None


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)
