"""The arguments of a forward: tensors, sizes and arrays that become tensors once the execution is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modelsummary._torch import tree_leaves
from modelsummary.capture.containers import is_array, map_leaves, tensors_of
from modelsummary.capture.templates import map_template, taken_apart

__all__ = ["CallArguments", "InputArray", "InputSize", "InputTensor"]


class InputTensor(NamedTuple):
    """A tensor among the arguments of a forward.

    Attributes:
        argument: position or keyword of its argument.
        tensor_index: its index among the tensors of the argument.
        shape: its shape.
        is_floating: whether its elements are floating point or complex numbers.
    """

    argument: int | str
    tensor_index: int
    shape: tuple[int, ...]
    is_floating: bool


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


@dataclass(frozen=True)
class InputArray:
    """A numpy array. Nearly every forward gets it as a tensor; a few take it as it is."""

    value: Any


@dataclass(frozen=True)
class CallArguments:
    """Arguments of a forward, in which sizes and numpy arrays are not tensors yet.

    Attributes:
        device: device that real execution moves the inputs to; None keeps tensors where they are and puts sizes on
            the model's device.
        nothing_found: message to raise if the forward fails and no argument holds a tensor; else None.
        computes_gradients: the forward computes gradients itself, such as forces, so that it never runs without them.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: torch.device | None
    nothing_found: str | None = None
    computes_gradients: bool = False

    def on_meta(self, twin: Callable[[Tensor], Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with ``twin(tensor)`` for tensors and arrays; sizes become tensors on meta first."""

        def convert(leaf: Any) -> Any:
            if isinstance(leaf, InputSize):
                return twin(torch.empty(leaf.shape, dtype=leaf.dtype, device="meta"))
            return twin(tensor) if (tensor := _tensor_of(leaf)) is not None else leaf

        return self._with(convert)

    def on_device(
        self, copy: Callable[[Tensor], Tensor], default: torch.device, *, raw_arrays: bool = False
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with copies for tensors and random tensors for sizes (zeros for integers)."""
        device = self.device

        def convert(leaf: Any) -> Any:
            if isinstance(leaf, InputSize):
                return leaf.random(device or default)
            if raw_arrays and isinstance(leaf, InputArray):
                return leaf.value.copy()
            tensor = _tensor_of(leaf)
            return leaf if tensor is None else copy(tensor if device is None else tensor.to(device))

        return self._with(convert)

    def _with(self, convert: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return map_leaves(convert, self.args), {name: map_leaves(convert, value) for name, value in self.kwargs.items()}

    @property
    def has_arrays(self) -> bool:
        """Whether the arguments hold numpy arrays."""
        return any(isinstance(leaf, InputArray) for leaf in tree_leaves((self.args, self.kwargs)))

    def with_first_dim(self) -> CallArguments:
        """Return the arguments with a first dimension of one before the others, as a batch of one has it."""

        def convert(leaf: Any) -> Any:
            if isinstance(leaf, InputSize):
                return replace(leaf, shape=(1, *leaf.shape))
            if isinstance(leaf, InputArray):
                return InputArray(leaf.value[None])
            return leaf.detach()[None] if isinstance(leaf, Tensor) and leaf.ndim else leaf

        args, kwargs = self._with(convert)
        return replace(self, args=args, kwargs=kwargs)

    @property
    def size_dtypes(self) -> list[torch.dtype]:
        """Dtypes of the inputs given by size."""
        leaves = tree_leaves((self.args, self.kwargs))
        return [leaf.dtype for leaf in leaves if isinstance(leaf, InputSize)]

    def described(self) -> list[InputTensor]:
        """Return the tensors among the arguments, also in objects, with sizes and arrays that become tensors."""
        tensors: list[InputTensor] = []

        def note(tensor: InputTensor) -> tuple[int, ...]:
            tensors.append(tensor)
            return tensor.shape

        self.with_shapes(note)
        return tensors

    def size_along(self, dim: int) -> int | None:
        """Return the size of the first input that has dimension ``dim``; None if no input has it."""
        return next((tensor.shape[dim] for tensor in self.described() if len(tensor.shape) > dim), None)

    def with_batch(self, dim: int, size: int, new_size: int) -> CallArguments:
        """Return the arguments with rows repeated to ``new_size`` in each input whose dimension ``dim`` is ``size``."""

        def larger(tensor: InputTensor) -> tuple[int, ...]:
            shape = tensor.shape
            fits = len(shape) > dim and shape[dim] == size
            return (*shape[:dim], new_size, *shape[dim + 1 :]) if fits else shape

        return self.with_shapes(larger)

    def with_shapes(self, new_shape: Callable[[InputTensor], tuple[int, ...]]) -> CallArguments:
        """Return the arguments with ``new_shape(tensor)`` for shapes: rows of tensors are repeated or left out."""
        where: tuple[int | str, int] = 0, 0

        def convert(leaf: Any) -> Any:
            nonlocal where
            shape = _shape_of(leaf)
            if shape is None:  # a constant, or an object that holds tensors
                apart = taken_apart(leaf)
                return leaf if apart is leaf else map_template(convert, apart, makes_objects=True)
            sizes = new_shape(InputTensor(*where, shape, _is_floating(leaf)))
            where = where[0], where[1] + 1
            return leaf if sizes == shape else _resized(leaf, shape, sizes)

        def converted(argument: int | str, value: Any) -> Any:
            nonlocal where
            where = argument, 0
            return map_leaves(convert, value)

        args = tuple(converted(position, value) for position, value in enumerate(self.args))
        return replace(self, args=args, kwargs={name: converted(name, value) for name, value in self.kwargs.items()})

    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the arguments that are or become tensors, in order."""
        leaves = tree_leaves((self.args, self.kwargs))
        return [shape for leaf in leaves if (shape := _shape_of(leaf)) is not None]

    def tensors(self) -> list[Tensor]:
        """Return the tensors among the arguments, without sizes, arrays, and the batch sizes of packed sequences."""
        return list(tensors_of((self.args, self.kwargs)))


def _tensor_of(leaf: Any) -> Tensor | None:
    """Return the tensor that an argument is or becomes; None if it does not become one."""
    if isinstance(leaf, Tensor):
        return leaf
    return torch.tensor(leaf.value) if isinstance(leaf, InputArray) else None


def _shape_of(leaf: Any) -> tuple[int, ...] | None:
    if isinstance(leaf, InputSize):
        return leaf.shape
    leaf = leaf.value if isinstance(leaf, InputArray) else leaf
    return tuple(leaf.shape) if is_array(leaf) or isinstance(leaf, Tensor) else None


def _is_floating(leaf: Any) -> bool:
    dtype = torch.as_tensor(leaf.value).dtype if isinstance(leaf, InputArray) else leaf.dtype
    return bool(dtype.is_floating_point or dtype.is_complex)


def _resized(leaf: Any, shape: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
    """Return an input of other sizes, with its rows repeated."""
    if isinstance(leaf, InputSize):
        return replace(leaf, shape=sizes)
    value = torch.as_tensor(leaf.value) if isinstance(leaf, InputArray) else leaf.detach()
    for dim, (old, new) in enumerate(zip(shape, sizes, strict=True)):
        if new != old:
            value = value.index_select(dim, torch.arange(new, device=value.device) % old)
    return InputArray(value.numpy()) if isinstance(leaf, InputArray) else value.requires_grad_(leaf.requires_grad)
