"""The message of a forward that raised: where, with which sizes, why, and what would work."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace

import torch
from torch import nn

from modelsummary.capture import Recording, capture
from modelsummary.capture.input_data import is_size
from modelsummary.capture.inputs import CallArguments, InputSize
from modelsummary.capture.modules import ModelParts
from modelsummary.errors import DataDependentError, in_short

__all__ = ["failure"]

_INTEGERS = re.compile(r"\b(Long|Int)\b|indices|integer")  # in torch's messages about dtypes
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
    if call.size_dtypes and ("dtype" in message or "scalar type" in message):
        dtypes = ", ".join(map(str, call.size_dtypes))
        wanted = 'for indices pass dtypes="long"' if _INTEGERS.search(message) else "pass another dtype with dtypes="
        return f"; the inputs given by size are {dtypes}: {wanted}, or a list with one per size"
    if "more than 1 value per channel" in message:
        return "; batch normalisation that trains needs a batch of two or more, or call model.eval()"
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


def _sizes_beside_tensors(model: nn.Module, call: CallArguments, message: str) -> str:
    """Return which tuples the forward takes as tensors of these sizes, as a dict with tensors holds them."""
    sizes = {name: tuple(value) for name, value in call.kwargs.items() if is_size(value)}
    if not sizes or not call.tensors():
        return ""
    for dtype in (torch.get_default_dtype(), torch.long):
        tensors = {name: InputSize(size, dtype) for name, size in sizes.items()}
        if _runs(model, replace(call, kwargs={**call.kwargs, **tensors})):
            break
    else:
        if not _TUPLE.search(message):
            return ""
    name, size = next(iter(sizes.items()))
    return (
        f"; {name}={size} is a tuple beside tensors, and a size only if all inputs are sizes; pass a tensor, such as "
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
    """Return the number of features that a failed linear layer takes; empty if they are not the reason."""
    layer = recording.failed[0] if recording.failed else recording.root
    in_features, size = getattr(layer.module, "in_features", None), layer.input_size
    if in_features is None or not isinstance(size, list) or not size or size[-1] == in_features:
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
