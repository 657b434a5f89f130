"""Direct shape rules for operators whose meta kernels take a tenth of a millisecond to a whole one a call.

Torch writes these kernels in Python, many as decompositions into some twenty operators each. A rule gives the very
shapes, strides and dtypes that the kernel gives, or None where it is not sure; then the kernel runs, and raises what
it has to raise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from modelsummary import _torch
from modelsummary.capture.execution.flex_attention import FLEX_RULES

__all__ = ["CPU_RESULTS", "DEVICE_RESULTS", "SHAPE_RULES"]

aten = torch.ops.aten
_META = torch.device("meta")
_FLOATS = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
_GROUPED = frozenset({torch.float32, torch.bfloat16, torch.float16})
_ROW_BYTES = 16
_SUM, _MAX = 0, 2  # modes of embedding bags
_STATISTICS_DTYPES = frozenset({torch.float32, torch.float64})  # half precision has statistics of another dtype
Shape = Sequence[int]


@lru_cache(maxsize=4096)
def _contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def _is_plain(x: Any) -> bool:
    """A tensor that is contiguous, also in the strides of dimensions of size 1, and not empty."""
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        return False
    shape = x.shape
    return 0 not in shape and x.stride() == _contiguous_strides(shape)


def _are_plain_floats(x: Tensor, *others: Tensor | None) -> bool:
    """All plain and of one floating point dtype; the others may be None."""
    dtype = x.dtype
    return (
        dtype in _FLOATS
        and _is_plain(x)
        and all(other is None or (_is_plain(other) and other.dtype is dtype) for other in others)
    )


def _new(shape: Shape, dtype: torch.dtype) -> Tensor:
    shape = torch.Size(shape)
    return torch.empty_strided(shape, _contiguous_strides(shape), dtype=dtype, device=_META)


# ---------------------------------------------------------------------------------------- element by element


def _same(x: Tensor, *options: Any, **named: Any) -> Tensor | None:
    """One result an element, of the dtype of ``x``."""
    if not all(map(_is_usual, (*options, *named.values()))):
        return None
    return _new(x.shape, x.dtype) if _are_plain_floats(x) else None


def _is_usual(option: Any) -> bool:
    if isinstance(option, str):
        return option in ("none", "tanh")  # how gelu is approximated
    return option is None or isinstance(option, Real)


def _clamp(x: Tensor, *bounds: Any) -> Tensor | None:
    return None if all(bound is None for bound in bounds) else _same(x, *bounds)  # the kernel wants one


def _broadcast(a: Tensor, b: Tensor) -> torch.Size | None:
    """The shape of both together where one of them has it already: strides of other results are intricate."""
    if a.shape == b.shape:
        return a.shape
    large, small = (a.shape, b.shape) if a.dim() >= b.dim() and a.numel() >= b.numel() else (b.shape, a.shape)
    kept = large[len(large) - len(small) :]
    fits = len(small) <= len(large) and all(own in (1, size) for own, size in zip(small, kept, strict=True))
    return large if fits and 1 not in large else None


def _two(a: Any, b: Any, dtype: torch.dtype | None = None) -> Tensor | None:
    if not isinstance(a, Tensor):
        return None
    if isinstance(b, Real):
        return _new(a.shape, dtype or a.dtype) if _are_plain_floats(a) else None
    if not isinstance(b, Tensor) or not _are_plain_floats(a, b):
        return None
    shape = _broadcast(a, b)
    return None if shape is None else _new(shape, dtype or a.dtype)


def _arithmetic(a: Any, b: Any, *, alpha: Any = 1) -> Tensor | None:
    return _two(a, b) if isinstance(alpha, Real) else None


def _comparison(a: Any, b: Any) -> Tensor | None:
    return _two(a, b, torch.bool)


def _masked_fill(x: Tensor, mask: Tensor, value: Any) -> Tensor | None:
    if not isinstance(value, Real) or mask.dtype is not torch.bool or not _is_plain(mask) or not _are_plain_floats(x):
        return None
    return _new(x.shape, x.dtype) if _broadcast(x, mask) == x.shape else None


def _in_place(rule: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """The rule of an operator that writes the result of ``rule`` into its first argument."""

    def write(x: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        out = rule(x, *args, **kwargs)
        return x if out is not None and out.shape == x.shape else None

    return write


# -------------------------------------------------------------------------------- products and convolutions


def _mm(a: Tensor, b: Tensor) -> Tensor | None:
    """``aten.mm`` and ``aten.bmm``; the factors may be transposed."""
    if a.dtype is not b.dtype or a.dtype not in _FLOATS or 0 in a.shape or 0 in b.shape:
        return None
    if not a.dim() == b.dim() >= 2 or a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        return None
    return _new((*a.shape[:-1], b.shape[-1]), a.dtype)


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor | None:
    """A bias of one row."""
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
    return _new((x.shape[0], weight.shape[0], *outer), x.dtype) if min(outer) > 0 else None


def _grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor | None:
    """Products of groups, also in float32 and float16, which the kernel on meta refuses and those of devices take.

    ``offs`` are the ends of the groups: in the rows of ``a`` (2-d by 3-d), in the columns of ``b`` (3-d by 2-d) or in
    what is summed (2-d by 2-d).
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
    """Rows or columns lie in one piece each, and begin at multiples of 16 bytes."""
    (rows, columns), (row, column) = x.shape[-2:], x.stride()[-2:]
    if row == 1 and column >= max(1, rows):
        return column * x.element_size() % _ROW_BYTES == 0
    return column == 1 and row >= max(1, columns) and row * x.element_size() % _ROW_BYTES == 0


def _embedding(weight: Tensor, indices: Tensor, *_: Any) -> Tensor | None:
    if weight.dim() != 2 or not _are_plain_floats(weight) or not _is_plain(indices):
        return None
    return _new((*indices.shape, weight.shape[1]), weight.dtype) if indices.dtype is torch.int64 else None


# ------------------------------------------------------------------------------------- along dimensions


def _dims_of(x: Tensor, dims: Any) -> list[int] | None:
    """Dimensions counted from the first; None where one is missing or named twice."""
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
    return _new(kept, x.dtype)


def _softmax(x: Tensor, dim: int, half_to_float: Any = False) -> Tensor | None:
    if half_to_float not in (False, None) or _dims_of(x, [dim]) is None:
        return None
    return _same(x)


def _roll(x: Tensor, shifts: Shape, dims: Shape = ()) -> Tensor | None:
    return _same(x) if _dims_of(x, dims) is not None and len(shifts) == len(dims) else None


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    first = tensors[0]
    if _dims_of(first, [dim]) is None or not _are_plain_floats(first, *tensors[1:]):
        return None
    shape = list(first.shape)
    shape[dim] = -1
    for tensor in tensors[1:]:
        if tensor.dim() != len(shape):
            return None
        if any(size not in (-1, own) for size, own in zip(shape, tensor.shape, strict=True)):
            return None
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return _new(shape, first.dtype)


# ------------------------------------------------------------------------------------------ normalisations


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """``aten.native_batch_norm``. One value a channel has no variance: the kernel refuses it."""
    if x.dtype not in _STATISTICS_DTYPES or not _are_plain_floats(x, weight, bias, mean, var):
        return None
    if x.dim() < 2 or x.numel() == x.shape[1]:
        return None
    return _new(x.shape, x.dtype), _new((x.shape[1],), x.dtype), _new((x.shape[1],), x.dtype)


def _layer_norm(
    x: Tensor, normalized_shape: Shape, weight: Tensor | None, bias: Tensor | None, *_: object
) -> tuple[Tensor, Tensor, Tensor] | None:
    """``aten.native_layer_norm``: mean and reciprocal deviation of each normalised part."""
    kept = x.dim() - len(normalized_shape)
    if x.dtype not in _STATISTICS_DTYPES or not _are_plain_floats(x, weight, bias):
        return None
    if kept <= 0 or list(x.shape[kept:]) != list(normalized_shape):
        return None
    statistics = (*x.shape[:kept], *[1] * len(normalized_shape))
    return _new(x.shape, x.dtype), _new(statistics, x.dtype), _new(statistics, x.dtype)


def _cpu_batch_norm(out: Any, x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *_: Any) -> Any:
    """In evaluation the CPU keeps no statistics; results are contiguous, or have the channels last if ``x`` has."""
    shape = out[1].shape if training else (0,)
    dtype = _dtype_of_statistics(x, weight, bias, mean, var)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(x.dim(), torch.contiguous_format)
    chosen = last if x.is_contiguous(memory_format=last) else torch.contiguous_format
    return _in_format(out[0], chosen), _new(shape, dtype), _new(shape, dtype)


def _cpu_layer_norm(out: Any, x: Tensor, _: Shape, weight: Any, bias: Any, *__: Any) -> Any:
    dtype = _dtype_of_statistics(x, weight, bias)
    return out[0], _new(out[1].shape, dtype), _new(out[2].shape, dtype)


def _cpu_group_norm(out: Any, x: Tensor, weight: Any, bias: Any, *_: Any) -> Any:
    dtype = _dtype_of_statistics(x, weight, bias)
    return out[0], _new(out[1].shape, dtype), _new(out[2].shape, dtype)


def _cpu_embedding_bag(
    out: Any,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    _: Any = False,
    mode: int = 0,
    __: Any = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    """Sums keep no numbers of bags where they add up rows in place (``is_fast_path`` in EmbeddingBag.cpp)."""
    bags = offsets.shape[0] - bool(include_last_offset)
    is_fast = (
        mode == _SUM
        and padding_idx < 0
        and weight.stride(1) == 1
        and weight.dtype in ((torch.float32,) if per_sample_weights is not None else _GROUPED)
    )
    number_of_bag = _new((0,) if is_fast else (indices.shape[0] + 1,), offsets.dtype)[: indices.shape[0]]
    size_of_bag = _new(offsets.shape, offsets.dtype)[:bags]
    chosen = _new((bags, weight.shape[1]) if mode == _MAX else (bags,), offsets.dtype)
    return out[0], number_of_bag, size_of_bag, chosen


def _laid_out(out: Tensor, x: Tensor, weight: Tensor, *others: Any) -> Tensor:
    """The result of a convolution in the memory format that the device's library chooses."""
    return _in_format(out, _format_of_convolution(x, weight, *others))


def _gradients_laid_out(out: Any, _: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *others: Any) -> Any:
    chosen = _format_of_convolution(x, weight, None, *others[:6], bias_sizes)
    return *(each if each is None else _in_format(each, chosen) for each in out[:2]), out[2]


def _format_of_convolution(x: Tensor, weight: Tensor, *others: Any) -> torch.memory_format | None:
    if weight.dim() == 3:  # a dimension is added on the way to the library
        return None
    backend = _torch.select_conv_backend(x, weight, *others)
    chosen: torch.memory_format = _torch.conv_memory_format(x, weight, backend)
    return chosen


def _in_format(tensor: Tensor, chosen: torch.memory_format | None) -> Tensor:
    return tensor if chosen is None else tensor.contiguous(memory_format=chosen)


def _dtype_of_statistics(x: Tensor, *parameters: Tensor | None) -> torch.dtype:
    """Half precision may come with parameters in float32; see ``param_scalar_type`` in ATen/native/cpu."""
    return next((each.dtype for each in parameters if each is not None), x.dtype)


def _rules(rule: Callable[..., Any], names: str) -> dict[Any, Callable[..., Any]]:
    """``rule`` for operators of these names, with ``.`` before an overload; those that this torch has."""
    found = {}
    for name in names.split():
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(aten, packet, None), overload or "default", None)
        if operator is not None:
            found[operator] = rule
    return found


SHAPE_RULES: dict[Any, Callable[..., Any]] = {
    **_rules(_same, "relu gelu silu sigmoid tanh hardswish hardsigmoid hardtanh leaky_relu elu mish softplus"),
    **_rules(_same, "exp log neg abs sqrt rsqrt reciprocal sin cos erf clamp_min pow.Tensor_Scalar"),
    **_rules(_clamp, "clamp"),
    **_rules(_arithmetic, "add.Tensor sub.Tensor mul.Tensor div.Tensor"),
    **_rules(_two, "maximum minimum"),
    **_rules(
        _in_place(_same), "relu_ gelu_ silu_ sigmoid_ tanh_ hardswish_ hardsigmoid_ hardtanh_ leaky_relu_ elu_ mish_"
    ),
    **_rules(_in_place(_arithmetic), "add_.Tensor sub_.Tensor mul_.Tensor div_.Tensor"),
    **_rules(_comparison, "eq.Scalar ne.Scalar lt.Scalar gt.Scalar le.Scalar ge.Scalar"),
    **_rules(_comparison, "eq.Tensor ne.Tensor lt.Tensor gt.Tensor le.Tensor ge.Tensor"),
    **_rules(_masked_fill, "masked_fill.Scalar"),
    **_rules(_mm, "mm bmm"),
    **_rules(_addmm, "addmm"),
    **_rules(_grouped_mm, "_grouped_mm"),
    **_rules(_convolution, "convolution"),
    **_rules(_embedding, "embedding"),
    **_rules(_reduction, "mean.dim sum.dim_IntList"),
    **_rules(_softmax, "_safe_softmax _softmax _log_softmax"),
    **_rules(_roll, "roll"),
    **_rules(_cat, "cat"),
    **_rules(_batch_norm, "native_batch_norm"),
    **_rules(_layer_norm, "native_layer_norm"),
    **FLEX_RULES,
}

# Where the CPU's kernels give other results than those on meta, which follow CUDA's: what they give, from the results
# on meta and the arguments.
CPU_RESULTS: dict[Any, Callable[..., Any]] = {
    **_rules(_cpu_batch_norm, "native_batch_norm"),
    **_rules(_cpu_layer_norm, "native_layer_norm"),
    **_rules(_cpu_group_norm, "native_group_norm"),
    **_rules(_cpu_embedding_bag, "_embedding_bag _embedding_bag_forward_only"),
}

# The same for every device: from the results on meta and the arguments, which are on the device.
DEVICE_RESULTS: dict[Any, Callable[..., Any]] = {
    **_rules(_laid_out, "convolution"),
    **_rules(_gradients_laid_out, "convolution_backward"),
}
