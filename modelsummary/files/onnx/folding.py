"""Compute the sizes that a graph computes: shape inference follows them through sums, but not through divisions."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from modelsummary.files.onnx.reading import import_onnx

__all__ = ["fold_sizes"]

_LARGEST, _DEEPEST = 64, 2  # elements and dimensions of what is computed, so that no broadcasting makes it large
_FOLDED = frozenset(
    "Abs Add Cast Ceil Concat ConstantOfShape Div Equal Floor Gather Greater GreaterOrEqual Identity Less LessOrEqual"
    " Max Min Mod Mul Neg Not ReduceMax ReduceMin ReduceProd ReduceSum Reshape Round Shape Slice Sqrt Squeeze Sub"
    " Transpose Unsqueeze Where".split()
)


def fold_sizes(graph: Any, types: Any, opsets: Mapping[str, int], known: dict[str, Any]) -> dict[int, Any]:
    """Put constants in the place of operators that make a few numbers from constants and known shapes.

    Args:
        graph: which is changed.
        types: the same graph with the types that were inferred.
        opsets: domain -> version of its operators.
        known: name -> what was computed before; gets what is computed now.

    Returns:
        Position -> the operator that stood there.
    """
    onnx = import_onnx()
    shapes = {each.name: _shape(each) for each in (*types.input, *types.value_info)}
    for tensor in graph.initializer:
        _keep(known, tensor.name, tensor)
    replaced = {}
    for position, node in enumerate(graph.node):
        if node.domain not in ("", "ai.onnx") or len(node.output) != 1 or node.output[0] in known:
            continue
        if node.op_type == "Constant":
            _keep(known, node.output[0], *(each.t for each in node.attribute if each.name == "value"))
            continue
        value = _value(node, opsets, known, shapes) if node.op_type in _FOLDED else None
        if value is not None:
            known[node.output[0]] = value
            replaced[position] = onnx.NodeProto()
            replaced[position].CopyFrom(node)
            constant = onnx.numpy_helper.from_array(value)
            node.CopyFrom(onnx.helper.make_node("Constant", [], list(node.output), name=node.name, value=constant))
    return replaced


def _shape(value: Any) -> list[int] | None:
    """None unless all of it is known."""
    declared = value.type.tensor_type
    dims = declared.shape.dim
    is_known = declared.HasField("shape") and all(dim.HasField("dim_value") for dim in dims)
    return [dim.dim_value for dim in dims] if is_known else None


def _keep(known: dict[str, Any], name: str, *tensors: Any) -> None:
    """Note a constant of a few numbers."""
    onnx = import_onnx()
    for tensor in tensors:
        if name not in known and len(tensor.dims) <= _DEEPEST and prod(tensor.dims) <= _LARGEST:
            try:
                known[name] = onnx.numpy_helper.to_array(tensor)
            except (ValueError, TypeError, KeyError, OSError):  # external data, types that numpy lacks
                continue


def _value(node: Any, opsets: Mapping[str, int], known: Mapping[str, Any], shapes: Mapping[str, Any]) -> Any:
    """What the operator makes; None if it is not known, or more than a few numbers."""
    import numpy as np
    from onnx.reference import ReferenceEvaluator

    used = {name for name in node.input if name}
    is_shape = node.op_type == "Shape"
    if not used or not all((shapes if is_shape else known).get(name) is not None for name in used):
        return None
    try:
        given = {
            name: np.broadcast_to(np.int8(0), shapes[name]) if is_shape else known[name]
            for name in used  # of one byte
        }
        if node.op_type == "ConstantOfShape" and prod(map(abs, given[node.input[0]].tolist())) > _LARGEST:
            return None
        with np.errstate(all="ignore"):
            value = np.asarray(ReferenceEvaluator(node, opsets=dict(opsets)).run(None, given)[0])
    except Exception:  # whatever a wrong call makes of it
        return None
    return value if value.ndim <= _DEEPEST and value.size <= _LARGEST and value.dtype.kind in "iufb" else None
