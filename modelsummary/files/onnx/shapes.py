"""Infer the shapes of all tensors of an ONNX model: with onnx on the whole graph, then operator by operator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelsummary.errors import ModelFileError, ShapeMismatchError
from modelsummary.files.budget import Budget
from modelsummary.files.onnx.checks import graphs_of, subgraphs_of
from modelsummary.files.onnx.node_types import infer_nodes
from modelsummary.files.onnx.reading import import_onnx

__all__ = ["infer_types"]

_LONG, _LONGEST = 64, 1_000_000  # numbers in a list of sizes, and in the longest that onnx may follow
_KEEP_LISTS = frozenset("Add Cast Gather Identity Mul Reshape Slice Squeeze Sub Transpose Unsqueeze".split())
_OLDEST_IR = 4  # from this version on weights need not be inputs


def infer_types(model: Any, values: Mapping[str, Any], budget: Budget) -> list[str]:
    """Write all inferred types into the graphs of a model; drop its weights before.

    Args:
        model: a ``ModelProto``, which is changed.
        values: name -> array of the inputs whose values are given.

    Returns:
        Notes on wrong declarations in the file.

    Raises:
        ModelFileError: an operator cannot take its inputs.
    """
    _complete(model)
    graph = model.graph
    opsets = {"" if opset.domain == "ai.onnx" else opset.domain: opset.version for opset in model.opset_import}
    notes: list[str] = []
    types: dict[str, Any] = {}
    is_contradicted = False
    try:
        types = _whole(model)
    except ModelFileError:
        is_contradicted = True
        _forget(model)
        try:
            types = _whole(model)
            notes = ["the shapes that the file declares differ from the shapes that its operators make"]
        except ModelFileError:  # infer_nodes names the operator
            types = {}
    if is_contradicted or values or _is_unknown(graph, types):
        infer_nodes(model, opsets, values, types, budget)
    else:
        del graph.value_info[:]
        outputs = {output.name: output for output in graph.output}
        for name, kind in types.items():
            if name in outputs:
                outputs[name].type.CopyFrom(kind)
            else:
                graph.value_info.add(name=name).type.CopyFrom(kind)
    return notes


def _complete(model: Any) -> None:
    """Add an opset and a recent IR version where old or incomplete files lack them."""
    onnx = import_onnx()
    if not any(opset.domain in ("", "ai.onnx") for opset in model.opset_import):
        table = {row[1]: row[2] for row in onnx.helper.VERSION_TABLE}
        newest = onnx.defs.onnx_opset_version()
        model.opset_import.add(domain="", version=table.get(model.ir_version, newest))
    model.ir_version = max(model.ir_version, _OLDEST_IR)


def _forget(model: Any) -> None:
    """Clear the declared shapes of results."""
    for graph in graphs_of(model):
        del graph.value_info[:]
        for output in graph.output:
            if output.type.WhichOneof("value") == "tensor_type":
                output.type.tensor_type.ClearField("shape")


def _whole(model: Any) -> dict[str, Any]:
    """Return name -> type of the results in the outer graph, as onnx infers the whole graph.

    Raises:
        ModelFileError: declared types contradict inferred ones, or an operator cannot take its inputs.
    """
    onnx = import_onnx()
    graph = model.graph
    weights, inputs = list(graph.initializer), list(graph.input)
    names = {value.name for value in inputs}
    kept = [weight for weight in weights if not _is_dropped(weight)]
    try:
        del graph.initializer[:]
        graph.initializer.extend(kept)
        for weight in weights:  # inference would look for the values that were dropped
            if _is_dropped(weight) and weight.name not in names:
                kind = onnx.helper.make_tensor_type_proto(weight.data_type, list(weight.dims))
                graph.input.add(name=weight.name).type.CopyFrom(kind)
        result = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=not _grows(graph))
    except onnx.shape_inference.InferenceError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise ShapeMismatchError(f"its shapes do not fit: {lines[-1] if lines else 'no reason given'}") from None
    except Exception as error:  # any error of the library on a broken model
        raise ShapeMismatchError(f"its shapes cannot be inferred: {error}") from None
    finally:
        del graph.initializer[:], graph.input[:]
        graph.initializer.extend(weights)
        graph.input.extend(inputs)
    return {value.name: value.type for value in (*result.graph.value_info, *result.graph.output)}


def _grows(graph: Any) -> bool:
    """Return True if lists of sizes could become long: onnx follows them through ``Concat`` without a limit."""
    lengths: dict[str, int] = {}
    for node in graph.node:
        longest = [lengths.get(name, _LONG) for name in node.input]
        if node.op_type == "Concat":
            lengths.update(dict.fromkeys(node.output, sum(longest)))
            if sum(longest) > _LONGEST:
                return True
        elif node.op_type in _KEEP_LISTS and any(name in lengths for name in node.input):
            lengths.update(dict.fromkeys(node.output, max(longest)))
    return False


def _is_dropped(tensor: Any) -> bool:
    """Return True if a tensor's data were dropped or are in another file."""
    onnx = import_onnx()
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return True
    field = onnx.helper.tensor_dtype_to_field(tensor.data_type)
    return not tensor.HasField("raw_data") and not len(getattr(tensor, field))


def _is_unknown(graph: Any, types: Mapping[str, Any]) -> bool:
    """Return True if a result lacks a shape or has a dimension that no input names, or if there is a subgraph."""
    named = {dim.dim_param for value in graph.input for dim in value.type.tensor_type.shape.dim}
    for node in graph.node:
        if subgraphs_of(node):
            return True
        for name in filter(None, node.output):
            kind = types[name].tensor_type if name in types else None
            if kind is None or not kind.HasField("shape"):
                return True
            if any(not dim.HasField("dim_value") and dim.dim_param not in named for dim in kind.shape.dim):
                return True
    return False
