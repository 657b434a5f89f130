"""Operators that select rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelsummary.operators.shape_rules import new_contiguous
from modelsummary.operators.table import register

__all__: list[str] = []

_GROUPED = frozenset({torch.float32, torch.bfloat16, torch.float16})
_SUM, _MAX = 0, 2  # modes of embedding bags


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
    """Return an empty ``offset2bag`` where sums add up rows in place (``is_fast_path`` in EmbeddingBag.cpp)."""
    bags = offsets.shape[0] - bool(include_last_offset)
    is_fast = (
        mode == _SUM
        and padding_idx < 0
        and weight.stride(1) == 1
        and weight.dtype in ((torch.float32,) if per_sample_weights is not None else _GROUPED)
    )
    offset_to_bag = new_contiguous((0,) if is_fast else (indices.shape[0] + 1,), offsets.dtype)[: indices.shape[0]]
    bag_sizes = new_contiguous(offsets.shape, offsets.dtype)[:bags]
    max_indices = new_contiguous((bags, weight.shape[1]) if mode == _MAX else (bags,), offsets.dtype)
    return out[0], offset_to_bag, bag_sizes, max_indices


register("aten", "_embedding_bag _embedding_bag_forward_only", overload="default", cpu_result=_cpu_embedding_bag)
register(
    "aten",
    "embedding embedding_dense_backward embedding_renorm gather scatter scatter_add scatter_reduce index index_select"
    " index_select_backward index_put _index_put_impl index_add index_copy index_fill index_reduce take put sort topk"
    " kthvalue mode median nanmedian nonzero nonzero_static unique _unique _unique2 unique_dim unique_consecutive"
    " unique_dim_consecutive _embedding_bag _embedding_bag_forward_only _embedding_bag_backward"
    " _embedding_bag_dense_backward _embedding_bag_per_sample_weights_backward max_pool2d_with_indices_backward"
    " max_pool3d_with_indices_backward masked_select masked_scatter bincount histc histogram"
    " _histogramdd_from_bin_cts _histogramdd_bin_edges _histogramdd_from_bin_tensors searchsorted bucketize isin"
    " repeat_interleave randperm one_hot _convert_indices_from_coo_to_csr _convert_indices_from_csr_to_coo _coalesce"
    " _unsafe_index _unsafe_index_put _unsafe_masked_index _unsafe_masked_index_put_accumulate segment_reduce"
    " _segment_reduce_backward",
    op_class="index",
)
register(
    "quantized",
    "embedding_4bit embedding_byte embedding_bag_2bit_rowwise_offsets embedding_bag_4bit"
    " embedding_bag_4bit_rowwise_offsets embedding_bag_byte embedding_bag_byte_rowwise_offsets",
    op_class="index",
)
register("torchvision", "nms qnms", op_class="index")
register("aten", "topk argmax max sort", chooses=True)
register("aten", "embedding", gathers_from="weight")
register("aten", "gather index index_select take _unsafe_index", gathers_from="self")
register("aten", "index_copy index_put _index_put_impl scatter_", writes_rows=True)
# The negative log-likelihood reads one score per target in the forward, and none in the backward, for which only their
# shape matters (aten/src/ATen/native/LossNLL.cpp).
register("aten", "nll_loss_forward nll_loss2d_forward", scores_per_target=1)
register("aten", "nll_loss_backward nll_loss2d_backward", scores_per_target=0)
