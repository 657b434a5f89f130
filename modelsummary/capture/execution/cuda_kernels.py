"""Operators on shapes as CUDA runs them, where no CUDA device is present and operators run as on the CPU.

Composite operators call other operators there, which keep other tensors for the backward:

- **Attention.** The CPU has one fused kernel, without dropout and without gradients of a mask. Torch chooses among the
  kernels of CUDA in ``transformers/cuda/sdp_utils.cpp`` and prepares their arguments in ``transformers/attention.cpp``
  (both in ``aten/src/ATen/native``). This module makes the same choice for a device since the Ampere generation:
  FlashAttention-2, else the memory-efficient kernel of xFormers, else products and a softmax. cuDNN's kernels, which
  torch prefers on some devices, keep the same tensors.
- **Dropout** keeps a mask of one byte per element (``Dropout.cpp``); on the CPU, the mask has the dtype of the input.
- **RMS norms** are one kernel since torch 2.9, unless input and weight differ in dtype (``layer_norm.cpp``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from modelsummary import _torch

__all__ = ["cuda_kernels"]

aten = torch.ops.aten
_cuda: Any = torch.backends.cuda
_KEY = "AutogradCPU"  # above the kernels of shape tensors
_HALF = (torch.float16, torch.bfloat16)
_LARGEST_HEAD = 256  # of FlashAttention-2
_ALIGNED_HEAD, _ALIGNED_MASK, _ALIGNED_BYTES = 8, 16, 16
# The memory-efficient kernel takes fewer heads of keys than of queries, and both kernels one head of keys for all.
_GROUPS_IN_ALL = torch.__version__ >= "2.15"
_HAS_RMS_NORM = torch.__version__ >= "2.9"


@contextmanager
def cuda_kernels() -> Iterator[None]:
    """Return a context in which composite operators on the CPU call the operators that they call on CUDA.

    Other threads run operators as usual.
    """
    thread = get_ident()

    def in_thread(kernel: Callable[..., Tensor], original: Any) -> Callable[..., Tensor]:
        def chosen(*args: Any, **kwargs: Any) -> Tensor:
            result: Tensor = (kernel if get_ident() == thread else original.decompose)(*args, **kwargs)
            return result

        return chosen

    with _torch.scoped_library("aten", "IMPL") as library:
        for name, kernel in _KERNELS.items():
            library.impl(name, in_thread(kernel, getattr(aten, name).default), _KEY)
        yield


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    if not train or not 0 < p < 1 or not input.numel():
        plain: Tensor = aten.dropout.default.decompose(input, p, train)
        return plain
    return aten.native_dropout(input, p, train)[0]  # type: ignore[no-any-return]


def _rms_norm(input: Tensor, sizes: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Return the result of a layer norm, which keeps the same tensors, and a mean of each row."""
    if _HAS_RMS_NORM and (weight is None or weight.dtype is input.dtype):
        return aten.native_layer_norm(input, sizes, weight, None, eps or 1e-6)[0]  # type: ignore[no-any-return]
    plain: Tensor = aten.rms_norm.default.decompose(input, sizes, weight, eps)
    return plain


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    tensors = (query, key, value)
    # Rows of a mask have to be dense: T5's relative positions, whose heads are innermost, are added in eager products.
    takes_mask = attn_mask is None or (attn_mask.stride(-1) == 1 and not is_causal)
    is_fused = takes_mask and _may_fuse(*tensors, grouped=enable_gqa)
    if is_fused and attn_mask is None and _takes_flash(*tensors, is_causal=is_causal):
        size = query.shape[-1]
        scale = size**-0.5 if scale is None else scale
        padded = (F.pad(tensor, (0, -size % _ALIGNED_HEAD)) if size % _ALIGNED_HEAD else tensor for tensor in tensors)
        attend = aten._scaled_dot_product_flash_attention
        out: Tensor = attend(*padded, dropout_p, is_causal, scale=scale)[0]
        return out[..., :size] if size % _ALIGNED_HEAD else out
    bias = attn_mask
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        excluded = torch.scalar_tensor(float("-inf"), dtype=query.dtype, device=query.device)
        bias = torch.where(attn_mask, 0.0, excluded)
    if is_fused and _takes_efficient(*tensors, grouped=enable_gqa):
        bias = None if bias is None else _aligned(bias, query, key)
        keeps_sums = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        attend = aten._scaled_dot_product_efficient_attention
        return attend(*tensors, bias, keeps_sums, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
    attend = aten._scaled_dot_product_attention_math
    return attend(*tensors, bias, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]  # type: ignore[no-any-return]


def _may_fuse(query: Tensor, key: Tensor, value: Tensor, *, grouped: bool) -> bool:
    """Return True for tensors that both fused kernels take."""
    tensors = (query, key, value)
    if any(tensor.dim() != 4 or tensor.is_nested or tensor.layout is not torch.strided for tensor in tensors):
        return False
    query_heads, key_heads, value_heads = (tensor.shape[1] for tensor in tensors)
    if grouped:
        fits = key_heads == value_heads > 0 and query_heads % key_heads == 0
    else:
        fits = query_heads == key_heads == value_heads or (_GROUPS_IN_ALL and key_heads == value_heads == 1)
    same = key.shape[0] == value.shape[0] == query.shape[0] and key.dtype is value.dtype is query.dtype
    return fits and same and query.shape[-1] == key.shape[-1] and 0 not in (query.shape[-2], key.shape[-2])


def _takes_flash(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> bool:
    return (
        bool(_cuda.flash_sdp_enabled())
        and query.dtype in _HALF
        and query.shape[-1] == value.shape[-1] <= _LARGEST_HEAD
        and (not is_causal or query.shape[-2] == key.shape[-2])
        and all(tensor.stride(-1) == 1 or tensor.shape[-1] == 1 for tensor in (query, key, value))
    )


def _takes_efficient(query: Tensor, key: Tensor, value: Tensor, *, grouped: bool) -> bool:
    """Return True if products on tensor cores can load the rows of heads, 16 bytes at a time."""
    tensors = (query, key, value)
    width = _ALIGNED_BYTES // query.element_size()
    return (
        bool(_cuda.mem_efficient_sdp_enabled())
        and query.dtype in (*_HALF, torch.float32)
        and (not grouped or _GROUPS_IN_ALL)
        and all(tensor.shape[-1] > 0 and tensor.shape[-1] % width == 0 for tensor in (query, value))
        and all(tensor.stride(-1) == 1 and tensor.storage_offset() % width == 0 for tensor in tensors)
    )


def _aligned(bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return a mask with a row for each query of each head, as a view if the rows are aligned, else as a copy."""
    bias = bias.expand(*query.shape[:3], key.shape[-2])
    missing = -bias.shape[-1] % _ALIGNED_MASK
    if missing:
        return F.pad(bias, (0, missing))[..., : key.shape[-2]]
    return bias.contiguous() if any(step % _ALIGNED_MASK for step in bias.stride()[:3]) else bias


_KERNELS: dict[str, Callable[..., Tensor]] = {
    "scaled_dot_product_attention": _attend,
    "dropout": _dropout,
    "rms_norm": _rms_norm,
}
