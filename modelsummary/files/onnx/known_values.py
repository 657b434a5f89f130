"""Compute the small values in a graph that decide on sizes.

Libraries fold all constants, weights included, and remove operators and their names. Here no operator is removed, and
no weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from math import prod
from typing import Any

from modelsummary.files.onnx.reading import import_onnx

__all__ = ["computed", "constant_value", "shown_value"]

_LONGEST = 16  # elements of a constant that is shown

_LARGEST, _DEEPEST = 1024, 2  # elements and dimensions of what is computed, so that no broadcasting makes it large
_COMPUTED = frozenset(
    "Abs Add And Cast CastLike Ceil Clip Concat ConstantOfShape Div Equal Expand Floor Gather Greater GreaterOrEqual"
    " Identity Less LessOrEqual Max Min Mod Mul Neg Not Or Pow Range ReduceMax ReduceMin ReduceProd ReduceSum Reshape"
    " Round ScatterND Shape Sign Size Slice Split Sqrt Squeeze Sub Tile Transpose Unsqueeze Where Xor".split()
)


def constant_value(tensor: Any) -> Any:
    """Return the array in a small ``TensorProto`` of numbers; None for others."""
    value = _array_in(tensor) if len(tensor.dims) <= _DEEPEST and prod(tensor.dims) <= _LARGEST else None
    return value if value is not None and value.dtype.kind in "iufb" else None


def shown_value(tensor: Any) -> Any:
    """Return the value of a 0-d tensor, or the list of integers of a short 1-d tensor; None for others."""
    types = import_onnx().TensorProto
    is_list = len(tensor.dims) == 1 and tensor.dims[0] <= _LONGEST and tensor.data_type in (types.INT64, types.INT32)
    value = _array_in(tensor) if is_list or not tensor.dims else None
    return None if value is None else value.tolist()


def _array_in(tensor: Any) -> Any:
    """Return the array in a ``TensorProto``; None if its data are in another file, were dropped, or have no dtype."""
    onnx = import_onnx()
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return None
    try:
        return onnx.numpy_helper.to_array(tensor)
    except (ValueError, TypeError, KeyError):
        return None


def computed(
    node: Any, values: Mapping[str, Any], sizes: Mapping[str, Any], opsets: Mapping[str, int]
) -> dict[str, Any]:
    """Return the small arrays that an operator computes, by name; empty if its inputs are unknown.

    Args:
        values: name -> known array.
        sizes: name -> size of its inputs, if every dimension is known.
    """
    import numpy as np

    if node.op_type not in _COMPUTED:
        return {}
    looks_at_sizes = node.op_type in ("Shape", "Size")
    inputs = {}
    for name in filter(None, node.input):
        if looks_at_sizes and sizes.get(name) is not None:
            inputs[name] = np.broadcast_to(np.int8(0), sizes[name])  # takes one byte
        elif not looks_at_sizes and values.get(name) is not None:
            inputs[name] = values[name]
        else:
            return {}
    if node.op_type == "Range":  # runtimes take lists of one number, too
        inputs = {name: value.reshape(()) if value.size == 1 else value for name, value in inputs.items()}
    try:
        if not inputs or _makes_many(node, inputs):
            return {}
        with np.errstate(all="ignore"):
            results = [np.asarray(result) for result in _evaluator(node, opsets).run(None, inputs)]
    except Exception:  # any error of a wrong call
        return {}
    pairs = zip(filter(None, node.output), results, strict=False)
    return {name: array for name, array in pairs if _is_small(array)}


def _is_small(value: Any) -> bool:
    return bool(value.ndim <= _DEEPEST and value.size <= _LARGEST and value.dtype.kind in "iufb")


def _makes_many(node: Any, inputs: Mapping[str, Any]) -> bool:
    """Return True if the result is large though the inputs are small."""
    values = [inputs[name] for name in node.input if name]
    if node.op_type == "ConstantOfShape":
        return bool(prod(map(abs, values[0].tolist())) > _LARGEST)
    if node.op_type in ("Expand", "Tile"):
        return bool(prod(map(abs, values[1].tolist())) * max(1, values[0].size) > _LARGEST)
    if node.op_type == "Range":
        start, limit, step = (float(value) for value in values)
        return not abs(limit - start) <= _LARGEST * abs(step)
    if node.op_type == "Pow":
        return bool((abs(values[1]) > 64).any())
    return False


def _evaluator(node: Any, opsets: Mapping[str, int]) -> Any:
    """Return an evaluator of one operator in the file's opset; a node alone would run in the newest."""
    from onnx.reference import ReferenceEvaluator

    helper = import_onnx().helper
    copy = deepcopy(node)
    copy.domain = ""
    inputs = [helper.make_empty_tensor_value_info(name) for name in dict.fromkeys(filter(None, node.input))]
    outputs = [helper.make_empty_tensor_value_info(name) for name in filter(None, node.output)]
    return ReferenceEvaluator(helper.make_graph([copy], "one", inputs, outputs), opsets=dict(opsets))
