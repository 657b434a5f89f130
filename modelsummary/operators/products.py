"""Products of matrices, solves with triangular factors, distances between rows.

All counts are dense: masks, zeros and padding do not lower them. A matrix with a sparse layout counts the elements that
it stores. A bias does not count.

Factorisations (LU, Cholesky, QR, SVD, eigenvalues, matrix exponentials) and Fourier transforms have no formula on
purpose: they are not products, and their work depends on the algorithm or on values. They stay in the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import gcd, prod
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from modelsummary.operators.operator_calls import OperatorCall, TensorSpec
from modelsummary.operators.operator_rules import op_rule
from modelsummary.operators.operator_work import Work, alignment_of, work
from modelsummary.operators.shape_rules import FLOATS, META, is_plain, new_contiguous
from modelsummary.operators.table import Arguments, Count, register

__all__ = ["factors", "is_outer_product"]

_SPARSE = frozenset({torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})
_GROUPED = frozenset({torch.float32, torch.bfloat16, torch.float16})
_ROW_BYTES = 16
# names of the factors of a product in the schemas of torch; ``self`` is a bias where two others follow
_FACTORS = frozenset("self tensor mat1 mat2 mat_a mat_b batch1 batch2 mat vec vec1 vec2 other".split())


def _stored(matrix: Tensor) -> int:
    """Return the number of elements that a matrix stores."""
    if matrix.layout not in _SPARSE:
        return matrix.numel()
    count = (matrix._values() if matrix.is_sparse else matrix.values()).numel()
    if matrix.is_meta and not count:  # made on meta, where the number of elements is not known
        raise NotImplementedError
    return count


def _first_of(call: Arguments, count: int) -> list[Any]:
    return list(call.values())[:count]


def factors(call: Arguments) -> list[Any]:
    """Return the two factors of a product, without its bias.

    >>> factors(Arguments(self=1, mat1=2, mat2=3, beta=4))
    [2, 3]
    """
    return [value for name, value in call.items() if name in _FACTORS][-2:]


def _product(call: Arguments) -> Count:
    """Count each stored element of one matrix times the rows or columns of the other: (n, k) by (k, m)."""
    a, b = factors(call)
    if a.is_nested or b.is_nested:
        return _nested_product(a, b)
    if b.layout not in _SPARSE:
        return _stored(a) * (b.shape[-1] if b.dim() > 1 else 1)
    if a.layout in _SPARSE:  # the indices decide which elements meet
        raise NotImplementedError
    return a.shape[0] * _stored(b)


def _product_kernels(call: OperatorCall, bound: Arguments) -> list[Work]:
    a, b = _specs(factors(bound))
    batch = a.shape[0] if len(a.shape) == 3 else 1
    m, k = a.shape[-2:] if len(a.shape) > 1 else (1, a.shape[0])
    n = b.shape[-1] if len(b.shape) > 1 else 1
    return [work(call, "gemm", (batch, m, n, k), alignment=_alignment(a, b, *call.outputs[:1]))]


def _alignment(*matrices: TensorSpec) -> int:
    """Return the bytes, at most 16, of which the rows of all matrices begin at multiples."""
    return gcd(*(alignment_of(matrix.dtype.itemsize, _steps(matrix)) for matrix in matrices))


def _steps(matrix: TensorSpec) -> Iterator[int]:
    """Return the elements from one row to the next; neither rows nor columns of an expanded matrix are contiguous.

    torch copies such a matrix first (``prepare_matrix_for_cublas`` in aten/src/ATen/native/cuda/Blas.cpp).
    """
    sizes, inner = matrix.shape[-2:], matrix.stride[-2:]
    is_copied = len(sizes) == 2 and any(size > 1 and not step for size, step in zip(sizes, inner, strict=True))
    stride = (*matrix.stride[:-2], sizes[-1], 1) if is_copied else matrix.stride
    return (step for size, step in zip(matrix.shape, stride, strict=True) if size > 1)


def _specs(values: Iterable[Any]) -> list[TensorSpec]:
    """Return dense tensors; raise ``TypeError`` for a sparse or nested one, whose sizes are not noted."""
    specs = list(values)
    if not all(isinstance(spec, TensorSpec) for spec in specs):
        raise TypeError("a sparse or nested matrix")
    return specs


def _nested_product(a: Tensor, b: Tensor) -> Count:
    """Count the products of strided nested tensors, each with its own sizes."""
    if not (a.is_nested and b.is_nested) or a.layout is not torch.strided or b.layout is not torch.strided:
        raise NotImplementedError
    sizes = zip(a._nested_tensor_size().tolist(), b._nested_tensor_size().tolist(), strict=True)
    return sum(prod(left) * right[-1] for left, right in sizes)


register(
    "aten",
    "mm _int_mm _scaled_mm _scaled_mm_v2 hspmm addmm _addmm_activation _sparse_addmm sspaddmm _scaled_addmm bmm baddbmm"
    " addbmm mv addmv dot vdot",
    macs=_product,
    kernels=_product_kernels,
)


register("aten", "mm addmm mv addmv dot vdot baddbmm", dtypes="one")
register("aten", "mm addmm", multiplies="matrices")
register("aten", "bmm baddbmm", multiplies="batches")


def _addmm_shape(bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor | None:
    """Return the result of ``aten.addmm`` with a bias of one row; the factors may be transposed."""
    if not (isinstance(beta, Real) and isinstance(alpha, Real) and bias.dim() == 1 and a.dim() == b.dim() == 2):
        return None
    if a.dtype not in FLOATS or 0 in a.shape or 0 in b.shape or a.shape[1] != b.shape[0]:
        return None
    if not is_plain(bias) or not bias.dtype is a.dtype is b.dtype or bias.shape[0] != b.shape[1]:
        return None
    return new_contiguous((a.shape[0], b.shape[1]), a.dtype)


register("aten", "addmm", overload="default", shape=_addmm_shape)


def _matmul(call: Arguments) -> Count:
    """Count a product that torch did not decompose: of nested or quantised tensors, or in inference mode."""
    a, b = _first_of(call, 2)
    return _nested_product(a, b) if a.is_nested or b.is_nested else call.out.numel() * a.shape[-1]


register("aten", "matmul", macs=_matmul)
register("quantized", "matmul", macs=_matmul)
# one row of one matrix by one column of the other per element of the pattern
register("aten", "sparse_sampled_addmm", macs=lambda call: _stored(call["self"]) * call["mat1"].shape[-1])
register("aten", "_sparse_mm_reduce_impl", macs=lambda call: _stored(call["self"]) * call["other"].shape[1])
register("aten", "addr", macs=lambda call: call["vec1"].numel() * call["vec2"].numel())


def _outer_product(call: Arguments) -> Count:
    """Count ``torch.outer``, which multiplies a vector viewed as a column by another vector."""
    return call.out.numel() if is_outer_product(*_first_of(call, 2)) else 0


def is_outer_product(a: Any, b: Any) -> bool:
    """Return True if ``a`` is a vector viewed as a column and ``b`` a vector; an (n, 1) matrix only scales rows.

    The vector may be a part of a matrix: ``torch.outer`` views it with equal strides, which a column of a wider matrix
    does not have.

    >>> x = torch.ones(3, 4)
    >>> is_outer_product(x[:, 0].view(3, 1), x[0]), is_outer_product(x[:, :1], x[0])
    (True, False)
    """
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.dim() != 2 or b.dim() != 1:
        return False
    if a.shape[1] != 1 or not a._is_view() or a._base is None:
        return False
    return a._base.dim() == 1 or (a._base.shape[-1] > 1 and a.stride(0) == a.stride(1))


register("aten", "mul.Tensor mul_.Tensor", macs=_outer_product, depends_on_views=True)


def _out_dtype(call: Arguments) -> Count:
    """Count the operator that runs with a wider dtype."""
    operator, _, *args = call.args
    return op_rule(operator).macs(args, {}, call.out)


register("", "out_dtype", macs=_out_dtype)

# ------------------------------------------------------------------------------------------- linear layers


def _linear(call: Arguments) -> Count:
    """Count by input and output: packed weights hide their shape, and nested tensors know single sizes only."""
    result = call.out[0] if isinstance(call.out, (tuple, list)) else call.out
    return result.numel() * _first_of(call, 1)[0].size(-1)


def _linear_kernels(call: OperatorCall, _: Arguments) -> list[Work]:
    """Return a product of rows with a weight, which may be packed: the result has its columns."""
    x, columns = call.tensors[0], call.outputs[0].shape[-1]
    k = x.shape[-1]
    alignment = _alignment(x, call.outputs[0])
    return [work(call, "gemm", (1, x.numel // max(k, 1), columns, k), alignment=alignment)]


for _namespace, _names in {
    "aten": "linear mkldnn_linear _weight_int8pack_mm _weight_int4pack_mm _weight_int4pack_mm_for_cpu"
    " _dyn_quant_matmul_4bit _mixed_dtypes_linear _weight_int4pack_mm_with_scales_and_zeros",
    "quantized": "linear linear_relu linear_dynamic linear_relu_dynamic linear_dynamic_fp16 linear_relu_dynamic_fp16"
    " linear_leaky_relu linear_tanh",
    "bitsandbytes": "gemm_4bit gemv_4bit int8_linear_matmul int8_scaled_mm int8_mixed_scaled_mm",
}.items():
    register(_namespace, _names, macs=_linear, kernels=_linear_kernels)
register(
    "quantized",
    "linear linear_relu linear_dynamic linear_relu_dynamic linear_leaky_relu linear_tanh",
    packed_itemsize=1,
)
register("quantized", "linear_dynamic_fp16 linear_relu_dynamic_fp16", packed_itemsize=2)


def _linear_backward(call: Arguments) -> Count:
    """Count the products for the gradients of the input and of the weight."""
    needs_input, needs_weight, _ = call["output_mask"]
    return (bool(needs_input) + bool(needs_weight)) * call["grad_output"].numel() * call["self"].size(-1)


def _trilinear(call: Arguments) -> Count:
    """Count one multiply-add per element of the broadcast product of the three (torch: native/Linear.cpp)."""

    def expanded(tensor: Tensor, dims: Sequence[int]) -> list[int]:
        shape = list(tensor.shape)
        for dim in sorted(dims):
            shape.insert(dim, 1)
        return shape

    shapes = (expanded(call[f"i{i}"], call[f"expand{i}"]) for i in (1, 2, 3))
    return prod(max(sizes) for sizes in zip(*shapes, strict=True))


register("aten", "linear_backward", macs=_linear_backward)
register("aten", "_trilinear", macs=_trilinear)

# ------------------------------------------------------------------------------------------------ experts


def _grouped(call: Arguments) -> Count:
    """Count the products of groups; two 2-d operands split the inner dimension between the groups."""
    a, b = _first_of(call, 2)
    groups = call.out.shape[0] if a.dim() == b.dim() == 2 else 1
    return call.out.numel() * a.shape[-1] // groups


def _grouped_kernels(call: OperatorCall, bound: Arguments) -> list[Work]:
    """Return the work of one product per group; rows are taken to be shared out evenly."""
    a, b = _specs(factors(bound))
    groups = next((spec.shape[0] for spec in (a, b, call.outputs[0]) if len(spec.shape) == 3), 1)
    (m, k), n = a.shape[-2:], b.shape[-1]
    if len(a.shape) == len(b.shape) == 2:
        k //= groups
    elif len(a.shape) == 2:
        m //= groups
    elif len(b.shape) == 2:
        n //= groups
    return [work(call, "gemm", (groups, max(m, 1), max(n, 1), max(k, 1)), is_grouped=True)]


def _grouped_backward(call: Arguments) -> Count:
    """Count both gradients of the fallback for grouped rows in transformers."""
    a, b = _first_of(call, 2)
    return 2 * a.numel() * b.shape[-1]


def _grouped_shape(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor | None:
    """Return products of groups, also in float32 and float16, which the meta kernel refuses and device kernels accept.

    ``offs`` are the ends of the groups: in the rows of ``a`` (2-d by 3-d), in the columns of ``b`` (3-d by 2-d) or in
    the dimension that is summed (2-d by 2-d).
    """
    if a.dtype is not b.dtype or a.dtype not in _GROUPED or bias is not None or out_dtype not in (None, a.dtype):
        return None
    if not (a.dim() in (2, 3) and b.dim() in (2, 3) and _has_aligned_rows(a) and _has_aligned_rows(b)):
        return None
    groups = a.shape[:1] if a.dim() == 3 else b.shape[:1] if b.dim() == 3 else None
    if a.dim() == b.dim() == 3:
        if offs is not None or b.shape[:1] != groups:
            return None
    elif offs is None or offs.dim() != 1 or offs.dtype is not torch.int32 or groups not in (None, offs.shape):
        return None
    if a.shape[-1] != b.shape[-2]:
        return None
    rows, columns = a.shape[-2], b.shape[-1]
    products = () if a.dim() != b.dim() else a.shape[:1] if offs is None else offs.shape
    shape = (*products, rows, columns)
    # Builds for CUDA align each row of the result to 16 bytes, on every device.
    step = _ROW_BYTES // a.element_size()
    padded = -(-columns // step) * step if torch.version.cuda else columns
    return torch.empty_strided(shape, (rows * padded, padded, 1)[-len(shape) :], dtype=a.dtype, device=META)


def _has_aligned_rows(x: Tensor) -> bool:
    """Return True if each row or each column is contiguous and begins at a multiple of 16 bytes."""
    (rows, columns), (row, column) = x.shape[-2:], x.stride()[-2:]
    if row == 1 and column >= max(1, rows):
        return column * x.element_size() % _ROW_BYTES == 0
    return column == 1 and row >= max(1, columns) and row * x.element_size() % _ROW_BYTES == 0


register("aten", "_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2", macs=_grouped, kernels=_grouped_kernels)
register("aten", "_grouped_mm", overload="default", shape=_grouped_shape)
register("transformers", "grouped_mm_fallback", macs=_grouped)
register("transformers", "grouped_mm_fallback_backward", macs=_grouped_backward)

# ----------------------------------------------------------------------------------- solves and distances


def _triangular_solve(call: Arguments) -> Count:
    """Count each element of the (n, n) matrix, zeros included, times each right-hand side: n x n x m.

    (Golub and Van Loan, Matrix Computations, 3.1: n x n x m flops for the triangle, so half as many multiply-adds.)
    """
    a, result = call["A"], call.out[0]
    columns = result.shape[-1] if result.dim() > 1 else 1
    return _stored(a) * columns if a.layout in _SPARSE else result.numel() * a.shape[-1]


def _per_feature(call: Arguments) -> Count:
    """Count one multiply-add per element of the result and column of the first matrix."""
    return call.out.numel() * _first_of(call, 1)[0].shape[-1]


def _two_substitutions(call: Arguments) -> Count:
    """Count one substitution per factor; one factor is used twice, the second time transposed."""
    factors = call["input2"] if "input2" in call else _first_of(call, 1)[0]
    return 2 * call.out.numel() * factors.shape[-1]


register("aten", "linalg_solve_triangular _cdist_forward _euclidean_dist _pdist_forward", macs=_per_feature)
register("aten", "triangular_solve", macs=_triangular_solve)
register("aten", "cholesky_solve linalg_lu_solve linalg_ldl_solve", macs=_two_substitutions)
# the gradient of one set of rows: per pair, one multiply-add per dimension
register("aten", "_cdist_backward", macs=lambda call: call["grad_output"].numel() * call["x1"].shape[-1])
register("aten", "_pdist_backward", macs=lambda call: call["grad"].numel() * call["self"].shape[-1])
