"""Multiply-adds of each operator: a registry of formulas over torch's own ``flop_registry``.

All counts are dense: masks, causal attention, zeros and padding do not lower them. A matrix with a sparse layout counts
the elements that it stores. Bias, norm and activation do not count.

Factorisations (LU, Cholesky, QR, SVD, eigenvalues, matrix exponentials) and Fourier transforms have no formula on
purpose: they are not products, and their work depends on the algorithm or on values. They stay in the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from modelsummary._torch import HigherOrderOperator, OpOverload, OpOverloadPacket
from modelsummary.errors import RegistrationError

__all__ = [
    "SPARSE",
    "Formula",
    "existing",
    "find_formula",
    "is_outer_product",
    "is_own",
    "outer_product_macs",
    "register_op_cost",
    "stored",
]

Formula = Callable[..., int]
_F = TypeVar("_F", bound=Formula)
_OPERATOR_TYPES = (OpOverload, OpOverloadPacket, HigherOrderOperator)

_registry: dict[Any, Formula] = {}


def register_op_cost(op: Any) -> Callable[[_F], _F]:
    """Register a formula for the multiply-adds of one call of an operator.

    The formula gets the operator's arguments, and the result as the keyword ``out``, and returns an integer >= 0. It
    may read shapes only: in shape-only execution the tensors hold no values. It takes precedence over torch's
    ``flop_registry``. If it raises or returns something else, a warning says so and the call is listed as not counted;
    ``NotImplementedError`` lists it without a warning.

    Args:
        op: an operator (``torch.ops.mylib.my_op``), one overload of it, or a list of them.

    Raises:
        RegistrationError: the operator has a formula already, or ``op`` is not an operator.

    >>> torch.library.define("mylib::my_matmul", "(Tensor a, Tensor b) -> Tensor")
    >>> @register_op_cost(torch.ops.mylib.my_matmul)
    ... def my_matmul_macs(a, b, *, out):
    ...     return a.shape[0] * a.shape[1] * b.shape[1]
    """
    ops: Iterable[Any] = op if isinstance(op, (list, tuple)) else (op,)

    def register(formula: _F) -> _F:
        if not callable(formula):
            raise RegistrationError(
                f"register_op_cost: expected a function of the operator's arguments and out=, got {formula!r:.80}"
            )
        for each in ops:
            if not isinstance(each, _OPERATOR_TYPES):
                raise RegistrationError(
                    f"register_op_cost: expected an operator such as torch.ops.mylib.my_op, got {each!r}"
                )
            if each in _registry:
                raise RegistrationError(
                    f"register_op_cost: {each} has a formula already: {_registry[each]}; a formula cannot be replaced"
                )
        for each in ops:
            _registry[each] = formula
        return formula

    return register


aten = torch.ops.aten


def existing(namespace: Any, *names: str) -> list[Any]:
    """Return the operators with these names that this version of torch has."""
    return [getattr(namespace, name) for name in names if hasattr(namespace, name)]


SPARSE = frozenset({torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


def stored(matrix: Tensor) -> int:
    """Return the number of elements that a matrix stores."""
    if matrix.layout not in SPARSE:
        return matrix.numel()
    count = (matrix._values() if matrix.is_sparse else matrix.values()).numel()
    if matrix.is_meta and not count:  # made on meta, where the number of elements is not known
        raise NotImplementedError
    return count


@register_op_cost([aten.mm, aten._int_mm, *existing(aten, "_scaled_mm", "_scaled_mm_v2", "hspmm")])
def _mm(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> int:
    """Count each stored element of one matrix times the rows or columns of the other: (n, k) by (k, m)."""
    if b.layout not in SPARSE:
        return stored(a) * b.shape[1]
    if a.layout in SPARSE:  # the indices decide which elements meet
        raise NotImplementedError
    return a.shape[0] * stored(b)


@register_op_cost([aten.addmm, *existing(aten, "_addmm_activation", "_sparse_addmm", "sspaddmm", "_scaled_addmm")])
def _addmm(bias: Tensor, a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> int:
    return _mm(a, b)


@register_op_cost(existing(aten, "sparse_sampled_addmm"))
def _sampled_addmm(pattern: Tensor, a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> int:
    """Count one row of ``a`` by one column of ``b`` per element of the pattern."""
    return stored(pattern) * a.shape[-1]


@register_op_cost(existing(aten, "_sparse_mm_reduce_impl"))
def _sparse_mm_reduce(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> int:
    return stored(a) * b.shape[1]


@register_op_cost([aten.matmul, *existing(torch.ops.quantized, "matmul")])
def _matmul(a: Tensor, b: Tensor, *args: Any, out: Tensor, **kwargs: Any) -> int:
    """Count a product that torch did not decompose: of nested or quantised tensors, or in inference mode."""
    return _nested_product(a, b) if a.is_nested or b.is_nested else out.numel() * a.shape[-1]


def _nested_product(a: Tensor, b: Tensor) -> int:
    """Count the products of strided nested tensors, each with its own sizes."""
    if not (a.is_nested and b.is_nested) or a.layout is not torch.strided or b.layout is not torch.strided:
        raise NotImplementedError
    sizes = zip(a._nested_tensor_size().tolist(), b._nested_tensor_size().tolist(), strict=True)
    return sum(prod(left) * right[-1] for left, right in sizes)


@register_op_cost(aten.bmm)
def _bmm(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> int:
    return _nested_product(a, b) if a.is_nested else stored(a) * b.shape[2]


@register_op_cost([aten.baddbmm, aten.addbmm])
def _baddbmm(bias: Tensor, a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> int:
    return _bmm(a, b)


@register_op_cost([aten.mv, aten.dot, aten.vdot])
def _mv(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> int:
    return stored(a)


@register_op_cost(aten.addmv)
def _addmv(bias: Tensor, a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> int:
    return stored(a)


@register_op_cost(aten.addr)
def _addr(bias: Tensor, a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> int:
    return a.numel() * b.numel()


@register_op_cost([aten.mul.Tensor, aten.mul_.Tensor])
def outer_product_macs(a: Tensor, b: Tensor, *, out: Tensor, **kwargs: Any) -> int:
    """Count ``torch.outer``, which multiplies a vector viewed as a column by another vector."""
    return out.numel() if is_outer_product(a, b) else 0


def is_outer_product(a: Any, b: Any) -> bool:
    """Return True if ``a`` is a vector viewed as a column and ``b`` a vector; an (n, 1) matrix only scales rows."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.dim() != 2 or b.dim() != 1:
        return False
    return a.shape[1] == 1 and a._is_view() and a._base is not None and a._base.dim() == 1


@register_op_cost(existing(aten, "_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"))
def _grouped_mm(a: Tensor, b: Tensor, *args: Any, out: Tensor, **kwargs: Any) -> int:
    """Count the products of groups; two 2-d operands split the inner dimension between the groups."""
    groups = out.shape[0] if a.dim() == b.dim() == 2 else 1
    return out.numel() * a.shape[-1] // groups


def _grouped_mm_backward(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> int:
    """Count both gradients of the fallback for grouped rows in transformers."""
    return 2 * a.numel() * b.shape[-1]


@register_op_cost(
    [
        *existing(aten, "linear", "mkldnn_linear", "_weight_int8pack_mm", "_weight_int4pack_mm"),
        *existing(aten, "_weight_int4pack_mm_for_cpu", "_dyn_quant_matmul_4bit"),
        *existing(torch.ops.quantized, "linear", "linear_relu", "linear_dynamic", "linear_relu_dynamic"),
        *existing(torch.ops.quantized, "linear_dynamic_fp16", "linear_relu_dynamic_fp16"),
        *existing(torch.ops.quantized, "linear_leaky_relu", "linear_tanh"),
        *existing(aten, "_mixed_dtypes_linear", "_weight_int4pack_mm_with_scales_and_zeros"),
    ]
)
def _linear(x: Tensor, *args: Any, out: Tensor, **kwargs: Any) -> int:
    """Count by input and output: packed weights hide their shape, and nested tensors know single sizes only."""
    return out.numel() * x.size(-1)


@register_op_cost(existing(aten, "linear_backward"))
def _linear_backward(x: Tensor, grad: Tensor, weight: Tensor, mask: Sequence[bool], **kwargs: Any) -> int:
    """Count the products for the gradients of the input and of the weight."""
    return (bool(mask[0]) + bool(mask[1])) * grad.numel() * x.size(-1)


@register_op_cost(aten._trilinear)
def _trilinear(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    *args: Any,
    **kwargs: Any,
) -> int:
    """Count one multiply-add per element of the broadcast product of the three (torch: native/Linear.cpp)."""

    def expanded(tensor: Tensor, dims: Sequence[int]) -> list[int]:
        shape = list(tensor.shape)
        for dim in sorted(dims):
            shape.insert(dim, 1)
        return shape

    shapes = zip(expanded(a, expand1), expanded(b, expand2), expanded(c, expand3), strict=True)
    return prod(max(sizes) for sizes in shapes)


@register_op_cost(
    [
        *existing(aten, "mkldnn_convolution", "cudnn_convolution", "cudnn_convolution_relu"),
        *existing(aten, "cudnn_convolution_add_relu", "miopen_convolution", "miopen_convolution_relu"),
        *existing(aten, "miopen_convolution_add_relu", "miopen_depthwise_convolution", "_conv_depthwise2d"),
        *existing(aten, "conv_depthwise3d", "_slow_conv2d_forward", "slow_conv3d_forward", "thnn_conv2d"),
        *existing(aten, "slow_conv3d", "slow_conv_dilated2d", "slow_conv_dilated3d"),
    ]
)
def _plain_convolution(x: Tensor, weight: Tensor, *args: Any, out: Tensor, **kwargs: Any) -> int:
    """Count weight.shape[1:] per output element.

    Products with padding count too: a dense count depends on shapes only.
    """
    return out.numel() * prod(weight.shape[1:])


@register_op_cost([aten.convolution, *existing(aten, "_convolution", "convolution_overrideable")])
def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    *args: Any,
    out: Tensor,
    **kwargs: Any,
) -> int:
    """Count weight.shape[1:] per output element, or per input element if transposed."""
    return (x if transposed else out).numel() * prod(weight.shape[1:])


@register_op_cost(
    [
        *existing(aten, "cudnn_convolution_transpose", "miopen_convolution_transpose"),
        *existing(aten, "slow_conv_transpose2d", "slow_conv_transpose3d"),
    ]
)
def _transposed_convolution(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> int:
    return x.numel() * prod(weight.shape[1:])


@register_op_cost(
    existing(
        torch.ops.quantized,
        *(f"conv{size}d{suffix}" for size in (1, 2, 3) for suffix in ("", "_relu", "_dynamic", "_add", "_add_relu")),
        *(f"conv_transpose{size}d{suffix}" for size in (1, 2, 3) for suffix in ("", "_dynamic")),
    )
)
def _quantized_convolution(x: Tensor, *args: Any, out: Tensor, **kwargs: Any) -> int:
    """Count by the weight; the packed object returns a copy of it."""
    packed = next(each for each in args if hasattr(each, "unpack"))
    weight: Tensor = packed.unpack()[0]
    positions = x if packed.transpose() else out
    return positions.numel() * prod(weight.shape[1:])


@register_op_cost(aten.conv_tbc)
def _conv_tbc(x: Tensor, weight: Tensor, *args: Any, out: Tensor, **kwargs: Any) -> int:
    """Count by the weight (kernel, input channels, output channels)."""
    return out.numel() * weight.shape[0] * weight.shape[1]


@register_op_cost([aten.convolution_backward, *existing(aten, "convolution_backward_overrideable")])
def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> int:
    """Count the forward once per gradient: both pair the same elements as the forward, whatever the groups."""
    transposed, *_, mask = args[-4:]
    positions = x if transposed else grad
    return (bool(mask[0]) + bool(mask[1])) * positions.numel() * prod(weight.shape[1:])


@register_op_cost(
    [
        *existing(aten, "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *existing(aten, "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
        *existing(aten, "_scaled_dot_product_fused_attention_overrideable"),
    ]
)
def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    """Count the scores (query x key) and their product with value, for each head of the query."""
    return prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


@register_op_cost(
    [
        *existing(aten, "_scaled_dot_product_flash_attention_backward"),
        *existing(aten, "_scaled_dot_product_flash_attention_for_cpu_backward"),
        *existing(aten, "_scaled_dot_product_efficient_attention_backward"),
        *existing(aten, "_scaled_dot_product_cudnn_attention_backward"),
        *existing(aten, "_scaled_dot_product_fused_attention_overrideable_backward"),
    ]
)
def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    """Count two products per product of the forward, and the scores again: they were not kept."""
    return prod(query.shape[:-1]) * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])


def scores_again(name: str, args: Sequence[Any]) -> int:
    """Return the multiply-adds of scores that a fused backward of attention computes again; 0 for other operators.

    They are work of the device, and not of the model.

    Args:
        name: of the operator.
        args: its arguments, or only the tensors among them, or their specs.
    """
    if "_attention" not in name or not name.endswith("_backward"):
        return 0
    query, key = args[:2] if "flex" in name else args[1:3]
    return int(prod(query.shape) * key.shape[-2])


@register_op_cost(existing(aten, "mkldnn_rnn_layer"))
def _mkldnn_rnn_layer(x: Tensor, w_ih: Tensor, w_hh: Tensor, *args: Any, **kwargs: Any) -> int:
    """Count one layer in one direction; x is (time, batch, features), the weights hold all gates."""
    return x.shape[0] * x.shape[1] * (w_ih.numel() + w_hh.numel())


@register_op_cost(existing(aten, "mkldnn_rnn_layer_backward"))
def _mkldnn_rnn_layer_backward(x: Tensor, w_ih: Tensor, w_hh: Tensor, *args: Any, **kwargs: Any) -> int:
    """Count two products per product of the forward: the kernel always computes all gradients."""
    return 2 * _mkldnn_rnn_layer(x, w_ih, w_hh)


@register_op_cost(existing(aten, "_cudnn_rnn", "miopen_rnn"))
def _cudnn_rnn(x: Tensor, weight: Sequence[Tensor], *args: Any, **kwargs: Any) -> int:
    """Count all layers and directions: every weight matrix at every time step, without the biases (1-d)."""
    return prod(x.shape[:-1]) * sum(w.numel() for w in weight if w.dim() == 2)


def _deform_conv2d(x: Tensor, weight: Tensor, *args: Any, out: Tensor, **kwargs: Any) -> int:
    return out.numel() * prod(weight.shape[1:])


def _packed_linear(x: Tensor, *args: Any, out: Any, **kwargs: Any) -> int:
    """Count a linear layer that writes its result into ``out``, or returns it as the first of a tuple."""
    result = out[0] if isinstance(out, (tuple, list)) else out
    return int(result.numel()) * x.shape[-1]


def _out_dtype(operator: OpOverload, dtype: torch.dtype, *args: Any, out: Tensor) -> int:
    """Count the operator that runs with a wider dtype."""
    formula = find_formula(operator)
    if formula is None:
        raise NotImplementedError
    return formula(*args, out=out)


def _flex_attention_backward(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    return _attention_backward(query, query, key, value)


# Registered by name: the libraries that define these operators are not imported.
_by_name: dict[str, Formula] = {
    "out_dtype": _out_dtype,
    "flex_attention": _attention,
    "flex_attention_backward": _flex_attention_backward,
    "torchvision.deform_conv2d": _deform_conv2d,
    **dict.fromkeys(
        (f"bitsandbytes.{name}" for name in "gemm_4bit gemv_4bit int8_linear_matmul int8_scaled_mm".split()),
        _packed_linear,
    ),
    "bitsandbytes.int8_mixed_scaled_mm": _packed_linear,
    "transformers.grouped_mm_fallback": _grouped_mm,
    "transformers.grouped_mm_fallback_backward": _grouped_mm_backward,
}


def find_formula(func: Any) -> Formula | None:
    """Return the formula of an operator: ours for the overload, ours for the operator, or torch's."""
    if not isinstance(func, OpOverload):
        return _registry.get(func) or _by_name.get(str(func)) or _torch_formula(func)
    namespace, _, base = func._schema.name.partition("::")
    candidates: list[Any] = [func, func._overloadpacket]
    if base.endswith("_"):  # addmm_ costs what addmm costs
        candidates += existing(getattr(torch.ops, namespace), base.removesuffix("_"))
    ours = (_registry.get(candidate) for candidate in candidates)
    torchs = (_torch_formula(candidate) for candidate in candidates)
    by_name = _by_name.get(f"{namespace}.{base}")
    return next((formula for formula in (*ours, by_name, *torchs) if formula is not None), None)


def is_own(formula: Formula) -> bool:
    """Return True if a formula is from this package or from torch, not registered by a user."""
    return str(getattr(formula, "__module__", "")).partition(".")[0] == "modelsummary"


def _torch_formula(operator: Any) -> Formula | None:
    from torch.utils.flop_counter import flop_registry  # imports triton, which takes 70 ms

    flops = flop_registry.get(operator)
    if flops is None:
        return None

    def macs(*args: Any, out: Any, **kwargs: Any) -> int:
        return int(flops(*args, **kwargs, out_val=out)) // 2

    return macs
