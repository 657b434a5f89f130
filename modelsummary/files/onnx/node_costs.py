"""Multiply-adds of ONNX operators and onnxruntime's contrib operators, from shapes.

A formula takes integers or sympy symbols. All counts are dense, without bias and activation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from modelsummary.errors import RegistrationError

__all__ = ["FORMULAS", "PER_INPUT", "PER_OUTPUT", "Called", "looks_like_product"]


class Called(NamedTuple):
    """One call of an operator: sizes by position, None if left out or unknown, and attributes."""

    inputs: Sequence[Any]
    outputs: Sequence[Any]
    attributes: Mapping[str, Any]


Formula = Callable[[Called], Any]

FORMULAS: dict[str, Formula] = {}


def _counts(*names: str) -> Callable[[Formula], Formula]:
    def register(formula: Formula) -> Formula:
        taken = FORMULAS.keys() & set(names)
        if taken:
            raise RegistrationError(f"operator {min(taken)!r} already has the formula {FORMULAS[min(taken)].__name__}")
        FORMULAS.update(dict.fromkeys(names, formula))
        return formula

    return register


@_counts(
    *("Conv", "ConvInteger", "DeformConv"),
    *("com.microsoft.FusedConv", "com.microsoft.NhwcFusedConv", "com.microsoft.nchwc.Conv"),
)
def _conv(op: Called) -> Any:
    return prod(op.outputs[0]) * prod(op.inputs[1][1:])


@_counts("QLinearConv", "com.microsoft.QLinearConv")
def _qlinear_conv(op: Called) -> Any:
    return prod(op.outputs[0]) * prod(op.inputs[3][1:])


@_counts("ConvTranspose")
def _conv_transpose(op: Called) -> Any:
    """Multiply every input element with every weight of its channel."""
    return prod(op.inputs[0]) * prod(op.inputs[1][1:])


@_counts("Gemm", "com.microsoft.QGemm", "com.microsoft.FusedGemm")
def _gemm(op: Called) -> Any:
    rows = op.inputs[0][0] if op.attributes.get("transA") else op.inputs[0][1]
    return prod(op.outputs[0]) * rows


@_counts(
    *("MatMul", "MatMulInteger", "QLinearMatMul", "com.microsoft.MatMulIntegerToFloat"),
    *("com.microsoft.DynamicQuantizeMatMul", "com.microsoft.MatMulNBits", "com.microsoft.MatMulBnb4"),
)
def _matmul(op: Called) -> Any:
    """Take the inner dimension from the first operand: packed weights hide their shape."""
    return prod(op.outputs[0]) * op.inputs[0][-1]


@_counts("com.microsoft.FusedMatMul", "com.microsoft.FusedMatMulActivation", "com.microsoft.TransposeMatMul")
def _fused_matmul(op: Called) -> Any:
    """Take the inner dimension from the first operand; ``transBatchA`` puts its rows before the batch."""
    rows = 0 if op.attributes.get("transBatchA") else -2
    return prod(op.outputs[0]) * op.inputs[0][rows if op.attributes.get("transA") else -1]


@_counts("Einsum")
def _einsum(op: Called) -> Any:
    """Multiply operands from left to right, as ``torch.einsum`` does, and sum indices that no later operand uses.

    The product of two operands costs the product of its index sizes; an index of one operand alone is summed before and
    left out. A product without a sum is element-wise and counts nothing.
    """
    left, arrow, right = op.attributes["equation"].replace(" ", "").partition("->")
    terms = [_indices(term, len(size)) for term, size in zip(left.split(","), op.inputs, strict=True)]
    counts = Counter(index for term in terms for index in term)
    kept = set(_indices(right, None)) if arrow else {index for index, count in counts.items() if count == 1}
    kept |= {index for index in counts if type(index) is int}  # the indices behind the dots
    sizes: dict[Any, Any] = {}
    for term, size in zip(terms, op.inputs, strict=True):
        sizes |= {index: dim for index, dim in zip(term, size, strict=True) if sizes.get(index, 1) == 1}
    total: Any = 0
    done = set(terms[0])
    for position, term in enumerate(terms[1:], 1):
        later = kept.union(*terms[position + 1 :])
        used = (done & set(term)) | ((done | set(term)) & later)
        total = total + (prod(sizes[index] for index in used) if used - later else 0)
        done = used & later
    return total


def _indices(term: str, rank: int | None) -> list[Any]:
    """Return the indices of an operand; dots become negative numbers, or nothing if ``rank`` is None."""
    before, dots, after = term.partition("...")
    named = len(before) + len(after)
    if rank is None:
        return [*before, *after]
    if rank < named or (rank > named and not dots):
        raise ValueError("the number of indices differs from the rank")
    return [*before, *range(named - rank, 0), *after]


def _recurrent(gates: int) -> Formula:
    def formula(op: Called) -> Any:
        steps, directions = prod(op.inputs[0][:2]), op.inputs[1][0]  # length and batch, in one order or the other
        hidden = op.inputs[2][-1]
        return steps * directions * gates * hidden * (op.inputs[0][2] + hidden)

    return formula


FORMULAS |= {"LSTM": _recurrent(4), "GRU": _recurrent(3), "RNN": _recurrent(1)}


@_counts("com.microsoft.DynamicQuantizeLSTM")
def _quantised_lstm(op: Called) -> Any:
    """Count an LSTM with weights (directions, input, 4 * hidden) and (directions, hidden, 4 * hidden)."""
    hidden = op.attributes["hidden_size"]
    return prod(op.inputs[0][:2]) * op.inputs[1][0] * 4 * hidden * (op.inputs[0][2] + hidden)


@_counts("ai.onnx.ml.LinearClassifier", "ai.onnx.ml.LinearRegressor")
def _linear(op: Called) -> Any:
    """Multiply every feature with one coefficient per class or target."""
    rows = len(op.attributes.get("intercepts", ())) if "targets" not in op.attributes else op.attributes["targets"]
    return prod(op.inputs[0]) * (rows or len(op.attributes["coefficients"]) // op.inputs[0][-1])


@_counts("Attention")
def _attention(op: Called) -> Any:
    """Count the scores and their product with the values; 4-d inputs have the heads in dimension 1."""
    query, key, out = op.inputs[0], op.inputs[1], op.outputs[0]
    past = op.inputs[4][2] if len(op.inputs) > 4 and op.inputs[4] else 0
    width = query[-1] + out[-1] if len(query) == 3 else query[1] * (query[3] + out[3])
    return query[0] * query[-2] * (key[-2] + past) * width


@_counts("com.microsoft.MultiHeadAttention")
def _multi_head_attention(op: Called) -> Any:
    """Count the scores and their product with the values; a past (batch, heads, length, size) precedes the keys."""
    query, key, value = op.inputs[:3]
    if not len(query) == len(key) == len(value) == 3 or any(op.inputs[8:9]):
        raise ValueError("unsupported: packed, or with a past of unknown length")
    past = op.inputs[6][2] if any(op.inputs[6:7]) else 0
    return query[0] * query[1] * (key[1] + past) * (query[2] + value[2])


@_counts("com.microsoft.GroupQueryAttention")
def _group_query_attention(op: Called) -> Any:
    """Count attention with fewer key heads than query heads; a packed query holds query, key and value."""
    batch, length, width = op.inputs[0]
    heads, groups = op.attributes["num_heads"], op.attributes["kv_num_heads"]
    size = width // heads if any(op.inputs[1:2]) else width // (heads + 2 * groups)
    past = op.inputs[3][2] if any(op.inputs[3:4]) else 0
    return 2 * batch * length * (length + past) * heads * size


@_counts("com.microsoft.Attention")
def _packed_attention(op: Called) -> Any:
    """Count the projection to query, key and value, and self-attention, also over a past.

    The past is (2, batch, heads, length, size). The three widths are equal unless ``qkv_hidden_sizes`` gives them.
    """
    batch, length, width = op.inputs[0]
    columns = op.inputs[1][-1]
    if op.attributes.get("past_present_share_buffer"):
        raise ValueError("unsupported: a past of unknown length")
    query, _, value = op.attributes.get("qkv_hidden_sizes") or [columns // 3] * 3
    past = op.inputs[4][3] if any(op.inputs[4:5]) else 0
    return batch * length * (width * columns + (length + past) * (query + value))


@_counts("com.microsoft.QAttention")
def _quantised_attention(op: Called) -> Any:
    """Count ``_packed_attention`` on integers; the past is the ninth input."""
    return _packed_attention(op._replace(inputs=[*op.inputs[:2], None, None, *op.inputs[8:9]]))


@_counts("com.microsoft.MoE")
def _experts(op: Called) -> Any:
    """Multiply each token with the two or three weights of ``k`` experts."""
    tokens, weights = (
        prod(op.inputs[0][:-1]),
        [op.inputs[position] for position in (2, 4, 6) if any(op.inputs[position:][:1])],
    )
    return tokens * op.attributes.get("k", 1) * sum(prod(weight[1:]) for weight in weights)


_WORDS = (
    *("Conv", "MatMul", "Gemm", "Attention", "Linear", "LSTM", "GRU", "RNN", "Einsum", "DFT", "STFT", "Det"),
    *("SVM", "Transformer", "MoE", "BitLinear", "Mamba", "Ssm"),
)
_DOMAINS = ("", "ai.onnx.ml", "ai.onnx.preview.training", "com.microsoft", "com.microsoft.nchwc")


def looks_like_product(domain: str, op_type: str) -> bool:
    """Return True if an operator without a formula belongs in the ledger because it may multiply matrices.

    >>> looks_like_product("", "LinearAttention"), looks_like_product("", "Relu"), looks_like_product("my.own", "Relu")
    (True, False, True)
    """
    name = op_type.removeprefix("QLinear")  # onnxruntime's QLinearAdd and QLinearConcat
    helper = name.startswith("Quantize") or name.lower().endswith("quantizelinear")
    return domain not in _DOMAINS or (any(word in name for word in _WORDS) and not helper)


PER_OUTPUT = frozenset(
    "Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Ceil Celu"
    " Clip Cos Cosh DequantizeLinear Div Dropout DynamicQuantizeLinear Elu Equal Erf Exp Floor Gelu Greater"
    " GreaterOrEqual GridSample HardSigmoid HardSwish IsInf IsNaN LeakyRelu Less LessOrEqual Log Max Mean Min Mish"
    " Mod Mul Neg Not Or PRelu Pow QuantizeLinear Reciprocal Relu Resize Round Selu Shrink Sigmoid Sign Sin Sinh"
    " Softplus Softsign Sqrt Sub Sum Swish Tan Tanh ThresholdedRelu Upsample Where Xor".split()
)
PER_INPUT = frozenset(
    "ArgMax ArgMin AveragePool BatchNormalization CumSum GlobalAveragePool GlobalLpPool GlobalMaxPool"
    " GroupNormalization Hardmax InstanceNormalization LRN LayerNormalization LogSoftmax LpNormalization LpPool"
    " MaxPool MeanVarianceNormalization RMSNormalization ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax"
    " ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Softmax".split()
)
