"""The message of a forward that raised: where, with which sizes, why, and what would work."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from modelsummary._torch import ConvNd
from modelsummary.capture import Recording, capture
from modelsummary.capture.input_data import is_size
from modelsummary.capture.inputs import CallArguments, InputSize
from modelsummary.capture.modules import ModelParts
from modelsummary.errors import DataDependentError, in_short

__all__ = ["failure"]

_DTYPES = re.compile(r"dtype|scalar type|type \(\w+\) .*should be the same")  # in torch's messages
_INTEGERS = re.compile(r"\b(Long|Int)\b|indices|integer")  # in messages about dtypes
_TUPLE = re.compile(r"\b(tuple|list)\b")


def failure(model: nn.Module, call: CallArguments, recording: Recording) -> str:
    """Return one line: the layer that failed, its input sizes, the error, and a remedy.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 2))
    >>> from modelsummary import ForwardError, Statistics
    >>> try:
    ...     Statistics(model, (3, 8, 8))
    ... except ForwardError as error:
    ...     print(str(error).rpartition("; ")[2])
    did you forget the batch dimension? (1, 3, 8, 8) works
    """
    assert recording.error is not None
    message = in_short(recording.error)
    remedy = _remedy(model, call, recording, message)
    if not recording.failed:
        return f"{recording.root.class_name} could not be called: {message}{remedy}"
    layer = recording.failed[0]
    layer_name = f"{layer.fqn} ({layer.class_name})" if layer.fqn else layer.class_name
    return f"forward of {layer_name} failed with input {layer.input_size}: {message}{remedy}"


def _remedy(model: nn.Module, call: CallArguments, recording: Recording, message: str) -> str:
    if isinstance(recording.error, DataDependentError):
        return "; use execution='auto' or 'real', with a model and inputs that hold values (in a shell: --values)"
    if _DTYPES.search(message):
        return _dtypes(call, recording, message)
    if "more than 1 value per channel" in message:
        return "; batch normalisation that trains needs a batch of two or more, or call model.eval()"
    if "NVIDIA driver" in message or "not compiled with CUDA" in message:
        return "; the forward asks for CUDA, which this machine does not have: use the device of its input, x.device"
    if 'missing the required "forward"' in message:
        return "; call its modules in the forward of another one, or pass no input to list its layers"
    if call.size_dtypes and any(is_size(argument) for argument in call.args):
        sizes = [argument.shape if isinstance(argument, InputSize) else argument for argument in call.args]
        if all(map(is_size, sizes)):
            return f"; for several inputs pass a list of sizes: {[tuple(size) for size in sizes]}"
    with suppress(Exception):  # advice must not hide the error
        return (
            _sizes_beside_tensors(model, call, message)
            or _rows(recording)
            or _size_that_works(model, call)
            or _features(recording)
        )
    return ""


def _dtypes(call: CallArguments, recording: Recording, message: str) -> str:
    """Return which dtypes do not go together: of the sizes, or of the tensors and the parameters of the layer."""
    inputs = call.size_dtypes or [tensor.dtype for tensor in call.tensors()]
    named = ", ".join(dict.fromkeys(map(str, inputs)))
    takes_indices = _INTEGERS.search(message) and all(dtype.is_floating_point for dtype in inputs)
    if call.size_dtypes:
        wanted = 'for indices pass dtypes="long"' if takes_indices else "pass another dtype with dtypes="
        return f"; the inputs given by size are {named}: {wanted}, or a list with one per size"
    layer = recording.failed[0] if recording.failed else recording.root
    parameters = layer.module.parameters() if layer.module is not None else ()
    of_layer = ", ".join(dict.fromkeys(str(parameter.dtype) for parameter in parameters))
    if takes_indices:
        return f"; the input is {named}: pass indices as integers, x.long()"
    return f"; the input is {named}, the parameters {of_layer}: convert one of them with .to(dtype)" * bool(of_layer)


def _sizes_beside_tensors(model: nn.Module, call: CallArguments, message: str) -> str:
    """Return which tuples the forward takes as tensors of these sizes, as other arguments are tensors or numbers."""
    arguments: list[tuple[int | str, Any]] = [*enumerate(call.args), *call.kwargs.items()]
    sizes = {key: tuple(value) for key, value in arguments if is_size(value)}
    if not sizes or not (call.tensors() or call.size_dtypes):
        return ""
    for dtype in (torch.get_default_dtype(), torch.long):
        tensors = {key: InputSize(size, dtype) for key, size in sizes.items()}
        args = tuple(tensors.get(index, argument) for index, argument in enumerate(call.args))
        kwargs = {name: tensors.get(name, argument) for name, argument in call.kwargs.items()}
        if _runs(model, replace(call, args=args, kwargs=kwargs)):
            break
    else:
        if not _TUPLE.search(message):
            return ""
    key, size = next(iter(sizes.items()))
    name = f"{key}={size}" if isinstance(key, str) else f"argument {key + 1}, {size},"
    return (
        f"; {name} is a tuple beside tensors, and a size only if all inputs are sizes; pass a tensor, such as "
        f"torch.empty({size}, dtype={dtype}, device='meta')"
    )


def _size_that_works(model: nn.Module, call: CallArguments) -> str:
    """Return which size the forward runs with on shapes; empty if no size that is often meant does."""
    batched = call.with_first_dim()
    if _runs(model, batched):
        return f"; did you forget the batch dimension? {_written(batched)} works"
    last = _channels_second(call)
    if last is not None and _runs(model, last):
        return f"; did you mean {_written(last)}? Channels come second, before height and width"
    return ""


def _rows(recording: Recording) -> str:
    """Return the indices that a failed embedding takes; empty if they are not the reason."""
    layer = recording.failed[0] if recording.failed else recording.root
    rows = getattr(layer.module, "num_embeddings", None)
    if rows is None or not isinstance(recording.error, IndexError):
        return ""
    return f"; the table has {rows} rows, so pass indices from 0 to {rows - 1}, or as many positions at most"


def _features(recording: Recording) -> str:
    """Return the features or the channels that a failed layer takes; empty if they are not the reason."""
    layer = recording.failed[0] if recording.failed else recording.root
    in_features, size = getattr(layer.module, "in_features", None), layer.input_size
    if not isinstance(size, list) or not size:
        return ""
    if isinstance(layer.module, ConvNd):
        channels, dimensions = layer.module.in_channels, len(layer.module.kernel_size) + 2
        if len(size) != dimensions or size[1] != channels:
            return f"; the layer takes {dimensions} dimensions, the second of {channels} channels"
    if in_features is None or size[-1] == in_features:
        return ""
    return f"; the layer takes {in_features} features in the last dimension, and got {size[-1]}"


def _runs(model: nn.Module, call: CallArguments) -> bool:
    """Return True if the forward runs on shapes with these arguments."""
    return capture(ModelParts.of(model), call, "shape").error is None


def _channels_second(call: CallArguments) -> CallArguments | None:
    """Return the call with the last dimension of an image given by its size moved behind the first; None without one.

    >>> image = InputSize((1, 224, 224, 3), nn.Parameter().dtype)
    >>> _channels_second(CallArguments((image,), {}, None)).shapes()
    [(1, 3, 224, 224)]
    """
    image = call.args[0] if len(call.args) == 1 and not call.kwargs else None
    if not isinstance(image, InputSize) or len(image.shape) != 4:
        return None
    batch, *sides, channels = image.shape
    return replace(call, args=(replace(image, shape=(batch, channels, *sides)),))


def _written(call: CallArguments) -> str:
    """Return the sizes as a user writes them: one size, or a list."""
    shapes = call.shapes()
    return str(shapes[0] if len(shapes) == 1 else shapes)
