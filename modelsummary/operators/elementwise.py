"""Operators with one result per element, and operators that move elements."""

from __future__ import annotations

from itertools import zip_longest
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from modelsummary.operators.shape_rules import Shape, are_plain_floats, like, new_contiguous
from modelsummary.operators.table import register

__all__: list[str] = []


def _same(x: Tensor, *options: Any, **named: Any) -> Tensor | None:
    """Return the result of an operator with one result per element, of the dtype of ``x``."""
    return like(x) if all(map(_is_usual, (*options, *named.values()))) else None


def _is_usual(option: Any) -> bool:
    if isinstance(option, str):
        return option in ("none", "tanh")  # approximations of gelu
    return option is None or isinstance(option, Real)


def _broadcast(a: Tensor, b: Tensor) -> torch.Size | None:
    """Return the broadcast shape of plain tensors; None if the strides of the result are complicated."""
    if a.shape == b.shape:
        return a.shape
    pairs = list(zip_longest(reversed(a.shape), reversed(b.shape), fillvalue=1))[::-1]
    if any(size != other and 1 not in (size, other) for size, other in pairs):
        return None
    shape = torch.Size(map(max, pairs))
    return None if 1 in shape[1:] else shape


def _arithmetic(a: Any, b: Any, *, alpha: Any = 1) -> Tensor | None:
    if not isinstance(a, Tensor) or not isinstance(alpha, Real):
        return None
    if isinstance(b, Real):
        return like(a)
    if not isinstance(b, Tensor) or a.dtype is not b.dtype:
        return None
    if a.layout is b.layout is torch.strided and a.shape == b.shape and a.stride() == b.stride():
        return like(a)
    if not are_plain_floats(a, b):
        return None
    shape = _broadcast(a, b)
    return None if shape is None else new_contiguous(shape, a.dtype)


def _roll(x: Tensor, shifts: Shape, dims: Shape = ()) -> Tensor | None:
    if not len(shifts) == len(dims) > 0 or not all(-x.dim() <= dim < x.dim() for dim in dims):
        return None
    is_valid = len({dim % x.dim() for dim in dims}) == len(dims) and are_plain_floats(x)
    return new_contiguous(x.shape, x.dtype) if is_valid else None


def _in_storage_of_elements(loss: Tensor, x: Tensor, target: Tensor, *_: object) -> Tensor:
    """Return a loss whose kernel writes a value per element, and then resizes the result, which keeps its storage.

    See ``mse_loss`` and ``smooth_l1_loss`` in aten/src/ATen/native/BinaryOps.cpp, the others in Loss.cpp next to it.
    """
    elements = torch.broadcast_shapes(x.shape, target.shape).numel()
    return loss.new_empty(elements).resize_(()) if not loss.dim() and elements else loss


register(
    "aten",
    "relu gelu silu sigmoid tanh hardswish hardsigmoid hardtanh leaky_relu elu mish softplus exp log neg abs sqrt rsqrt"
    " reciprocal sin cos erf clamp_min",
    overload="default",
    shape=_same,
)
register(
    "aten",
    "mse_loss smooth_l1_loss soft_margin_loss binary_cross_entropy",
    overload="default",
    result=_in_storage_of_elements,
)
register("aten", "pow", overload="Tensor_Scalar", shape=_same)
register("aten", "add sub mul div", overload="Tensor", shape=_arithmetic)
register("aten", "add sub mul div", overload="Scalar", shape=_arithmetic)
register("aten", "add", overload="Tensor", accumulates=True)
register("aten", "cat", joins=True)
register("aten", "clone", copies=True)
register("aten", "_to_copy", casts=True)
register("aten", "roll", overload="default", shape=_roll)
register(
    "aten",
    "clone _to_copy copy copy_sparse_to_sparse_ cat _cat stack _stack contiguous roll flip repeat zeros zeros_like"
    " new_zeros _new_zeros_with_same_feature_meta ones ones_like new_ones full full_like new_full fill zero arange"
    " range linspace logspace scalar_tensor eye slice_backward select_backward diagonal_backward unfold_backward"
    " as_strided_scatter diagonal_scatter slice_scatter select_scatter slice_inverse pixel_shuffle pixel_unshuffle"
    " tril triu tril_indices triu_indices block_diag diag_embed complex polar rot90 lift im2col col2im from_file"
    " _chunk_cat split_with_sizes_copy _pin_memory sparse_mask _sparse_mask_projection _spdiags _lazy_clone"
    " _conj_physical _mkldnn_reshape _mkldnn_transpose _nested_compute_contiguous_strides_offsets"
    " _jagged_to_padded_dense_forward _padded_dense_to_jagged_forward",
    op_class="copy",
)
register("quantized", "cat cat_relu", op_class="copy")
register("fsdp", "all_gather_copy_in all_gather_copy_out chunk_cat split_with_sizes_copy copy_", op_class="copy")
register(
    "aten",
    "copy_ fill_ zero_ normal_ uniform_ bernoulli_ random_ exponential_ trunc_normal_",
    overwrites=True,
)
register("fsdp", "copy_", overwrites=True)

register("aten", "rand", mean=0.5)
