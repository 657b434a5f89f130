"""Operators of ONNX in the place of those of onnxruntime, whose results onnx's shape inference does not know."""

from __future__ import annotations

from typing import Any

from modelsummary.files.onnx.reading import import_onnx

__all__ = ["put_stand_ins"]

# operator of onnxruntime -> one whose first result has the same shape and type, and which inputs that takes
_STAND_INS: dict[str, tuple[str, slice]] = {
    "DynamicQuantizeMatMul": ("MatMul", slice(0, 2)),
    "FusedConv": ("Conv", slice(0, 3)),
    "FusedGemm": ("Gemm", slice(0, 3)),
    "QGemm": ("Gemm", slice(0, 4, 3)),
    "QLinearAdd": ("Add", slice(0, 4, 3)),
    "QLinearAveragePool": ("AveragePool", slice(0, 1)),
    "QLinearConcat": ("Concat", slice(2, None, 3)),
    "QLinearGlobalAveragePool": ("GlobalAveragePool", slice(0, 1)),
    "QLinearMul": ("Mul", slice(0, 4, 3)),
    **dict.fromkeys(
        "BiasGelu BiasSoftmax FastGelu Gelu GroupQueryAttention MultiHeadAttention QLinearLeakyRelu QLinearSigmoid"
        " QLinearSoftmax QuickGelu RotaryEmbedding SkipLayerNormalization SkipSimplifiedLayerNormalization".split(),
        ("Identity", slice(0, 1)),
    ),
}


def put_stand_ins(graph: Any) -> dict[int, Any]:
    """Replace operators whose results the file does not describe.

    Returns:
        Position -> the operator that stood there.
    """
    described = {each.name for each in (*graph.value_info, *graph.output)}
    replaced = {}
    for position, node in enumerate(graph.node):
        if node.domain != "com.microsoft" or node.op_type not in _STAND_INS or not node.output:
            continue
        if node.output[0] in described or not _is_as_usual(node):
            continue
        original = import_onnx().NodeProto()
        original.CopyFrom(node)
        replaced[position] = original
        node.op_type, places = _STAND_INS[node.op_type]
        node.domain = ""
        node.input[:] = original.input[places]
        node.output[:] = original.output[:1]
    return replaced


def _is_as_usual(node: Any) -> bool:
    """The result has the type of the first input, and the layout of ONNX."""
    if node.op_type == "QGemm":
        return len(node.input) > 8 and bool(node.input[8])  # else it is float
    if node.op_type in ("MultiHeadAttention", "GroupQueryAttention"):
        return len(node.input) > 2 and bool(node.input[1] and node.input[2])  # else the first input holds all three
    return not any(each.name == "channels_last" and each.i for each in node.attribute)
