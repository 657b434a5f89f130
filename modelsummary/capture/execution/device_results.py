"""Results whose layout or dtype depends on the device, where meta kernels return a different one.

Each function takes the results on meta and the arguments of the operator, and returns the results of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from modelsummary import _torch
from modelsummary.capture.execution.shape_rules import new_contiguous, rules_for

__all__ = ["CPU_RESULTS", "DEVICE_RESULTS"]

_GROUPED = frozenset({torch.float32, torch.bfloat16, torch.float16})
_SUM, _MAX = 0, 2  # modes of embedding bags
Shape = Sequence[int]


def _cpu_batch_norm(out: Any, x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *_: Any) -> Any:
    """Return a result that is contiguous, or channels-last if ``x`` is; in evaluation the CPU keeps no statistics."""
    shape = out[1].shape if training else (0,)
    dtype = _dtype_of_statistics(x, weight, bias, mean, var)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(x.dim(), torch.contiguous_format)
    chosen = last if x.is_contiguous(memory_format=last) else torch.contiguous_format
    return _in_format(out[0], chosen), new_contiguous(shape, dtype), new_contiguous(shape, dtype)


def _cpu_layer_norm(out: Any, x: Tensor, _: Shape, weight: Any, bias: Any, *__: Any) -> Any:
    dtype = _dtype_of_statistics(x, weight, bias)
    return out[0], new_contiguous(out[1].shape, dtype), new_contiguous(out[2].shape, dtype)


def _cpu_group_norm(out: Any, x: Tensor, weight: Any, bias: Any, *_: Any) -> Any:
    dtype = _dtype_of_statistics(x, weight, bias)
    return out[0], new_contiguous(out[1].shape, dtype), new_contiguous(out[2].shape, dtype)


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
    number_of_bag = new_contiguous((0,) if is_fast else (indices.shape[0] + 1,), offsets.dtype)[: indices.shape[0]]
    size_of_bag = new_contiguous(offsets.shape, offsets.dtype)[:bags]
    chosen = new_contiguous((bags, weight.shape[1]) if mode == _MAX else (bags,), offsets.dtype)
    return out[0], number_of_bag, size_of_bag, chosen


def _laid_out(out: Tensor, x: Tensor, weight: Tensor, *others: Any) -> Tensor:
    """Return the result of a convolution in the memory format that the device's library chooses."""
    return _in_format(out, _format_of_convolution(x, weight, *others))


def _gradients_laid_out(out: Any, _: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *others: Any) -> Any:
    chosen = _format_of_convolution(x, weight, None, *others[:6], bias_sizes)
    return *(each if each is None else _in_format(each, chosen) for each in out[:2]), out[2]


def _format_of_convolution(x: Tensor, weight: Tensor, *others: Any) -> torch.memory_format | None:
    if weight.dim() == 3:  # torch adds a dimension before it calls the library
        return None
    backend = _torch.select_conv_backend(x, weight, *others)
    chosen: torch.memory_format = _torch.conv_memory_format(x, weight, backend)
    return chosen


def _in_format(tensor: Tensor, chosen: torch.memory_format | None) -> Tensor:
    return tensor if chosen is None else tensor.contiguous(memory_format=chosen)


def _dtype_of_statistics(x: Tensor, *parameters: Tensor | None) -> torch.dtype:
    """Return the dtype of the parameters, which may be float32 for a half-precision input.

    See ``param_scalar_type`` in ATen/native/cpu.
    """
    return next((each.dtype for each in parameters if each is not None), x.dtype)


# Meta kernels follow CUDA's; these are the results of CPU kernels.
CPU_RESULTS: dict[Any, Callable[..., Any]] = {
    **rules_for(_cpu_batch_norm, "native_batch_norm"),
    **rules_for(_cpu_layer_norm, "native_layer_norm"),
    **rules_for(_cpu_group_norm, "native_group_norm"),
    **rules_for(_cpu_embedding_bag, "_embedding_bag _embedding_bag_forward_only"),
}

# Results for any device; the arguments are on that device.
DEVICE_RESULTS: dict[Any, Callable[..., Any]] = {
    **rules_for(_laid_out, "convolution"),
    **rules_for(_gradients_laid_out, "convolution_backward"),
}
