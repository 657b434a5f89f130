"""Fused attention: the scores (query x key) and their product with the values, for each head of the query.

A causal or another mask does not lower the count; what a block mask of ``flex_attention`` skips is a figure of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, get_args

import torch
from torch import Tensor

from modelsummary import _torch
from modelsummary._torch import disable_current_modes
from modelsummary.operators.operator_calls import OperatorCall
from modelsummary.operators.operator_rules import OpRule
from modelsummary.operators.operator_work import Work, work
from modelsummary.operators.shape_rules import META
from modelsummary.operators.table import Arguments, Count, register

__all__ = ["BLOCK_MASKED", "scores_again", "skipped_macs"]


def _attention(call: Arguments, *, scores: int = 1, values: int = 1) -> Count:
    """Count products of all queries with all keys over the head of a key, and over the head of a value."""
    query, key, value = (call[name].shape for name in ("query", "key", "value"))
    macs_per_pair = scores * query[-1] + values * value[-1]
    return prod(query[:-1]) * key[-2] * macs_per_pair


# two products per product of the forward, and the scores again: they were not kept
_backward = partial(_attention, scores=3, values=2)


def scores_again(rule: OpRule, call: Arguments) -> int:
    """Return the multiply-adds of scores that a fused backward computes again; 0 for other operators.

    They are work of the device, and not of the model.

    Args:
        call: its arguments by name: tensors, or their specs.
    """
    if not rule.facts.recomputes_scores:
        return 0
    return int(prod(call["query"].shape) * call["key"].shape[-2])


def _kernels(call: OperatorCall, bound: Arguments, *, length_dim: int = -2, is_efficient: bool = False) -> list[Work]:
    """Return the work of fused attention; blocks that a block mask excludes are not computed.

    A backward adds up the gradients of queries in float32: a second kernel converts these sums, which were filled with
    zeros, and are read and written by each block of keys, or at least once.
    """
    query, key, value = (bound[name] for name in ("query", "key", "value"))
    computed = call.cost.macs - (call.cost.skipped_macs or 0)
    is_causal = bool(bound.get("is_causal") or bound.get("custom_mask_type"))
    queries, keys = query.shape[length_dim], key.shape[length_dim]
    outer = query.numel // max(queries * query.shape[-1], 1)
    sizes = (outer, queries, keys, max(query.shape[-1], value.shape[-1]))
    facts: dict[str, Any] = {
        "is_causal": is_causal,
        "is_efficient": is_efficient,
        "is_masked": bound.get("attn_bias") is not None,
        "drops": bool(bound.get("dropout_p")),
    }
    attention = work(call, "attention", sizes, flops=2 * computed, **facts)
    if not attention.is_backward:
        return [attention]
    sums = torch.float32.itemsize * query.numel
    return [attention, work(call, "copy", [query.numel], "query sums", 0, 3 * sums + query.nbytes)]


for _kind in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"):
    _runs = partial(_kernels, is_efficient=_kind == "efficient_attention")
    register("aten", f"_scaled_dot_product_{_kind}", macs=_attention, kernels=_runs)
    register("aten", f"_scaled_dot_product_{_kind}_backward", macs=_backward, kernels=_runs, recomputes_scores=True)
_overrideable = "_scaled_dot_product_fused_attention_overrideable"
register("aten", _overrideable, macs=_attention, kernels=_kernels)
register("aten", f"{_overrideable}_backward", macs=_backward, kernels=_kernels, recomputes_scores=True)
# (batch, length, heads, size); torch has the formulas
for _kind in ("flash", "efficient", "cudnn"):
    _runs = partial(_kernels, length_dim=-3, is_efficient=_kind == "efficient")
    register("aten", f"_{_kind}_attention_forward _{_kind}_attention_forward_no_dropout_inplace", kernels=_runs)
    register("aten", f"_{_kind}_attention_backward", kernels=_runs)

_RESULTS: Any = type(_torch.flex_attention).__call__.__annotations__.get("return")
_HAS_MAX_SCORES = len(get_args(_RESULTS)) == 3  # since torch 2.10


def _flex_shape(query: Tensor, _key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    """Return the output, logsumexp and, in newer versions, the maximum of the scores."""
    out = _laid_out_like(query, (*query.shape[:3], value.shape[-1]))
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    statistics = (torch.empty(query.shape[:3], dtype=dtype, device=META) for _ in range(1 + _HAS_MAX_SCORES))
    return out, *statistics


def _flex_backward_shape(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Any, ...] | None:
    """Return the gradients of query, key and value; None if tensors that ``score_mod`` captures may have gradients."""
    score_mod_buffers = others[9] if len(others) > 9 else ()
    if score_mod_buffers or query.shape[0] != key.shape[0]:
        return None
    return *(_laid_out_like(tensor, tensor.shape) for tensor in (query, key, value)), ()


def _laid_out_like(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a dense tensor with the dimension order of ``tensor``, except that the last is innermost."""
    order = sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), -dim))
    last = tensor.dim() - 1
    strides, step = [0] * tensor.dim(), 1
    for dim in (last, *(dim for dim in order if dim != last)):
        strides[dim] = step
        step *= shape[dim]
    return torch.empty_strided(tuple(shape), strides, dtype=tensor.dtype, device=META)


_FORWARD = ("query", "key", "value", "score_mod", "block_mask")
_GRADIENTS = ("out", "logsumexp", "grad_out", "grad_logsumexp", "fw_graph", "joint_graph", "block_mask")
register("", "flex_attention", macs=_attention, kernels=_kernels, shape=_flex_shape, arguments=_FORWARD)
register(
    "",
    "flex_attention_backward",
    macs=_backward,
    kernels=_kernels,
    recomputes_scores=True,
    shape=_flex_backward_shape,
    arguments=(*_FORWARD[:3], *_GRADIENTS),
)

# written as two products, with a mask and a softmax between them
for _does, _names in {
    "softmax": "_softmax _safe_softmax",
    "sum": "add sub",
    "fill": "masked_fill",
    "where": "where",
}.items():
    register("aten", _names, on_scores=_does)

# ------------------------------------------------------------------------------ whole blocks and layers


def _multi_head(width: int, batch: int, length: int, source: int) -> Count:
    """Count the four projections (query, key, value, output), the scores, and their product with the values."""
    projections = 2 * batch * length * width * width + 2 * batch * source * width * width
    return projections + 2 * batch * length * source * width


def _multi_head_attention(call: Arguments) -> Count:
    batch, length, width = call["query"].shape
    return _multi_head(width, batch, length, call["key"].shape[1])


def _encoder_layer(call: Arguments) -> Count:
    """Count self-attention and the two products of the feed-forward network."""
    batch, length, width = call["src"].shape
    rows, columns = call["ffn_weight_1"].shape
    return _multi_head(width, batch, length, length) + 2 * batch * length * rows * columns


register("aten", "_native_multi_head_attention", macs=_multi_head_attention)
register("aten", "_transformer_encoder_layer_fwd", macs=_encoder_layer)

# ---------------------------------------------------------------------------------------- block masks

# Number of products over the query's head size, and over the value's.
BLOCK_MASKED = {"flex_attention": (1, 1), "flex_attention_backward": (3, 2)}
_NO_BLOCKS = 2**30  # the block size without a mask: one block covers everything


def skipped_macs(rule: OpRule, args: Sequence[Any], values: Callable[[Tensor], Tensor | None]) -> int | None:
    """Return how many of the dense multiply-adds the mask skips; None if its values are not known.

    Args:
        rule: properties of one of the operators ``BLOCK_MASKED``.
        args: query (B, H, L, E), key (B, G, S, E), value (B, G, S, V), ..., the block mask as a tuple.
        values: returns the values of a tensor of the mask, or None if they are not known.
    """
    query_products, value_products = BLOCK_MASKED[rule.name]
    call = rule.signature.bind(args, {})
    query, key, value = (call[name].shape for name in ("query", "key", "value"))
    mask: Any = call["block_mask"]
    *parts, block_rows, block_columns, _ = mask
    if block_rows >= _NO_BLOCKS:
        return 0
    first = next(index for index, part in enumerate(parts) if isinstance(part, Tensor))
    computed = 0
    # First the blocks that the mask cuts through, then full blocks: their number per row of blocks, and their columns.
    for counts, columns in (parts[first : first + 2], parts[first + 2 : first + 4]):
        if counts is None:
            continue
        count_values, column_values = values(counts), values(columns)
        if count_values is None or column_values is None or count_values.is_meta or column_values.is_meta:
            return None
        with disable_current_modes(), _torch.DisableTorchFunction():  # these are not operators of the model
            elements = _elements(count_values, column_values, query[-2], key[-2], block_rows, block_columns)
        computed += elements * (query[0] * query[1] // (counts.shape[0] * counts.shape[1]))
    dense: int = query[0] * query[1] * query[-2] * key[-2]
    macs_per_score: int = query_products * query[-1] + value_products * value[-1]
    return (dense - computed) * macs_per_score


def _elements(counts: Tensor, columns: Tensor, length: int, keys: int, block_rows: int, block_columns: int) -> int:
    """Return the number of scores in these blocks, without what the last ones have beyond the sequence."""
    is_listed = torch.arange(columns.shape[-1], device=columns.device) < counts[..., None]
    widths = (keys - columns.long() * block_columns).clamp(0, block_columns) * is_listed
    begins = torch.arange(counts.shape[-1], device=counts.device) * block_rows
    heights = (length - begins).clamp(0, block_rows)
    return int((widths.sum(-1) * heights).sum())
