"""Options of a predicted step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from modelsummary.capture.step_plan import StepPlan
from modelsummary.devices.device_spec import DeviceSpec, Precision
from modelsummary.devices.target import names_own_device
from modelsummary.errors import InputError, check_flags
from modelsummary.keywords import check_names, dtype_named
from modelsummary.layer_info import LayerInfo
from modelsummary.memory.step_options import OptimizerLike, StepOptions, step_plan

__all__ = ["TimeOptions", "precision_of", "time_plan"]


class TimeOptions(TypedDict, total=False):
    """Keyword options of a predicted step, all optional.

    Attributes:
        dtype: dtype of parameters, buffers and inputs; ``"tf32"``: float32 with TF32 products. Default: as they are.
        autocast: dtype of ``torch.autocast`` around the forward and the loss. Default: no autocast.
        loss: function from the model's result to a scalar. Default: the result's ``loss`` if it has one, else the sum
            of its tensors.
        checkpoint: modules under activation checkpointing, as for ``memory``. Default: none.
        attention: fused kernels of attention on a named device, as in ``Recipe``. Default: what torch prefers there.
    """

    dtype: Precision | None
    autocast: torch.dtype | None
    loss: Callable[[Any], Tensor] | None
    checkpoint: Sequence[str] | str | None
    attention: str | None


def precision_of(options: TimeOptions, name: str = "dtype") -> Precision | None:
    """Return a dtype among the options, or ``"tf32"``; None if it is not passed."""
    dtype = options.get(name)
    return dtype if dtype in (None, "tf32") else dtype_named(dtype, name, end=" or 'tf32'" if name == "dtype" else "")


def time_plan(
    backward: bool,
    optimizer: OptimizerLike | None,
    options: TimeOptions,
    root: LayerInfo,
    device: DeviceSpec | torch.device | str | None = None,
) -> StepPlan:
    """Return the plan of a step on a device of this machine, or on an accelerator.

    Raises:
        InputError: an option is unknown or unusable, or an optimizer is given without a backward.
    """
    check_names("a step", options, [*TimeOptions.__annotations__, "mode", "backward", "optimizer"])
    check_flags(backward=backward)
    if optimizer is not None and not backward:
        raise InputError(f"optimizer={optimizer!r:.80} needs a backward; pass backward=True")
    dtype = precision_of(options)
    if isinstance(dtype, torch.dtype) and dtype.itemsize == 1:
        raise InputError(
            f"dtype={dtype}: no forward computes in 8 bits alone, as torch multiplies 8-bit matrices with scales, by "
            "torch._scaled_mm; pass torch.bfloat16, or a model whose layers do that"
        )
    attention = options.get("attention")
    if attention is not None and names_own_device(device):
        raise InputError(f"attention={attention!r:.80} is for named devices; kernels of this machine are measured")
    step_options: StepOptions = {
        "optimizer": optimizer,
        "autocast": options.get("autocast"),
        "loss": options.get("loss"),
        "checkpoint": options.get("checkpoint"),
        "device": "cpu" if names_own_device(device) and str(device or "cpu").startswith("cpu") else "cuda",
    }
    if dtype is not None and dtype != "tf32":
        step_options["dtype"] = dtype  # type: ignore[typeddict-item]
    return step_plan("train" if backward else "inference", step_options, root)
