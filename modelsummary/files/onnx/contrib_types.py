"""Infer the result types of operators that onnx cannot infer: operators of onnxruntime and of older versions.

A type is an ONNX element type and dimensions: integers, names, or None for an unknown dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["ALIKE", "RULES", "Kind"]

Dims = tuple[int | str | None, ...]


class Kind(NamedTuple):
    """Element type and dimensions of a tensor; ``dims`` is None if not even their number is known."""

    element: int
    dims: Dims | None


Rule = Callable[[Sequence[Any], Mapping[str, Any]], list[Kind | None]]
RULES: dict[str, Rule] = {}

# operator -> an ONNX operator with the same result types, and the inputs to pass to it
ALIKE: dict[str, tuple[str, slice]] = {
    "com.microsoft.DynamicQuantizeMatMul": ("MatMul", slice(0, 2)),
    "com.microsoft.FusedConv": ("Conv", slice(0, 2)),
    "com.microsoft.FusedGemm": ("Gemm", slice(0, 3)),
    "com.microsoft.GatherND": ("GatherND", slice(0, 2)),
    "com.microsoft.GridSample": ("GridSample", slice(0, 2)),
    "com.microsoft.MatMulIntegerToFloat": ("MatMul", slice(0, 2)),
    "com.microsoft.QLinearAdd": ("Add", slice(0, 4, 3)),
    "com.microsoft.QLinearAveragePool": ("AveragePool", slice(0, 1)),
    "com.microsoft.QLinearConcat": ("Concat", slice(2, None, 3)),
    "com.microsoft.QLinearConv": ("Conv", slice(0, 4, 3)),
    "com.microsoft.QLinearGlobalAveragePool": ("GlobalAveragePool", slice(0, 1)),
    "com.microsoft.QLinearMul": ("Mul", slice(0, 4, 3)),
    "com.microsoft.QLinearReduceMean": ("ReduceMean", slice(0, 1)),
    **{
        f"com.microsoft.nchwc.{name}": (name, slice(0, 2 if name == "Conv" else 1))
        for name in ("Conv", "MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool")
    },
}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


@_rule(
    *("GroupNormalization", "MeanVarianceNormalization", "SimplifiedLayerNormalization"),
    *("ai.onnx.ml.Imputer", "ai.onnx.ml.Normalizer", "ai.onnx.ml.Scaler"),
    *(
        f"com.microsoft.{name}"
        for name in (
            "BiasAdd BiasDropout BiasGelu BiasSoftmax FastGelu Gelu GroupNorm Inverse MoE QMoE QLinearLeakyRelu"
            " QLinearSigmoid QLinearSoftmax QLinearWhere QuickGelu RotaryEmbedding SimplifiedLayerNormalization Trilu"
        ).split()
    ),
)
def _same(inputs: Sequence[Any], _: Mapping[str, Any]) -> list[Kind | None]:
    return [inputs[0]]


@_rule("com.microsoft.GatherBlockQuantized")
def _gathered(inputs: Sequence[Any], facts: Mapping[str, Any]) -> list[Kind | None]:
    """Return rows of a quantised table; bytes hold two elements of 4 bits."""
    table, scales = inputs[0], inputs[2]
    if facts.get("gather_axis", 0) != 0 or table is None or scales is None:
        raise ValueError("unsupported: other rows")
    *middle, width = _dims(table)[1:]
    if table.element == 2 and facts.get("bits", 4) == 4:
        width = width * 2  # type: ignore[operator]
    return [Kind(scales.element, (*_dims(inputs[1]), *middle, width))]


@_rule("com.microsoft.FusedMatMul", "com.microsoft.TransposeMatMul")
def _fused_matmul(inputs: Sequence[Any], facts: Mapping[str, Any]) -> list[Kind | None]:
    left, right = _dims(inputs[0]), _dims(inputs[1])
    if len(left) < 2 or len(right) < 2 or facts.get("transBatchA") or facts.get("transBatchB"):
        raise ValueError("unsupported: vectors, or rows before the batch")
    rows, columns = left[-1 if facts.get("transA") else -2], right[-2 if facts.get("transB") else -1]
    return [inputs[0]._replace(dims=(*_broadcast(left[:-2], right[:-2]), rows, columns))]


def _broadcast(left: Dims, right: Dims) -> Dims:
    longer = max(len(left), len(right))
    pairs = zip((1,) * (longer - len(left)) + left, (1,) * (longer - len(right)) + right, strict=True)
    return tuple(one if other in (1, one) else other if one == 1 else None for one, other in pairs)


@_rule("com.microsoft.QGemm")
def _qgemm(inputs: Sequence[Any], facts: Mapping[str, Any]) -> list[Kind | None]:
    """Return floats if the scale of the result is left out."""
    left, right = _dims(inputs[0]), _dims(inputs[3])
    dims = (left[1 if facts.get("transA") else 0], right[0 if facts.get("transB") else 1])
    scaled = len(inputs) > 7 and inputs[7] is not None
    return [Kind(inputs[0].element if scaled and inputs[0] is not None else 1, dims)]


@_rule("com.microsoft.MultiHeadAttention")
def _attention(inputs: Sequence[Any], _: Mapping[str, Any]) -> list[Kind | None]:
    query, value = _dims(inputs[0]), _dims(inputs[2])
    if not len(query) == len(value) == 3:
        raise ValueError("packed")
    return [inputs[0]._replace(dims=(*query[:2], value[2]))]


@_rule("com.microsoft.GroupQueryAttention")
def _grouped_attention(inputs: Sequence[Any], facts: Mapping[str, Any]) -> list[Kind | None]:
    """Return the query's type; a packed query holds query, key and value in its width."""
    batch, length, width = _dims(inputs[0])
    if len(inputs) > 1 and inputs[1] is not None:
        return [inputs[0]]
    heads, groups = facts["num_heads"], facts["kv_num_heads"]
    if not isinstance(width, int):
        raise TypeError("an open width")
    return [inputs[0]._replace(dims=(batch, length, width * heads // (heads + 2 * groups)))]


@_rule("com.microsoft.Attention", "com.microsoft.QAttention")
def _packed_attention(inputs: Sequence[Any], facts: Mapping[str, Any]) -> list[Kind | None]:
    batch, length, _ = _dims(inputs[0])
    columns = _dims(inputs[1])[-1]
    sizes = facts.get("qkv_hidden_sizes")
    if not sizes and not isinstance(columns, int):
        raise TypeError("an open width")
    width = sizes[2] if sizes else columns // 3  # type: ignore[operator]
    return [Kind(1 if inputs[0].element != 10 else 10, (batch, length, width))]


@_rule("com.microsoft.DynamicQuantizeLSTM")
def _lstm(inputs: Sequence[Any], facts: Mapping[str, Any]) -> list[Kind | None]:
    """Return the types of all hidden states, the last hidden state and the last cell state."""
    length, batch, _ = _dims(inputs[0])
    directions, hidden = 2 if facts.get("direction") == "bidirectional" else 1, facts["hidden_size"]
    element = inputs[0].element
    last = Kind(element, (directions, batch, hidden))
    return [Kind(element, (length, directions, batch, hidden)), last, last]


@_rule("com.microsoft.nchwc.ReorderInput")
def _into_blocks(inputs: Sequence[Any], facts: Mapping[str, Any]) -> list[Kind | None]:
    dims = _dims(inputs[0])
    dims = (dims[0], dims[-1], *dims[1:-1]) if facts.get("channels_last") else dims
    return [inputs[0]._replace(dims=dims)]


@_rule("com.microsoft.nchwc.ReorderOutput")
def _out_of_blocks(inputs: Sequence[Any], facts: Mapping[str, Any]) -> list[Kind | None]:
    batch, _, *rest = _dims(inputs[0])
    channels = facts["channels"]
    dims = (batch, *rest, channels) if facts.get("channels_last") else (batch, channels, *rest)
    return [inputs[0]._replace(dims=dims)]


@_rule("com.microsoft.nchwc.Upsample")
def _upsample(inputs: Sequence[Any], facts: Mapping[str, Any]) -> list[Kind | None]:
    pairs = zip(_dims(inputs[0]), facts["scales"], strict=True)
    dims = tuple(dim * scale if isinstance(dim, int) else dim if scale == 1 else None for dim, scale in pairs)
    return [inputs[0]._replace(dims=dims)]


def _dims(kind: Kind | None) -> Dims:
    if kind is None or kind.dims is None:
        raise TypeError("a size is unknown")
    return kind.dims


# The result types as expressions of the input types and attributes. Skipped norms return two statistics, and the sum
# that was normalized. Quantised results have the elements of the zero point, bytes without one; others of the scale.
RULES |= {
    **dict.fromkeys(
        (f"com.microsoft.Skip{name}" for name in ("LayerNormalization", "SimplifiedLayerNormalization", "GroupNorm")),
        lambda inputs, _: [inputs[0], None, None, inputs[0]],
    ),
    **dict.fromkeys(
        ("com.microsoft.MatMulNBits", "com.microsoft.MatMulBnb4"),
        lambda inputs, facts: [inputs[0]._replace(dims=(*_dims(inputs[0])[:-1], facts["N"]))],
    ),
    "com.microsoft.DequantizeLinear": lambda inputs, _: [Kind(inputs[1].element, _dims(inputs[0]))],
    "com.microsoft.QuantizeLinear": lambda inputs, _: [
        Kind(inputs[2].element if any(inputs[2:3]) else 2, _dims(inputs[0]))
    ],
    "com.microsoft.EmbedLayerNormalization": lambda inputs, _: [
        Kind(inputs[2].element, (*_dims(inputs[0]), _dims(inputs[2])[1]))
    ],
}
