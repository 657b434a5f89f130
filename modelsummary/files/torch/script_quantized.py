"""Quantized operators of TorchScript files on shapes, with the sizes and multiply-adds of floating point operators.

A quantized tensor is a floating point shape tensor that the record lists with its own dtype.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modelsummary.errors import ModelFileError
from modelsummary.files.torch.script_operators import RefusedNameError

__all__ = ["PackedWeight", "packed_weight", "quantized_function"]

_AS_THEIR_INPUT = frozenset(
    f"{name}{relu}"
    for name in "add mul add_scalar mul_scalar add_scalar_out hardswish leaky_relu sigmoid elu celu batch_norm"
    " batch_norm1d batch_norm2d batch_norm3d layer_norm group_norm instance_norm prelu dropout threshold relu6".split()
    for relu in ("", "_relu")
)


@dataclass(slots=True)
class PackedWeight:
    """The weight of a quantized layer, and the settings of a convolution in the order of the prepack operators."""

    weight: Tensor
    bias: Tensor | None
    settings: list[Any]

    def unpack(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias."""
        return self.weight, self.bias


def packed_weight(class_name: str, state: Any) -> PackedWeight:
    """Return the weight that an object of torch's own classes holds in its state.

    Args:
        state: of a linear layer: weight and bias; of a convolution: a version, its settings and its tensors.
    """
    kind = class_name.rpartition(".")[2]
    if kind == "LinearPackedParamsBase" and len(state) == 2:
        return PackedWeight(state[0], state[1], [])
    dims = kind.removeprefix("Conv")[:1]
    if kind.endswith("PackedParamsBase") and dims in ("2", "3") and len(state) == 3:
        count = int(dims)
        numbers = state[1]
        if isinstance(numbers[0], Tensor):  # version 2: a tensor of the settings, then the weight
            raise ModelFileError("quantized convolutions from before torch 1.8 are not read")
        weight, bias = next(tensor for tensor in state[2] if tensor is not None), state[2][-1]
        bias = None if bias is weight else bias
        parts = [numbers[1 + start * count : 1 + (start + 1) * count] for start in range(4)]
        return PackedWeight(weight, bias, [*parts[:3], numbers[-2], parts[3], bool(numbers[-1] & 1)])
    raise RefusedNameError(class_name)


def quantized_function(name: str) -> Callable[..., Any]:
    """Return the function of an operator ``quantized::name`` on shapes."""
    base = name.removesuffix("_relu")
    if re.fullmatch(r"conv(_transpose)?[123]d", base):
        return _convolution(int(base[-2]), "transpose" in base)
    if name.startswith("linear") and (name.endswith("dynamic_fp16") or not name.endswith(("pack", "fp16"))):
        return lambda x, packed, *_: torch.nn.functional.linear(x, _packed(packed).weight, _packed(packed).bias)
    if name in ("linear_prepack", "linear_prepack_fp16"):
        return lambda weight, bias=None: PackedWeight(weight, bias, [])
    if name.startswith("conv") and name.endswith("_prepack"):
        return _prepacked("transpose" in name)
    if name.endswith(("_unpack", "_unpack_fp16")):
        return lambda packed: _packed(packed).unpack()
    if base == "cat":
        return lambda tensors, dim, *_: torch.cat(tensors, dim)
    if name in _AS_THEIR_INPUT:
        return lambda x, other=None, *_: x + other if isinstance(other, Tensor) and "norm" not in name else x + 0
    raise RefusedNameError(f"ops.quantized.{name}")


def _packed(value: Any) -> PackedWeight:
    if not isinstance(value, PackedWeight):
        raise ModelFileError("a quantized layer has no packed weight")
    return value


def _prepacked(transposed: bool) -> Callable[..., PackedWeight]:
    def prepacked(weight: Tensor, bias: Tensor | None, *settings: Any) -> PackedWeight:
        if transposed:  # stride, padding, output padding, dilation, groups
            stride, padding, output_padding, dilation, groups = settings
            return PackedWeight(weight, bias, [stride, padding, dilation, groups, output_padding, True])
        stride, padding, dilation, groups = settings
        return PackedWeight(weight, bias, [stride, padding, dilation, groups, [0] * len(stride), False])

    return prepacked


def _convolution(n_dims: int, transposed: bool) -> Callable[..., Tensor]:
    def convolution(x: Tensor, packed: Any, *_: Any) -> Tensor:
        layer = _packed(packed)
        if len(layer.settings) != 6:
            raise ModelFileError("a quantized convolution has the weight of another layer")
        *sizes, groups, output_padding, _ignored = layer.settings
        stride, padding, dilation, added = (list(size)[-n_dims:] for size in (*sizes, output_padding))
        added = added if transposed else [0] * n_dims
        return torch.convolution(x, layer.weight, layer.bias, stride, padding, dilation, transposed, added, groups)

    return convolution
