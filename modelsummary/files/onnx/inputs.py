"""Apply given sizes and values to the inputs of an ONNX model; values may decide on sizes or branches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelsummary.errors import InputError
from modelsummary.files.onnx.checks import inputs_of, quoted, walk_graphs
from modelsummary.files.onnx.dtypes import element_of
from modelsummary.files.onnx.reading import import_onnx
from modelsummary.files.program import GivenSizes, sizes_by_name

__all__ = ["bind", "name_open_dimensions", "values_of_inputs"]

_NO_NAMES = frozenset({"", "?", "-1", "None", "none", "*", "unk"})
_MOST_VALUES = 64


def name_open_dimensions(graph: Any) -> None:
    """Give each unnamed open dimension of an input a unique name; clear unnamed dimensions elsewhere.

    Two dimensions called ``"?"``, or both -1, may have different sizes.
    """
    inputs = list(inputs_of(graph).values())
    taken = {dim.dim_param for value in inputs for dim in value.type.tensor_type.shape.dim}
    for value in inputs:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if _is_placeholder(dim):
                name = "".join(character if character.isalnum() else "_" for character in value.name[:40]) + f"_{axis}"
                while name in taken:
                    name += "_"
                taken.add(name)
                dim.dim_param = name
    for inner, _ in walk_graphs(graph):
        for value in (*inner.output, *inner.value_info, *(inner.input if inner is not graph else ())):
            for dim in value.type.tensor_type.shape.dim:
                if _is_placeholder(dim):
                    dim.Clear()


def _is_placeholder(dim: Any) -> bool:
    return dim.dim_value < 0 or (not dim.HasField("dim_value") and dim.dim_param in _NO_NAMES)


def bind(graph: Any, sizes: GivenSizes) -> None:
    """Give inputs of the graph these sizes; dimensions of the same name elsewhere get the same size.

    Args:
        graph: the graph, which is changed.

    Raises:
        InputError: the input does not exist, is not a tensor, or has another number of dimensions.
    """
    inputs = inputs_of(graph)
    dim_sizes: dict[str, int] = {}
    replaced = False
    described = {name: _shown(value) for name, value in inputs.items()}
    for name, size in sizes_by_name(list(inputs), sizes, described).items():
        value = inputs[name]
        if value.type.WhichOneof("value") not in (None, "tensor_type"):
            raise InputError(f"input {quoted(name)} must be a tensor to take a size; leave its size out")
        shape = value.type.tensor_type.shape
        if value.type.tensor_type.HasField("shape") and len(shape.dim) != len(size):
            has = f"has {len(shape.dim)} dimensions, {described[name]}"
            raise InputError(f"input {quoted(value.name)} {has}; got the size {list(size)}")
        for axis, length in enumerate(size):
            dim = shape.dim[axis] if axis < len(shape.dim) else shape.dim.add()
            if dim.dim_param and dim_sizes.setdefault(dim.dim_param, length) != length:
                raise InputError(f"dimension {quoted(dim.dim_param)} cannot be {dim_sizes[dim.dim_param]} and {length}")
            replaced = replaced or dim.dim_value not in (0, length)
            dim.dim_value = length
    for inner, _ in walk_graphs(graph):
        for value in (*inner.input, *inner.output, *inner.value_info):
            _bind_type(value.type.tensor_type, dim_sizes, forget=replaced and value not in graph.input)


def _shown(value: Any) -> str:
    """Return the declared size of an input, such as ``(batch, 3, 48, x_3)``."""
    if not value.type.tensor_type.HasField("shape"):
        return "(...)"
    dims = [
        str(dim.dim_value) if dim.HasField("dim_value") else dim.dim_param for dim in value.type.tensor_type.shape.dim
    ]
    return f"({', '.join(dim[:40] for dim in dims)}{',' if len(dims) == 1 else ''})"


def _bind_type(tensor_type: Any, dim_sizes: Mapping[str, int], *, forget: bool) -> None:
    """Fill in known sizes; clear declared dimensions that may depend on them, to be inferred again."""
    for dim in tensor_type.shape.dim:
        if dim.dim_param in dim_sizes:
            dim.dim_value = dim_sizes[dim.dim_param]
        elif (forget and dim.HasField("dim_value")) or (dim_sizes and dim.dim_param):
            dim.Clear()


def values_of_inputs(graph: Any, tensors: Mapping[str | int, Any]) -> dict[str, Any]:
    """Return name -> array for the inputs that were given as small tensors with values.

    Args:
        tensors: name or position -> tensor; tensors on meta have no values and are skipped.

    Raises:
        InputError: a value cannot be converted to the input's type.
    """
    import numpy as np

    inputs = inputs_of(graph)
    names = list(inputs)
    values = {}
    for key, value in tensors.items():
        name = names[key] if isinstance(key, int) else key
        if value.is_meta or value.numel() > _MOST_VALUES or name not in inputs:
            continue
        data_type = inputs[name].type.tensor_type.elem_type
        try:
            dtype = import_onnx().helper.tensor_dtype_to_np_dtype(data_type)
            if dtype.kind not in "iufb":
                raise TypeError("strings or complex numbers")
            values[name] = np.asarray(value.detach().cpu().float().numpy() if value.dtype.is_floating_point else value)
            values[name] = values[name].astype(dtype)
        except (TypeError, ValueError, KeyError):
            element = element_of(data_type)
            what = element.name if element is not None else "unknown type"
            raise InputError(f"input {quoted(name)} takes values of {what}, got {value.dtype}") from None
    return values
