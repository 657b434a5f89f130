"""Pooling, and interpolation, whose kernels compute places of windows for each element."""

from __future__ import annotations

from functools import partial

from modelsummary.operators.operator_calls import OperatorCall
from modelsummary.operators.operator_work import Work, has_channels_last, work
from modelsummary.operators.table import Arguments, register

__all__: list[str] = []


def _kernels(call: OperatorCall, _: Arguments, *, part: str) -> list[Work]:
    """Return the kernel of an operator that writes images; ``part`` says how it computes an element."""
    return [work(call, "pool", [call.outputs[0].numel], part, channels_last=has_channels_last(call.tensors[0]))]


for _kind, _names in {
    "maximum": "max_pool2d_with_indices",
    "maximum backward": "max_pool2d_with_indices_backward",
    "average": "avg_pool2d",
    "average backward": "avg_pool2d_backward",
    "bilinear": "upsample_bilinear2d",
}.items():
    register("aten", _names, kernels=partial(_kernels, part=_kind))
register("aten", "upsample_bilinear2d_backward", kernels=partial(_kernels, part="bilinear backward"))
