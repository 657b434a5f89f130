"""Direct shape rules for operators whose meta kernels take 0.1 to 1 ms per call.

Torch writes these kernels in Python, many as decompositions into some twenty operators each. A rule returns exactly the
shapes, strides and dtypes that the kernel returns. It returns None for a case that it does not handle; then the kernel
runs, and raises the errors of the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import zip_longest
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from modelsummary.capture.execution.flex_attention import FLEX_RULES

__all__ = ["SHAPE_RULES", "new_contiguous", "rules_for"]

aten = torch.ops.aten
_META = torch.device("meta")
_FLOATS = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
_GROUPED = frozenset({torch.float32, torch.bfloat16, torch.float16})
_ROW_BYTES = 16
_STATISTICS_DTYPES = frozenset({torch.float32, torch.float64})  # in half precision, statistics have another dtype
Shape = Sequence[int]


@lru_cache(maxsize=4096)
def _contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


@lru_cache(maxsize=4096)
def _strides_in_order(shape: torch.Size, strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the strides of a dense tensor with its dimensions in the order of ``strides``; None if several may be.

    Results element by element keep the order of the dimensions of their operand (``reorder_dimensions`` in
    TensorIterator.cpp).
    """
    inner_first = sorted(range(len(shape)), key=strides.__getitem__)
    is_first_inside = shape[:1] == (1,) and inner_first[-1] != 0
    if is_first_inside or 0 in shape or 1 in shape[1:] or 0 in strides or len(set(strides)) < len(strides):
        return None
    dense, elements = [0] * len(shape), 1
    for dim in inner_first:
        dense[dim] = elements
        elements *= shape[dim]
    return tuple(dense)


def _is_plain(x: Any) -> bool:
    """Return True for a tensor that is contiguous, also in the strides of dimensions of size 1, and not empty."""
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        return False
    shape = x.shape
    return 0 not in shape and x.stride() == _contiguous_strides(shape)


def _are_plain_floats(x: Tensor, *others: Tensor | None) -> bool:
    """Return True if all tensors are plain and of one floating point dtype; ``others`` may be None."""
    dtype = x.dtype
    return (
        dtype in _FLOATS
        and _is_plain(x)
        and all(other is None or (_is_plain(other) and other.dtype is dtype) for other in others)
    )


def new_contiguous(shape: Shape, dtype: torch.dtype) -> Tensor:
    """Return a contiguous tensor on meta."""
    shape = torch.Size(shape)
    return torch.empty_strided(shape, _contiguous_strides(shape), dtype=dtype, device=_META)


# ---------------------------------------------------------------------------------------- element by element


def _same(x: Tensor, *options: Any, **named: Any) -> Tensor | None:
    """Return the result of an operator with one result per element, of the dtype of ``x``."""
    return _like(x, x.dtype) if all(map(_is_usual, (*options, *named.values()))) else None


def _like(x: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return a tensor of the shape of ``x`` with its dimensions in the same order."""
    if x.dtype not in _FLOATS or x.layout is not torch.strided:
        return None
    strides = _contiguous_strides(x.shape) if _is_plain(x) else _strides_in_order(x.shape, x.stride())
    return None if strides is None else torch.empty_strided(x.shape, strides, dtype=dtype, device=_META)


def _is_usual(option: Any) -> bool:
    if isinstance(option, str):
        return option in ("none", "tanh")  # approximations of gelu
    return option is None or isinstance(option, Real)


def _clamp(x: Tensor, *bounds: Any) -> Tensor | None:
    return None if all(bound is None for bound in bounds) else _same(x, *bounds)  # the kernel requires a bound


def _broadcast(a: Tensor, b: Tensor) -> torch.Size | None:
    """Return the broadcast shape of plain tensors; None if the strides of the result are complicated."""
    if a.shape == b.shape:
        return a.shape
    pairs = list(zip_longest(reversed(a.shape), reversed(b.shape), fillvalue=1))[::-1]
    if any(own != other and 1 not in (own, other) for own, other in pairs):
        return None
    shape = torch.Size(map(max, pairs))
    return None if 1 in shape[1:] else shape


def _two(a: Any, b: Any, dtype: torch.dtype | None = None) -> Tensor | None:
    if not isinstance(a, Tensor):
        return None
    if isinstance(b, Real):
        return _like(a, dtype or a.dtype)
    if not isinstance(b, Tensor) or a.dtype is not b.dtype:
        return None
    if a.layout is b.layout is torch.strided and a.shape == b.shape and a.stride() == b.stride():
        return _like(a, dtype or a.dtype)
    if not _are_plain_floats(a, b):
        return None
    shape = _broadcast(a, b)
    return None if shape is None else new_contiguous(shape, dtype or a.dtype)


def _arithmetic(a: Any, b: Any, *, alpha: Any = 1) -> Tensor | None:
    return _two(a, b) if isinstance(alpha, Real) else None


def _comparison(a: Any, b: Any) -> Tensor | None:
    return _two(a, b, torch.bool)


def _masked_fill(x: Tensor, mask: Tensor, value: Any) -> Tensor | None:
    if not isinstance(value, Real) or mask.dtype is not torch.bool or not _is_plain(mask) or not _are_plain_floats(x):
        return None
    return new_contiguous(x.shape, x.dtype) if _broadcast(x, mask) == x.shape else None


def _in_place(rule: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """Return the rule of an operator that writes the result of ``rule`` into its first argument."""

    def write(x: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        out = rule(x, *args, **kwargs)
        return x if out is not None and out.shape == x.shape else None

    return write


def _clone(x: Tensor, *, memory_format: torch.memory_format | None = None) -> Tensor | None:
    if x.layout is not torch.strided or x.is_conj() or x.is_neg() or 0 in x.shape:
        return None
    keeps_strides = memory_format in (None, torch.preserve_format) and _is_plain(x)
    return new_contiguous(x.shape, x.dtype) if keeps_strides or memory_format is torch.contiguous_format else None


def _copy(x: Tensor, source: Tensor, *_: Any) -> Tensor | None:
    return x if x.shape == source.shape and x.dtype is source.dtype and x.device == source.device else None


# -------------------------------------------------------------------------------- products and convolutions


def _mm(a: Tensor, b: Tensor) -> Tensor | None:
    """Return the result of ``aten.mm`` and ``aten.bmm``; the factors may be transposed."""
    if a.dtype is not b.dtype or a.dtype not in _FLOATS or 0 in a.shape or 0 in b.shape:
        return None
    if not a.dim() == b.dim() >= 2 or a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        return None
    return new_contiguous((*a.shape[:-1], b.shape[-1]), a.dtype)


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor | None:
    """Return the result of ``aten.addmm`` with a bias of one row."""
    if not (isinstance(beta, Real) and isinstance(alpha, Real) and bias.dim() == 1 and a.dim() == 2):
        return None
    if not _is_plain(bias) or bias.dtype is not a.dtype or bias.shape[0] != b.shape[-1]:
        return None
    return _mm(a, b)


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Shape,
    padding: Shape,
    dilation: Shape,
    transposed: bool,
    _: Shape,
    groups: int,
) -> Tensor | None:
    if transposed or not _are_plain_floats(x, weight, bias) or not x.dim() == weight.dim() >= 3:
        return None
    sizes, kernel = x.shape[2:], weight.shape[2:]
    if not len(sizes) == len(stride) == len(padding) == len(dilation) or min(*stride, *dilation, groups) < 1:
        return None
    if weight.shape[1] * groups != x.shape[1] or weight.shape[0] % groups or min(padding) < 0:
        return None
    if bias is not None and bias.shape != weight.shape[:1]:
        return None
    each = zip(sizes, kernel, stride, padding, dilation, strict=True)
    outer = [(size + 2 * pad - step * (extent - 1) - 1) // hop + 1 for size, extent, hop, pad, step in each]
    return new_contiguous((x.shape[0], weight.shape[0], *outer), x.dtype) if min(outer) > 0 else None


def _grouped_mm(
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
    return torch.empty_strided(shape, (rows * padded, padded, 1)[-len(shape) :], dtype=a.dtype, device=_META)


def _has_aligned_rows(x: Tensor) -> bool:
    """Return True if each row or each column is contiguous and begins at a multiple of 16 bytes."""
    (rows, columns), (row, column) = x.shape[-2:], x.stride()[-2:]
    if row == 1 and column >= max(1, rows):
        return column * x.element_size() % _ROW_BYTES == 0
    return column == 1 and row >= max(1, columns) and row * x.element_size() % _ROW_BYTES == 0


def _embedding(weight: Tensor, indices: Tensor, *_: Any) -> Tensor | None:
    if weight.dim() != 2 or not _are_plain_floats(weight) or not _is_plain(indices):
        return None
    return new_contiguous((*indices.shape, weight.shape[1]), weight.dtype) if indices.dtype is torch.int64 else None


def _index(x: Tensor, indices: Sequence[Any]) -> Tensor | None:
    """Return rows of ``x``, selected by one tensor of positions."""
    if len(indices) != 1 or indices[0].dtype is not torch.int64 or not x.dim():
        return None
    shape = (*indices[0].shape, *x.shape[1:])
    return new_contiguous(shape, x.dtype) if _is_plain(x) and _is_plain(indices[0]) else None


# ------------------------------------------------------------------------------------- along dimensions


def _dims_of(x: Tensor, dims: Any) -> list[int] | None:
    """Return non-negative dimensions; None if one does not exist or is named twice."""
    if not isinstance(dims, (list, tuple)) or not dims or not all(-x.dim() <= dim < x.dim() for dim in dims):
        return None
    positions = [dim % x.dim() for dim in dims]
    return positions if len(set(positions)) == len(positions) else None


def _reduction(x: Tensor, dims: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor | None:
    positions = _dims_of(x, dims)
    if positions is None or dtype is not None or not _are_plain_floats(x):
        return None
    sizes = enumerate(x.shape)
    kept = [1 if dim in positions else size for dim, size in sizes if keepdim or dim not in positions]
    return new_contiguous(kept, x.dtype)


def _softmax(x: Tensor, dim: int, half_to_float: Any = False) -> Tensor | None:
    if half_to_float not in (False, None) or _dims_of(x, [dim]) is None or not _are_plain_floats(x):
        return None
    return new_contiguous(x.shape, x.dtype)


def _roll(x: Tensor, shifts: Shape, dims: Shape = ()) -> Tensor | None:
    fits = _dims_of(x, dims) is not None and len(shifts) == len(dims) and _are_plain_floats(x)
    return new_contiguous(x.shape, x.dtype) if fits else None


def _ends_with_rows(x: Tensor) -> bool:
    """Return True if the last dimension is the innermost in memory: then the format is not channels-last."""
    return x.dtype in _FLOATS and x.dim() > 1 and 0 not in x.shape and x.stride()[-1] == 1 and x.shape[1] > 1


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    first = tensors[0]
    if _dims_of(first, [dim]) is None or any(tensor.dtype is not first.dtype for tensor in tensors):
        return None
    if not (_are_plain_floats(*tensors) or all(map(_ends_with_rows, tensors))):
        return None
    shape = list(first.shape)
    shape[dim] = -1
    for tensor in tensors[1:]:
        if tensor.dim() != len(shape):
            return None
        if any(size not in (-1, own) for size, own in zip(shape, tensor.shape, strict=True)):
            return None
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return new_contiguous(shape, first.dtype)


# ------------------------------------------------------------------------------------------ normalisations


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the results of ``aten.native_batch_norm``; None for one value per channel, which the kernel refuses."""
    if x.dtype not in _STATISTICS_DTYPES or not _are_plain_floats(x, weight, bias, mean, var):
        return None
    if x.dim() < 2 or x.numel() == x.shape[1]:
        return None
    statistic = (x.shape[1],)
    return new_contiguous(x.shape, x.dtype), new_contiguous(statistic, x.dtype), new_contiguous(statistic, x.dtype)


def _layer_norm(
    x: Tensor, normalized_shape: Shape, weight: Tensor | None, bias: Tensor | None, *_: object
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the result, means and reciprocal deviations of ``aten.native_layer_norm``, one per normalised part."""
    kept = x.dim() - len(normalized_shape)
    if x.dtype not in _STATISTICS_DTYPES or not _are_plain_floats(x, weight, bias):
        return None
    if kept <= 0 or list(x.shape[kept:]) != list(normalized_shape):
        return None
    statistics = (*x.shape[:kept], *[1] * len(normalized_shape))
    return new_contiguous(x.shape, x.dtype), new_contiguous(statistics, x.dtype), new_contiguous(statistics, x.dtype)


def rules_for(rule: Callable[..., Any], names: str) -> dict[Any, Callable[..., Any]]:
    """Return ``rule`` for each operator in ``names``, with ``.`` before an overload, that this torch has.

    >>> list(rules_for(_mm, "mm add.Tensor missing"))
    [<OpOverload(op='aten.mm', overload='default')>, <OpOverload(op='aten.add', overload='Tensor')>]
    """
    found = {}
    for name in names.split():
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(aten, packet, None), overload or "default", None)
        if operator is not None:
            found[operator] = rule
    return found


SHAPE_RULES: dict[Any, Callable[..., Any]] = {
    **rules_for(_same, "relu gelu silu sigmoid tanh hardswish hardsigmoid hardtanh leaky_relu elu mish softplus"),
    **rules_for(_same, "exp log neg abs sqrt rsqrt reciprocal sin cos erf clamp_min pow.Tensor_Scalar"),
    **rules_for(_clamp, "clamp"),
    **rules_for(_arithmetic, "add.Tensor sub.Tensor mul.Tensor div.Tensor add.Scalar sub.Scalar mul.Scalar div.Scalar"),
    **rules_for(_two, "maximum minimum"),
    **rules_for(
        _in_place(_same), "relu_ gelu_ silu_ sigmoid_ tanh_ hardswish_ hardsigmoid_ hardtanh_ leaky_relu_ elu_ mish_"
    ),
    **rules_for(_in_place(_same), "bernoulli_.float"),
    **rules_for(_in_place(_arithmetic), "add_.Tensor sub_.Tensor mul_.Tensor div_.Tensor"),
    **rules_for(_comparison, "eq.Scalar ne.Scalar lt.Scalar gt.Scalar le.Scalar ge.Scalar"),
    **rules_for(_comparison, "eq.Tensor ne.Tensor lt.Tensor gt.Tensor le.Tensor ge.Tensor"),
    **rules_for(_masked_fill, "masked_fill.Scalar"),
    **rules_for(_clone, "clone"),
    **rules_for(_copy, "copy_"),
    **rules_for(_mm, "mm bmm"),
    **rules_for(_addmm, "addmm"),
    **rules_for(_grouped_mm, "_grouped_mm"),
    **rules_for(_convolution, "convolution"),
    **rules_for(_embedding, "embedding"),
    **rules_for(_index, "index.Tensor"),
    **rules_for(_reduction, "mean.dim sum.dim_IntList"),
    **rules_for(_softmax, "_safe_softmax _softmax _log_softmax"),
    **rules_for(_roll, "roll"),
    **rules_for(_cat, "cat"),
    **rules_for(_batch_norm, "native_batch_norm"),
    **rules_for(_layer_norm, "native_layer_norm"),
    **FLEX_RULES,
}
