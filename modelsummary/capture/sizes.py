"""Inputs given by their sizes: the sizes in the user's input, and the inputs that they describe."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_origin

import torch
from torch import Tensor, nn

from modelsummary._torch import tree_leaves
from modelsummary.errors import InputError, close_to

__all__ = ["Dtypes", "InputSize", "inputs_of", "is_size", "listed_sizes", "named_sizes", "short", "takes_sequence"]

_Dtype = torch.dtype | str
Dtypes = _Dtype | Sequence[_Dtype] | Mapping[str, _Dtype] | None
_NAMES = (
    "float float16 float32 float64 half bfloat16 double int int8 int16 int32 int64 long uint8 bool complex64 complex128"
).split()
_CONSTANT = (bool, int, float, complex, str, bytes, type(None))


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


# ------------------------------------------------------------------------------------ sizes in the input


def listed_sizes(input_data: Any) -> list[Sequence[Any]] | None:
    """Return the sizes if ``input_data`` is one size or a list of sizes; None if it is anything else.

    Raises:
        InputError: a list holds sizes and tensors.

    >>> listed_sizes((2, 3)), listed_sizes([(2, 3), (4,)]), listed_sizes("x")
    ([(2, 3)], [(2, 3), (4,)], None)
    """
    if not isinstance(input_data, (list, tuple)) or not input_data:
        return None
    if is_size(input_data):
        return [input_data]
    are_sizes = [isinstance(entry, (list, tuple)) and (not entry or is_size(entry)) for entry in input_data]
    if all(are_sizes) and any(input_data):  # () among others is the size of a scalar
        return list(input_data)
    if any(are_sizes) and any(isinstance(entry, Tensor) for entry in input_data):
        raise InputError(f"input_data={short(input_data)} mixes sizes and tensors; pass only tensors or only sizes")
    return None


def named_sizes(values: Mapping[str, Any], signature: inspect.Signature | None) -> dict[str, Sequence[Any]]:
    """Return the arguments that are sizes, if all others are constants: a tensor among them makes a tuple a constant.

    A tuple for a parameter that is annotated as a list or tuple is a constant, too.

    >>> named_sizes({"ids": (1, 128), "causal": True}, None)
    {'ids': (1, 128)}
    """
    if not all(isinstance(leaf, _CONSTANT) for leaf in tree_leaves(list(values.values()))):
        return {}
    return {name: value for name, value in values.items() if is_size(value) and not takes_sequence(signature, name)}


def is_size(value: Any) -> bool:
    """Return True for a tuple or list of at least one number.

    >>> is_size((1, 3)), is_size(()), is_size(3)
    (True, False, False)
    """
    return isinstance(value, (list, tuple)) and bool(value) and all(map(_is_number, value))


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor) or getattr(value, "ndim", False):  # tensors and arrays also have an __index__
        return False
    return isinstance(value, (int, float)) or hasattr(value, "__index__")


def takes_sequence(signature: inspect.Signature | None, name: str | None = None) -> bool:
    """Return True if forward's parameter ``name`` (None: the first) is annotated as a list or tuple."""
    parameters = signature.parameters if signature is not None else {}
    name = next(iter(parameters), "") if name is None else name
    annotation = parameters[name].annotation if name in parameters else inspect.Parameter.empty
    if isinstance(annotation, str):
        return annotation.removeprefix("typing.").startswith(("list", "List", "Sequence", "tuple", "Tuple"))
    return get_origin(annotation) in (list, tuple, Sequence) or annotation in (list, tuple)


# -------------------------------------------------------------------------------- inputs of these sizes


def inputs_of(
    sizes: Sequence[Sequence[Any]], names: Sequence[str] | None, model: nn.Module, batch_dim: int | None, dtypes: Dtypes
) -> tuple[InputSize, ...]:
    """Return the inputs that sizes describe.

    Args:
        sizes: the sizes.
        names: names of forward's arguments that they are for; None: they are given by position.
        model: its first floating point parameter has the default dtype.
        batch_dim: position at which a batch of one is inserted; None: none is.
        dtypes: one dtype for all, one per size, or a dict by argument name; text such as ``"long"`` is a dtype, too.

    Raises:
        InputError: a size or dtype is unusable.
    """
    floats = (parameter.dtype for parameter in model.parameters() if parameter.dtype.is_floating_point)
    usual = next(floats, torch.get_default_dtype())
    shapes = [_with_batch(_checked_size(size), batch_dim) for size in sizes]
    return tuple(map(InputSize, shapes, _dtypes(dtypes, sizes, names, usual)))


def _dtypes(
    dtypes: Dtypes, sizes: Sequence[Sequence[Any]], names: Sequence[str] | None, usual: torch.dtype
) -> list[torch.dtype]:
    if dtypes is None:
        return [usual] * len(sizes)
    if isinstance(dtypes, Mapping):
        unknown = sorted(map(str, dtypes.keys() - set(names or ())))
        if unknown:
            hint = f"the sizes are for {', '.join(names)}{close_to(unknown[0], names)}" if names else "no size has one"
            raise InputError(f"dtypes names the argument {unknown[0]!r}, but {hint}")
        return [_dtype(dtypes[name]) if name in dtypes else usual for name in names or ()]
    entries = list(dtypes) if isinstance(dtypes, (list, tuple)) else [dtypes] * len(sizes)
    if len(entries) != len(sizes):
        raise InputError(
            f"dtypes has {len(entries)} entries for {len(sizes)} size(s): {short(sizes)}; pass one per size"
        )
    return [_dtype(entry) for entry in entries]


def _dtype(entry: Any) -> torch.dtype:
    """Return the dtype that is given as itself, by its name, or as torchinfo also accepts it: ``torch.LongTensor``."""
    name = entry.removeprefix("torch.") if isinstance(entry, str) else None
    dtype = getattr(entry, "dtype", entry) if name is None else getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        hint = "" if name is None else close_to(name, _NAMES)
        raise InputError(f"dtypes holds {entry!r}; expected a torch.dtype such as torch.long, or its name{hint}")
    return dtype


def _checked_size(size: Sequence[Any]) -> tuple[int, ...]:
    for length in size:
        if isinstance(length, (bool, float)) or operator.index(length) < 0:
            raise InputError(f"input size {tuple(size)} holds {length!r}; sizes are integers >= 0")
    return tuple(operator.index(length) for length in size)


def _with_batch(shape: tuple[int, ...], batch_dim: int | None) -> tuple[int, ...]:
    if batch_dim is None:
        return shape
    if batch_dim > len(shape):
        raise InputError(f"batch_dim={batch_dim} does not fit the input size {shape}; expected 0 to {len(shape)}")
    return (*shape[:batch_dim], 1, *shape[batch_dim:])


def short(value: Any) -> str:
    """Return the repr of a value in one line of at most 80 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
