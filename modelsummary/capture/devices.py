"""Where a model is."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["device_of"]


def device_of(tensors: Iterable[Tensor]) -> torch.device:
    """Return the device of the first tensor; the CPU if there is none."""
    return next((tensor.device for tensor in tensors), torch.device("cpu"))
