"""Multiply-adds of operators that compute a whole attention block, or a whole encoder layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelsummary.costs.macs import existing, register_op_cost

__all__: list[str] = []

aten = torch.ops.aten


@register_op_cost(existing(aten, "_native_multi_head_attention"))
def _multi_head_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    """Count the four projections (query, key, value, output), the scores, and their product with the values."""
    width, (batch, length, _), source = query.shape[-1], query.shape, key.shape[1]
    projections = 2 * batch * length * width * width + 2 * batch * source * width * width
    return projections + 2 * batch * length * source * width


@register_op_cost(existing(aten, "_transformer_encoder_layer_fwd"))
def _encoder_layer(src: Tensor, *args: Any, **kwargs: Any) -> int:
    """Count self-attention and the two products of the feed-forward network (first weight: the 14th argument)."""
    weight = args[13] if len(args) > 13 else kwargs["ffn_weight_1"]
    network: int = 2 * src.shape[0] * src.shape[1] * weight.shape[0] * weight.shape[1]
    return _multi_head_attention(src, src, src) + network
