"""Turn what the user passes as input (tensors, sizes, dicts, arrays) into the arguments of a forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from modelsummary._torch import tree_leaves
from modelsummary.capture.devices import check_together, requested_device
from modelsummary.capture.modules import modules_of, tensors_of_modules
from modelsummary.capture.sizes import (
    Dtypes,
    InputSize,
    inputs_of,
    is_size,
    listed_sizes,
    named_sizes,
    short,
    takes_sequence,
)
from modelsummary.capture.templates import map_template, taken_apart
from modelsummary.capture.values import is_array, map_leaves, tensors_of
from modelsummary.errors import InputError, close_to

__all__ = ["OPTIONS", "CallArguments", "InputTensor", "call_arguments", "call_like"]


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
class _Array:
    """A numpy array. Nearly every forward gets it as a tensor; a few take it as it is."""

    value: Any


@dataclass(frozen=True)
class CallArguments:
    """Arguments of a forward, in which sizes and numpy arrays are not tensors yet.

    Attributes:
        device: device that real execution moves the inputs to; None keeps tensors where they are and puts sizes on
            the model's device.
        nothing_found: message to raise if the forward fails and no argument holds a tensor; else None.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: torch.device | None
    nothing_found: str | None = None

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
            if raw_arrays and isinstance(leaf, _Array):
                return leaf.value.copy()
            tensor = _tensor_of(leaf)
            return leaf if tensor is None else copy(tensor if device is None else tensor.to(device))

        return self._with(convert)

    def _with(self, convert: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return map_leaves(convert, self.args), {name: map_leaves(convert, value) for name, value in self.kwargs.items()}

    @property
    def has_arrays(self) -> bool:
        """Whether the arguments hold numpy arrays."""
        return any(isinstance(leaf, _Array) for leaf in tree_leaves((self.args, self.kwargs)))

    def with_first_dim(self) -> CallArguments:
        """Return the arguments with a first dimension of one before the others, as a batch of one has it."""

        def convert(leaf: Any) -> Any:
            if isinstance(leaf, InputSize):
                return replace(leaf, shape=(1, *leaf.shape))
            if isinstance(leaf, _Array):
                return _Array(leaf.value[None])
            return leaf.detach()[None] if isinstance(leaf, Tensor) and leaf.ndim else leaf

        args, kwargs = self._with(convert)
        return replace(self, args=args, kwargs=kwargs)

    @property
    def size_dtypes(self) -> list[torch.dtype]:
        """Dtypes of the inputs given by size."""
        leaves = tree_leaves((self.args, self.kwargs))
        return [leaf.dtype for leaf in leaves if isinstance(leaf, InputSize)]

    def size_along(self, dim: int) -> int | None:
        """Return the size of the first input that has dimension ``dim``; None if no input has it."""
        sizes: list[int] = []

        def note(tensor: InputTensor) -> tuple[int, ...]:
            sizes.extend(tensor.shape[dim : dim + 1])
            return tensor.shape

        self.with_shapes(note)
        return sizes[0] if sizes else None

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


def call_arguments(
    model: nn.Module,
    input_data: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    batch_dim: int | None,
    device: torch.device | str | None,
    dtypes: Dtypes,
) -> CallArguments | None:
    """Return the arguments of ``model.forward``; None if nothing was passed to run it with.

    Raises:
        InputError: an argument is unusable; the message echoes it and says what to pass instead.

    >>> options = {"batch_dim": None, "device": None, "dtypes": None}
    >>> call_arguments(nn.Linear(4, 2), (3, 4), (), {}, **options).args
    (InputSize(shape=(3, 4), dtype=torch.float32),)
    """
    if batch_dim is not None and (type(batch_dim) is not int or batch_dim < 0):
        raise InputError(f"batch_dim must be an integer >= 0 or None, got {batch_dim!r}")
    device_types = {tensor.device.type for tensor in tensors_of_modules(modules_of(model))}
    input_device = requested_device(device_types, device)
    signature = _signature(model)
    input_data, kwargs = _as_input_data(signature, input_data, args, kwargs)
    if dtypes is not None and input_data is None:
        raise InputError(f"dtypes={dtypes} describes sizes, but input_data holds none; pass sizes, or leave dtypes out")
    if input_data is None and not args and not kwargs:
        return None
    first, named = _split(model, signature, input_data, batch_dim, dtypes)
    overlap = named.keys() & kwargs.keys()
    if overlap:
        raise InputError(
            f"forward argument(s) {sorted(overlap)} given twice: in the input_data dict and by keyword; pass each once"
        )
    call = CallArguments((*first, *args), {**named, **kwargs}, input_device)
    tensors = call.tensors()
    if not (tensors or call.size_dtypes or call.has_arrays):
        call = replace(call, nothing_found=_nothing_in(input_data, args))
        if not any(_holds_something(argument) for argument in (*call.args, *call.kwargs.values())):
            raise InputError(call.nothing_found)
    if input_device is None:
        check_together(device_types, tensors)
    _check_signature(model, signature, call)
    return call


def call_like(recorded: CallArguments, model: nn.Module, input_data: Any) -> CallArguments:
    """Return arguments for another call of the same sizes. Raises ``InputError`` if sizes or dtypes differ."""
    call = call_arguments(model, input_data, (), {}, batch_dim=None, device=recorded.device, dtypes=None)
    if call is None or call.shapes() != recorded.shapes():
        passed = "nothing" if call is None else list(map(list, call.shapes()))
        raise InputError(
            f"the input must have the sizes {list(map(list, recorded.shapes()))} of these statistics, got {passed}; "
            "pass an input of these sizes, or make Statistics with the other input"
        )
    dtypes, expected = ([tensor.dtype for tensor in arguments.tensors()] for arguments in (call, recorded))
    if dtypes != expected and expected:
        raise InputError(
            f"the input must have the dtypes {expected} of these statistics, got {dtypes}; convert the input, "
            "or make Statistics with it"
        )
    return call


def _holds_something(value: Any) -> bool:
    """Return True for a container or an object, from which a forward may make tensors; False for a scalar."""
    return value is not None and not isinstance(value, (bool, int, float, complex, str, bytes))


def _nothing_in(input_data: Any, args: tuple[Any, ...]) -> str:
    numbers = (input_data, *args)
    meant = f"; did you mean {numbers}?" if len(numbers) > 1 and is_size(numbers) else ""
    return (
        f"no tensor found in input_data={short(input_data)}; pass tensors, a size such as (1, 3, 224, 224), "
        f"or None to list the layers without a forward{meant}"
    )


def _as_input_data(
    signature: inspect.Signature | None, input_data: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return ``input_data`` and the keyword arguments; a forward's sizes may have been given among the latter.

    ``input_size=``, torchinfo's name, is ``input_data`` unless the forward has an argument of this name.
    """
    if "input_size" in kwargs and (signature is None or "input_size" not in signature.parameters):
        size = kwargs["input_size"]
        if input_data is not None:
            raise InputError(
                f"input_size={short(size)} and input_data={short(input_data)} are two names of one argument; pass one"
            )
        return size, {name: value for name, value in kwargs.items() if name != "input_size"}
    if input_data is None and not args and named_sizes(kwargs, signature):
        return kwargs, {}
    return input_data, kwargs


def _split(
    model: nn.Module, signature: inspect.Signature | None, input_data: Any, batch_dim: int | None, dtypes: Dtypes
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments in ``input_data``."""
    if input_data is None:
        return (), {}
    if isinstance(input_data, Iterator):
        raise InputError(
            f"input_data is a {type(input_data).__name__}, which can be read only once; pass a list or tuple"
        )
    sizes = listed_sizes(input_data)
    if sizes is not None:
        return inputs_of(sizes, None, model, batch_dim, dtypes), {}
    if isinstance(input_data, Mapping):
        wrong = [key for key in input_data if not isinstance(key, str)]
        if wrong:
            raise InputError(
                f"the keys of an input_data dict must be names of forward's arguments, got {wrong[0]!r}; "
                "pass positional arguments as a tuple or list"
            )
        named = named_sizes(input_data, signature)
        if named:
            inputs = inputs_of(list(named.values()), list(named), model, batch_dim, dtypes)
            return (), {**input_data, **dict(zip(named, inputs, strict=True))}
    if dtypes is not None:
        raise InputError(
            f"dtypes={dtypes} describes sizes, but input_data holds tensors, which have a dtype; leave dtypes out"
        )
    if isinstance(input_data, Mapping):
        return (), {name: _mark_arrays(value) for name, value in input_data.items()}
    if isinstance(input_data, (list, tuple)) and not hasattr(input_data, "_fields"):
        holds_tensors = all(isinstance(value, Tensor) or is_array(value) for value in input_data)
        if type(input_data) is list and holds_tensors and takes_sequence(signature):
            return (_mark_arrays(input_data),), {}
        return tuple(_mark_arrays(value) for value in input_data), {}
    return (_mark_arrays(input_data),), {}


# --------------------------------------------------------------------------------------------- tensors


def _mark_arrays(value: Any) -> Any:
    """Return ``value`` with an ``_Array`` for every numpy array, also in nested containers."""
    if isinstance(value, Iterator):
        raise InputError(f"input_data holds a {type(value).__name__}, which can be read only once; pass a list instead")
    if isinstance(value, (Tensor, str, bytes)):
        return value
    if is_array(value):
        try:
            torch.as_tensor(value)
        except TypeError as error:
            raise InputError(f"input_data holds a numpy array that torch cannot convert: {error}") from None
        return _Array(value)
    if type(value) in (list, tuple):
        return type(value)(_mark_arrays(inner) for inner in value)
    if type(value) is dict:
        return {key: _mark_arrays(inner) for key, inner in value.items()}
    return value


def _tensor_of(leaf: Any) -> Tensor | None:
    """Return the tensor that an argument is or becomes; None if it does not become one."""
    if isinstance(leaf, Tensor):
        return leaf
    return torch.tensor(leaf.value) if isinstance(leaf, _Array) else None


def _shape_of(leaf: Any) -> tuple[int, ...] | None:
    if isinstance(leaf, InputSize):
        return leaf.shape
    leaf = leaf.value if isinstance(leaf, _Array) else leaf
    return tuple(leaf.shape) if is_array(leaf) or isinstance(leaf, Tensor) else None


def _is_floating(leaf: Any) -> bool:
    dtype = torch.as_tensor(leaf.value).dtype if isinstance(leaf, _Array) else leaf.dtype
    return bool(dtype.is_floating_point or dtype.is_complex)


def _resized(leaf: Any, shape: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
    """Return an input of other sizes, with its rows repeated."""
    if isinstance(leaf, InputSize):
        return replace(leaf, shape=sizes)
    value = torch.as_tensor(leaf.value) if isinstance(leaf, _Array) else leaf.detach()
    for dim, (old, new) in enumerate(zip(shape, sizes, strict=True)):
        if new != old:
            value = value.index_select(dim, torch.arange(new, device=value.device) % old)
    return _Array(value.numpy()) if isinstance(leaf, _Array) else value.requires_grad_(leaf.requires_grad)


# ---------------------------------------------------------------------------------------------- checks

OPTIONS = tuple("input_data batch_dim branching depth device dtypes execution latency reuse".split())  # of Statistics
_OF_TORCHINFO = frozenset({"cache_forward_pass", "col_names", "col_width", "mode", "row_settings", "verbose"})


def _signature(model: nn.Module) -> inspect.Signature | None:
    try:
        return inspect.signature(model.forward)
    except (TypeError, ValueError):  # a ScriptModule's forward has no signature
        return None


def _check_signature(model: nn.Module, signature: inspect.Signature | None, call: CallArguments) -> None:
    if signature is None or model._forward_pre_hooks:  # a pre-hook may change the arguments
        return
    try:
        signature.bind(*call.args, **call.kwargs)
    except TypeError as error:
        unknown = sorted(call.kwargs.keys() - signature.parameters.keys())
        remedy = "pass a list or dict of tensors, or of sizes"
        if unknown:
            names = [*OPTIONS, *(name for name in signature.parameters if name not in call.kwargs)]
            remedy = f"remove {unknown[0]!r}{close_to(unknown[0], names)}"
        if unknown and unknown[0] in _OF_TORCHINFO:
            remedy += ", or call modelsummary.summary, which takes torchinfo's arguments"
        raise InputError(
            f"{error}: got {len(call.args)} positional and {len(call.kwargs)} keyword argument(s) "
            f"{sorted(call.kwargs)}, expected the arguments of {type(model).__name__}.forward{signature}; {remedy}"
        ) from None
