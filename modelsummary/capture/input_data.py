"""Read what the user passes as input (tensors, sizes, dicts, arrays) as the arguments of a forward."""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_origin

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from modelsummary._torch import tree_leaves
from modelsummary.capture.containers import is_array, tensors_of
from modelsummary.capture.devices import device_of_inputs
from modelsummary.capture.inputs import CallArguments, InputArray, InputSize
from modelsummary.capture.modules import ModelParts
from modelsummary.errors import InputError, close_to
from modelsummary.keywords import dtype_named

__all__ = ["OPTIONS", "Dtypes", "call_arguments", "call_like", "is_size"]

OPTIONS = tuple("input_data batch_dim branching depth device dtypes execution latency".split())  # of Statistics
_OF_TORCHINFO = frozenset({"cache_forward_pass", "col_names", "col_width", "mode", "row_settings", "verbose"})
_Dtype = torch.dtype | str
Dtypes = _Dtype | Sequence[_Dtype] | Mapping[str, _Dtype] | None
_CONSTANT = (bool, int, float, complex, str, bytes, type(None))


def call_arguments(
    parts: ModelParts,
    input_data: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    batch_dim: int | None = None,
    device: torch.device | str | None = None,
    dtypes: Dtypes = None,
) -> CallArguments | None:
    """Return the arguments of the model's forward; None if nothing was passed to run it with.

    Raises:
        InputError: an argument is unusable; the message echoes it and says what to pass instead.

    >>> call_arguments(ModelParts.of(nn.Linear(4, 2)), (3, 4), (), {}).args
    (InputSize(shape=(3, 4), dtype=torch.float32),)
    """
    if batch_dim is not None and (type(batch_dim) is not int or batch_dim < 0):
        raise InputError(f"batch_dim must be an integer >= 0 or None, got {batch_dim!r}")
    device_types = {tensor.device.type for tensor in parts.tensors}
    input_device = device_of_inputs(device_types, device, tensors_of((input_data, args, kwargs)))
    signature = _signature(parts.model)
    input_data, kwargs = _as_input_data(signature, input_data, args, kwargs)
    if dtypes is not None and input_data is None:
        raise InputError(f"dtypes={dtypes} describes sizes, but input_data holds none; pass sizes, or leave dtypes out")
    if input_data is None and not args and not kwargs:
        return None
    first, named = _split(parts, signature, input_data, batch_dim, dtypes)
    overlap = named.keys() & kwargs.keys()
    if overlap:
        raise InputError(
            f"forward argument(s) {sorted(overlap)} given twice: in the input_data dict and by keyword; pass each once"
        )
    call = CallArguments((*first, *args), {**named, **kwargs}, input_device)
    if not (call.tensors() or call.size_dtypes or call.has_arrays):
        call = replace(call, nothing_found=_nothing_in(input_data, args))
        if not kwargs and not any(map(_holds_something, (*call.args, *call.kwargs.values()))):
            raise InputError(call.nothing_found)
    _check_signature(parts.model, signature, call)
    return call


def call_like(recorded: CallArguments, model: nn.Module, input_data: Any) -> CallArguments:
    """Return arguments for another call of the same sizes. Raises ``InputError`` if sizes or dtypes differ."""
    parts = ModelParts.of(model)
    call = call_arguments(parts, input_data, (), {}, device=recorded.device)
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
    return replace(call, computes_gradients=recorded.computes_gradients)


def _holds_something(value: Any) -> bool:
    """Return True for a container or an object, from which a forward may make tensors; False for a scalar."""
    return value is not None and not isinstance(value, (bool, int, float, complex, str, bytes))


def _nothing_in(input_data: Any, args: tuple[Any, ...]) -> str:
    numbers = (input_data, *args)
    meant = f"; did you mean {numbers}?" if len(numbers) > 1 and is_size(numbers) else _size_in(input_data)
    return (
        f"no tensor found in input_data={_short(input_data)}; pass tensors, a size such as (1, 3, 224, 224), "
        f"numbers by the names of forward's arguments, or None to list the layers without a forward{meant}"
    )


def _size_in(value: Any) -> str:
    """Return a suggestion for a size that is written as text, or that has None for an open dimension."""
    parts = re.split(r"[^\w-]+", value.strip("()[] ")) if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or len(parts) < 2:
        return ""
    if not all(part is None or (isinstance(part, (str, int)) and str(part).isdecimal()) for part in parts):
        return ""
    return f"; did you mean {tuple(1 if part is None else int(part) for part in parts)}?"


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
                f"input_size={_short(size)} and input_data={_short(input_data)} are two names of one argument; pass one"
            )
        return size, {name: value for name, value in kwargs.items() if name != "input_size"}
    if input_data is None and not args and _named_sizes(kwargs, signature):
        return kwargs, {}
    return input_data, kwargs


def _split(
    parts: ModelParts, signature: inspect.Signature | None, input_data: Any, batch_dim: int | None, dtypes: Dtypes
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments in ``input_data``."""
    if input_data is None:
        return (), {}
    if isinstance(input_data, (DataLoader, Dataset)):
        what = "next(iter(loader))" if isinstance(input_data, DataLoader) else "torch.stack([dataset[0][0]])"
        raise InputError(
            f"input_data must be one batch, got {type(input_data).__name__}; pass one, such as {what}, or its size"
        )
    if isinstance(input_data, Iterator):
        raise InputError(
            f"input_data is a {type(input_data).__name__}, which can be read only once; pass a list or tuple"
        )
    sizes = _listed_sizes(input_data)
    if sizes is not None:
        return _inputs_of(sizes, None, parts, batch_dim, dtypes), {}
    if isinstance(input_data, Mapping):
        wrong = [key for key in input_data if not isinstance(key, str)]
        if wrong:
            raise InputError(
                f"the keys of an input_data dict must be names of forward's arguments, got {wrong[0]!r}; "
                "pass positional arguments as a tuple or list"
            )
        named = _named_sizes(input_data, signature)
        if named:
            inputs = _inputs_of(list(named.values()), list(named), parts, batch_dim, dtypes)
            return (), {**input_data, **dict(zip(named, inputs, strict=True))}
    if dtypes is not None:
        holds = "tensors, which have a dtype; leave dtypes out"
        if all(isinstance(leaf, int) for leaf in tree_leaves(input_data)):
            holds = "sizes inside of an argument; pass tensors there, such as torch.empty(2, 8, device='meta')"
        raise InputError(f"dtypes={dtypes} describes sizes, but input_data holds {holds}")
    if isinstance(input_data, Mapping):
        return (), {name: _mark_arrays(value) for name, value in input_data.items()}
    if isinstance(input_data, (list, tuple)) and not hasattr(input_data, "_fields"):
        holds_tensors = all(isinstance(value, Tensor) or is_array(value) for value in input_data)
        if type(input_data) is list and holds_tensors and _takes_sequence(signature):
            return (_mark_arrays(input_data),), {}
        return tuple(_mark_arrays(value) for value in input_data), {}
    return (_mark_arrays(input_data),), {}


def _mark_arrays(value: Any) -> Any:
    """Return ``value`` with an ``InputArray`` for every numpy array, also in nested containers."""
    if isinstance(value, Iterator):
        raise InputError(f"input_data holds a {type(value).__name__}, which can be read only once; pass a list instead")
    if isinstance(value, (Tensor, str, bytes)):
        return value
    if is_array(value):
        try:
            torch.as_tensor(value)
        except TypeError as error:
            raise InputError(f"input_data holds a numpy array that torch cannot convert: {error}") from None
        return InputArray(value)
    if type(value) in (list, tuple):
        return type(value)(_mark_arrays(inner) for inner in value)
    if type(value) is dict:
        return {key: _mark_arrays(inner) for key, inner in value.items()}
    return value


def _short(value: Any) -> str:
    """Return the repr of a value in one line of at most 80 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


# ---------------------------------------------------------------------------------------------- checks


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
        if "too many positional" in str(error):
            remedy = "pass its arguments alone: labels of a batch are for the loss, loss="
        if unknown:
            names = [*OPTIONS, *(name for name in signature.parameters if name not in call.kwargs)]
            meant = close_to(unknown[0], names)
            is_one = not meant and "missing a required" in str(error)
            remedy = f"remove {unknown[0]!r}{meant or (', or pass [batch] if a dict is one argument' * is_one)}"
        if unknown and unknown[0] in _OF_TORCHINFO:
            remedy += ", or call modelsummary.summary, which takes torchinfo's arguments"
        raise InputError(
            f"{error}: got {len(call.args)} positional and {len(call.kwargs)} keyword argument(s) "
            f"{sorted(call.kwargs)}, expected the arguments of {type(model).__name__}.forward{signature}; {remedy}"
        ) from None


# ------------------------------------------------------------------------------------ sizes in the input


def _listed_sizes(input_data: Any) -> list[Sequence[Any]] | None:
    """Return the sizes if ``input_data`` is one size or a list of sizes; None if it is anything else.

    Raises:
        InputError: a list holds sizes and tensors.

    >>> _listed_sizes((2, 3)), _listed_sizes([(2, 3), (4,)]), _listed_sizes("x")
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
        raise InputError(f"input_data={_short(input_data)} mixes sizes and tensors; pass only tensors or only sizes")
    return None


def _named_sizes(values: Mapping[str, Any], signature: inspect.Signature | None) -> dict[str, Sequence[Any]]:
    """Return the arguments that are sizes, if all others are constants: a tensor among them makes a tuple a constant.

    A tuple for a parameter that is annotated as a list or tuple is a constant, too.

    >>> _named_sizes({"ids": (1, 128), "causal": True}, None)
    {'ids': (1, 128)}
    """
    if not all(isinstance(leaf, _CONSTANT) for leaf in tree_leaves(list(values.values()))):
        return {}
    return {name: value for name, value in values.items() if is_size(value) and not _takes_sequence(signature, name)}


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


def _takes_sequence(signature: inspect.Signature | None, name: str | None = None) -> bool:
    """Return True if forward's parameter ``name`` (None: the first) is annotated as a list or tuple."""
    parameters = signature.parameters if signature is not None else {}
    name = next(iter(parameters), "") if name is None else name
    annotation = parameters[name].annotation if name in parameters else inspect.Parameter.empty
    if isinstance(annotation, str):
        return annotation.removeprefix("typing.").startswith(("list", "List", "Sequence", "tuple", "Tuple"))
    return get_origin(annotation) in (list, tuple, Sequence) or annotation in (list, tuple)


# -------------------------------------------------------------------------------- inputs of these sizes


def _inputs_of(
    sizes: Sequence[Sequence[Any]],
    names: Sequence[str] | None,
    parts: ModelParts,
    batch_dim: int | None,
    dtypes: Dtypes,
) -> tuple[InputSize, ...]:
    """Return the inputs that sizes describe.

    Args:
        names: names of forward's arguments that they are for; None: they are given by position.
        parts: the first floating point parameter of the model has the default dtype.
        batch_dim: position at which a batch of one is inserted; None: none is.
        dtypes: one dtype for all, one per size, or a dict by argument name; text such as ``"long"`` is a dtype, too.

    Raises:
        InputError: a size or dtype is unusable.
    """
    parameters = (tensor for tensor in parts.tensors if isinstance(tensor, nn.Parameter))
    floats = (parameter.dtype for parameter in parameters if parameter.dtype.is_floating_point)
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
            f"dtypes has {len(entries)} entries for {len(sizes)} size(s): {_short(sizes)}; pass one per size, "
            "and several sizes as a list"
        )
    return [_dtype(entry) for entry in entries]


def _dtype(entry: Any) -> torch.dtype:
    """Return the dtype that is given as itself, by its name, or as torchinfo also accepts it: ``torch.LongTensor``."""
    return dtype_named(getattr(entry, "dtype", entry), "dtypes", "")


def _checked_size(size: Sequence[Any]) -> tuple[int, ...]:
    for length in size:
        if isinstance(length, (bool, float)) or operator.index(length) < 0:
            values = "; pass values as a tensor, torch.tensor(...)" * isinstance(length, float)
            raise InputError(
                f"input size {_short(tuple(size))} holds {length!r}; sizes are integers >= 0, such as (1, 3, 224, 224)"
                f"{values}"
            )
    return tuple(operator.index(length) for length in size)


def _with_batch(shape: tuple[int, ...], batch_dim: int | None) -> tuple[int, ...]:
    if batch_dim is None:
        return shape
    if batch_dim > len(shape):
        raise InputError(f"batch_dim={batch_dim} does not fit the input size {shape}; expected 0 to {len(shape)}")
    return (*shape[:batch_dim], 1, *shape[batch_dim:])
