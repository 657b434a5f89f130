"""Normalisations; the running statistics of batches are written in training without a mark in the schemas."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelsummary.operators.operator_calls import OperatorCall
from modelsummary.operators.operator_work import Work, work
from modelsummary.operators.shape_rules import Shape, are_plain_floats, dtype_of_statistics, in_format, new_contiguous
from modelsummary.operators.table import Arguments, register

__all__: list[str] = []

_STATISTICS_DTYPES = frozenset({torch.float32, torch.float64})  # in half precision, statistics have another dtype


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the results of ``aten.native_batch_norm``; None for one value per channel, which the kernel refuses."""
    if x.dtype not in _STATISTICS_DTYPES or not are_plain_floats(x, weight, bias, mean, var):
        return None
    if x.dim() < 2 or x.numel() == x.shape[1]:
        return None
    statistic = (x.shape[1],)
    return new_contiguous(x.shape, x.dtype), new_contiguous(statistic, x.dtype), new_contiguous(statistic, x.dtype)


def _layer_norm(
    x: Tensor, normalized_shape: Shape, weight: Tensor | None, bias: Tensor | None, *_: object
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the result, means and reciprocal deviations of ``aten.native_layer_norm``, one per normalised part."""
    n_outer = x.dim() - len(normalized_shape)
    if x.dtype not in _STATISTICS_DTYPES or not are_plain_floats(x, weight, bias):
        return None
    if n_outer <= 0 or list(x.shape[n_outer:]) != list(normalized_shape):
        return None
    statistics = (*x.shape[:n_outer], *[1] * len(normalized_shape))
    return new_contiguous(x.shape, x.dtype), new_contiguous(statistics, x.dtype), new_contiguous(statistics, x.dtype)


def _cpu_batch_norm(out: Any, x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *_: Any) -> Any:
    """Return a result that is contiguous, or channels-last if ``x`` is; in evaluation the CPU keeps no statistics."""
    shape = out[1].shape if training else (0,)
    dtype = dtype_of_statistics(x, weight, bias, mean, var)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    channels_last = formats.get(x.dim(), torch.contiguous_format)
    memory_format = channels_last if x.is_contiguous(memory_format=channels_last) else torch.contiguous_format
    return in_format(out[0], memory_format), new_contiguous(shape, dtype), new_contiguous(shape, dtype)


def _cpu_layer_norm(out: Any, x: Tensor, _: Shape, weight: Any, bias: Any, *__: Any) -> Any:
    dtype = dtype_of_statistics(x, weight, bias)
    return out[0], new_contiguous(out[1].shape, dtype), new_contiguous(out[2].shape, dtype)


def _cpu_group_norm(out: Any, x: Tensor, weight: Any, bias: Any, *_: Any) -> Any:
    dtype = dtype_of_statistics(x, weight, bias)
    return out[0], new_contiguous(out[1].shape, dtype), new_contiguous(out[2].shape, dtype)


def _softmax_backward(call: OperatorCall, bound: Arguments) -> list[Work]:
    """Return the product of gradient and result, and the kernel that subtracts its sums (aten/.../cuda/SoftMax.cu)."""
    grad, result = bound["grad_output"], call.outputs[0]
    rows = [grad.numel // max((grad.shape or (1,))[-1], 1), (grad.shape or (1,))[-1]]
    return [
        work(call, "elementwise", [grad.numel], "product", 0, 3 * grad.nbytes),
        work(call, "softmax", rows, nbytes=2 * grad.nbytes + result.nbytes),
    ]


register("aten", "_softmax_backward_data", kernels=_softmax_backward)
register(
    "aten",
    "native_batch_norm cudnn_batch_norm miopen_batch_norm batch_norm_gather_stats batch_norm_gather_stats_with_counts"
    " batch_norm_update_stats",
    writes_in_training=("running_mean", "running_var"),
)
register("aten", "native_batch_norm native_layer_norm native_group_norm", dtypes="norm")
register("aten", "native_batch_norm", overload="default", shape=_batch_norm, cpu_result=_cpu_batch_norm)
register("aten", "native_layer_norm", overload="default", shape=_layer_norm, cpu_result=_cpu_layer_norm)
register("aten", "native_group_norm", overload="default", cpu_result=_cpu_group_norm)
