"""Convolutions: weight.shape[1:] multiply-adds per element of the result, or of the input of a transposed one.

Products with padding count too: a dense count depends on shapes only.
"""

from __future__ import annotations

from functools import partial
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor

from modelsummary import _torch
from modelsummary.operators.operator_calls import OperatorCall, TensorSpec
from modelsummary.operators.operator_work import ALIGNED_BYTES, Work, alignment_of, has_channels_last, work
from modelsummary.operators.shape_rules import Shape, are_plain_floats, in_format, new_contiguous
from modelsummary.operators.table import Arguments, Count, register
from modelsummary.operators.tensor_bytes import unpacked

__all__: list[str] = []

_ALIGNED = 8  # channels that tensor cores load at a time in half precision: cuDNN pads images with fewer


def _input(call: Arguments) -> Any:
    return call["input"] if "input" in call else call["self"]


def _convolution(call: Arguments, *, transposed: bool = False) -> Count:
    x = _input(call) if call.get("transposed", transposed) else call.out
    return x.numel() * prod(call["weight"].shape[1:])


def _kernels(call: OperatorCall, bound: Arguments, *, transposed: bool = False, adds_bias: bool = False) -> list[Work]:
    x, weight, out = _input(bound), bound["weight"], call.outputs[0]
    transposed = bound.get("transposed", transposed)
    groups = bound.get("groups", 1 if transposed else x.shape[1] // weight.shape[1])
    large, small = (x, out) if transposed else (out, x)
    facts = _facts(bound, x, groups, transposed=transposed)
    kernels = [_kernel(call, large, small, weight, groups, **facts)]
    if adds_bias and bound.get("bias") is not None:
        kernels.append(work(call, "elementwise", [out.numel], "bias", 0, 2 * out.nbytes))
    return kernels


def _facts(bound: Arguments, image: TensorSpec, groups: int, *, transposed: bool) -> dict[str, Any]:
    """Return what decides how cuDNN computes a convolution, apart from its sizes.

    A convolution of single pixels is a product of the weight and of each image as it is, one channel to a row.
    """
    channels_last = has_channels_last(image)
    is_1x1 = prod(bound["weight"].shape[2:]) == 1 and groups == 1 and set(bound.get("stride", ())) <= {1}
    alignment = alignment_of(image.dtype.itemsize, [prod(image.shape[2:])])
    is_product = is_1x1 and not channels_last and alignment > image.dtype.itemsize  # else images are converted
    return {
        "is_3x3": _is_3x3(bound, groups, transposed=transposed),
        "channels_last": channels_last,
        "is_product": is_product,
        "alignment": alignment if is_product else ALIGNED_BYTES,
    }


def _is_3x3(bound: Arguments, groups: int, *, transposed: bool) -> bool:
    """Return True for a dense 3 x 3 convolution of stride 1."""
    steps = {*bound.get("stride", ()), *bound.get("dilation", ())}
    return tuple(bound["weight"].shape[2:]) == (3, 3) and groups == 1 and not transposed and steps == {1}


def _kernel(
    call: OperatorCall, result: TensorSpec, operand: TensorSpec, weight: TensorSpec, groups: int, **facts: Any
) -> Work:
    """Return the implicit matrix product of a convolution: positions x output channels x summed elements."""
    moved = result.nbytes + operand.nbytes + weight.nbytes
    positions = prod(weight.shape[2:])
    if groups > 1 and weight.shape[1] == 1:
        return work(call, "depthwise", (result.numel, positions), nbytes=moved, **facts)
    m = max(result.numel // max(result.shape[1], 1), 1)
    channels = weight.shape[1] if weight.dtype.itemsize > 2 else _ALIGNED * ceil(weight.shape[1] / _ALIGNED)
    sizes = (groups, m, weight.shape[0] // groups, channels * positions, *_image(result))
    return work(call, "conv", sizes, nbytes=moved, **facts)


def _image(x: TensorSpec) -> tuple[int, int]:
    return (prod(x.shape[2:-1]), x.shape[-1]) if len(x.shape) > 2 else (1, 1)


_transposed: dict[str, Any] = {
    "macs": partial(_convolution, transposed=True),
    "kernels": partial(_kernels, transposed=True),
}
register(
    "aten",
    "mkldnn_convolution cudnn_convolution cudnn_convolution_relu cudnn_convolution_add_relu miopen_convolution"
    " miopen_convolution_relu miopen_convolution_add_relu miopen_depthwise_convolution _conv_depthwise2d"
    " conv_depthwise3d _slow_conv2d_forward slow_conv3d_forward thnn_conv2d slow_conv3d slow_conv_dilated2d"
    " slow_conv_dilated3d",
    macs=_convolution,
    kernels=_kernels,
)
register("torchvision", "deform_conv2d", macs=_convolution, kernels=_kernels)
register(
    "aten",
    "convolution _convolution convolution_overrideable",
    macs=_convolution,
    kernels=partial(_kernels, adds_bias=True),
)
register(
    "aten",
    "cudnn_convolution_transpose miopen_convolution_transpose slow_conv_transpose2d slow_conv_transpose3d",
    macs=partial(_convolution, transposed=True),
    kernels=partial(_kernels, transposed=True),
)
# the weight is (kernel, input channels, output channels)
register("aten", "conv_tbc", macs=lambda call: call.out.numel() * prod(call["weight"].shape[:2]))


def _packed(call: Arguments) -> Count:
    """Count by the weight; the packed object returns a copy of it."""
    packed = next(value for value in call.values() if hasattr(value, "unpack"))
    x = next(iter(call.values())) if packed.transpose() else call.out
    return x.numel() * prod(unpacked([packed])[0].shape[1:])


def _packed_kernels(call: OperatorCall, _: Arguments) -> list[Work]:
    """Return a convolution whose weight is packed: its sizes follow from its result and its multiply-adds."""
    out = call.outputs[0]
    m, n = max(out.numel // max(out.shape[1], 1), 1), out.shape[1]
    sizes = (1, m, n, max(call.cost.macs // (m * n), 1), *_image(out))
    return [work(call, "conv", sizes, channels_last=has_channels_last(out))]


register(
    "quantized",
    " ".join(
        f"conv{kind}{n}d{suffix}"
        for kind, suffixes in {
            "": ("", "_relu", "_dynamic", "_add", "_add_relu"),
            "_transpose": ("", "_dynamic"),
        }.items()
        for n in (1, 2, 3)
        for suffix in suffixes
    ),
    macs=_packed,
    kernels=_packed_kernels,
    packed_itemsize=1,
)


def _backward(call: Arguments) -> Count:
    """Count the forward once per gradient: both pair the same elements as the forward, whatever the groups."""
    positions = call["input"] if call["transposed"] else call["grad_output"]
    needs_input, needs_weight, _ = call["output_mask"]
    return (bool(needs_input) + bool(needs_weight)) * positions.numel() * prod(call["weight"].shape[1:])


def _backward_kernels(call: OperatorCall, bound: Arguments) -> list[Work]:
    grad, x, weight = (bound[name] for name in ("grad_output", "input", "weight"))
    transposed, groups, mask = (bound[name] for name in ("transposed", "groups", "output_mask"))
    large = x if transposed else grad
    flops = 2 * large.numel * prod(weight.shape[1:])
    positions, channels = prod(weight.shape[2:]), weight.shape[1]
    depthwise = groups > 1 and channels == 1
    op_class = "depthwise" if depthwise else "conv"
    facts = _facts(bound, grad, groups, transposed=transposed)
    moved = grad.nbytes + x.nbytes + weight.nbytes
    pixels, pixels_in = (max(image.numel // max(image.shape[1], 1), 1) for image in (large, x))
    part_sizes = {
        "input": (pixels_in, x.shape[1] // groups, weight.shape[0] // groups * positions),
        "weight": (weight.shape[0] // groups, channels * positions, pixels),
    }
    kernels = []
    for (part, product), is_needed in zip(part_sizes.items(), mask, strict=False):
        sizes = (x.numel, positions) if depthwise else (groups, *product, *_image(x))
        if is_needed:
            kernels.append(work(call, op_class, sizes, part, flops, moved, **facts))
    if mask[2]:
        kernels.append(work(call, "reduction", (grad.shape[1], pixels), "bias", 0, grad.nbytes))
    return kernels


register("aten", "convolution_backward convolution_backward_overrideable", macs=_backward, kernels=_backward_kernels)


def _shape(
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
    if transposed or not are_plain_floats(x, weight, bias) or not x.dim() == weight.dim() >= 3:
        return None
    sizes, kernel = x.shape[2:], weight.shape[2:]
    if not len(sizes) == len(stride) == len(padding) == len(dilation) or min(*stride, *dilation, groups) < 1:
        return None
    if weight.shape[1] * groups != x.shape[1] or weight.shape[0] % groups or min(padding) < 0:
        return None
    if bias is not None and bias.shape != weight.shape[:1]:
        return None
    dims = zip(sizes, kernel, stride, padding, dilation, strict=True)
    result_sizes = [(size + 2 * pad - step * (extent - 1) - 1) // hop + 1 for size, extent, hop, pad, step in dims]
    return new_contiguous((x.shape[0], weight.shape[0], *result_sizes), x.dtype) if min(result_sizes) > 0 else None


def _laid_out(out: Tensor, x: Tensor, weight: Tensor, *others: Any) -> Tensor:
    """Return the result of a convolution in the memory format that the device's library chooses."""
    return in_format(out, _format_of_convolution(x, weight, *others))


def _gradients_laid_out(out: Any, _: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *others: Any) -> Any:
    memory_format = _format_of_convolution(x, weight, None, *others[:6], bias_sizes)
    return *(gradient if gradient is None else in_format(gradient, memory_format) for gradient in out[:2]), out[2]


def _format_of_convolution(x: Tensor, weight: Tensor, *others: Any) -> torch.memory_format | None:
    if weight.dim() == 3:  # torch adds a dimension before it calls the library
        return None
    backend = _torch.select_conv_backend(x, weight, *others)
    memory_format: torch.memory_format = _torch.conv_memory_format(x, weight, backend)
    return memory_format


register("aten", "convolution", overload="default", shape=_shape, result=_laid_out)
register("aten", "convolution_backward", overload="default", result=_gradients_laid_out)
