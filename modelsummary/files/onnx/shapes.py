"""Shapes of all tensors of an ONNX model: dimensions given by the user, then onnx's shape inference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelsummary.errors import InputError, ModelFileError
from modelsummary.files.onnx.checks import quoted, walk_graphs
from modelsummary.files.onnx.folding import fold_sizes
from modelsummary.files.onnx.reading import import_onnx
from modelsummary.files.onnx.twins import put_stand_ins
from modelsummary.files.program import GivenSizes, sizes_by_name

__all__ = ["bind", "inferred"]

_MOST_VISITS = 300_000  # of operators, to compute the sizes that decide on other sizes


def inferred(model: Any) -> Any:
    """A copy of the model with the types of all tensors that can be inferred; weights should be dropped before.

    Raises:
        ModelFileError: types that the file declares contradict what its operators make.
    """
    graph = model.graph
    originals = put_stand_ins(graph)
    try:
        result = _inferred(model)
    except ModelFileError:
        if not originals:
            raise
        _put_back(graph, originals)
        originals, result = {}, _inferred(model)
    opsets = {"" if each.domain == "ai.onnx" else each.domain: each.version for each in model.opset_import}
    known: dict[str, Any] = {}
    for _ in range(_MOST_VISITS // (len(graph.node) + 1)):
        replaced = fold_sizes(graph, result.graph, opsets, known) if _is_unknown(result.graph) else {}
        if not replaced:
            break
        originals |= replaced
        try:
            result = _inferred(model)
        except ModelFileError:  # what was inferred before stays true
            break
    _put_back(graph, originals)
    _put_back(result.graph, originals)
    return result


def _put_back(graph: Any, originals: Mapping[int, Any]) -> None:
    for position, node in originals.items():
        graph.node[position].CopyFrom(node)


def _is_unknown(graph: Any) -> bool:
    """A shape is missing, or has a dimension that no input names."""
    kinds = [[each.type.tensor_type for each in values] for values in (graph.input, graph.value_info)]
    named = {dim.dim_param for kind in kinds[0] for dim in kind.shape.dim}
    return any(
        not kind.HasField("shape")
        or any(not dim.HasField("dim_value") and dim.dim_param not in named for dim in kind.shape.dim)
        for kind in kinds[1]
    )


def _inferred(model: Any) -> Any:
    onnx = import_onnx()
    try:
        return onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    except onnx.shape_inference.InferenceError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise ModelFileError(f"its shapes cannot be: {lines[-1] if lines else 'no reason given'}") from None
    except Exception as error:  # what a broken model makes the library raise
        raise ModelFileError(f"its shapes cannot be inferred: {error}") from None


def bind(graph: Any, sizes: GivenSizes) -> None:
    """Give inputs of the graph these sizes; a dimension of the same name elsewhere gets the same size.

    Args:
        sizes: of inputs.

    Raises:
        InputError: there is no such input, it is no tensor, or it has another number of dimensions.
    """
    weights = {each.name for each in graph.initializer}
    inputs = {each.name: each for each in graph.input if each.name not in weights}
    known: dict[str, int] = {}
    replaced = False
    for name, size in sizes_by_name(list(inputs), sizes).items():
        value = inputs[name]
        if value.type.WhichOneof("value") not in (None, "tensor_type"):
            raise InputError(f"input {quoted(name)} is no tensor; leave its size out")
        shape = value.type.tensor_type.shape
        if value.type.tensor_type.HasField("shape") and len(shape.dim) != len(size):
            raise InputError(f"input {quoted(value.name)} has {len(shape.dim)} dimensions; got the size {list(size)}")
        for place, number in enumerate(size):
            dim = shape.dim[place] if place < len(shape.dim) else shape.dim.add()
            if dim.dim_param and known.setdefault(dim.dim_param, number) != number:
                raise InputError(f"dimension {quoted(dim.dim_param)} cannot be {known[dim.dim_param]} and {number}")
            replaced = replaced or dim.dim_value not in (0, number)
            dim.dim_value = number
    for inner, _ in walk_graphs(graph):
        for value in (*inner.input, *inner.output, *inner.value_info):
            _bind_type(value.type.tensor_type, known, forget=replaced and value not in graph.input)


def _bind_type(tensor_type: Any, known: Mapping[str, int], *, forget: bool) -> None:
    """Put the known sizes in; what else was declared is inferred anew where it may depend on them."""
    for dim in tensor_type.shape.dim:
        if dim.dim_param in known:
            dim.dim_value = known[dim.dim_param]
        elif (forget and dim.HasField("dim_value")) or (known and dim.dim_param):
            dim.Clear()
