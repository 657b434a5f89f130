"""On shapes every tensor is on meta; a forward that asks for the device shall hear that of the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from modelsummary.dataflow import map_template

__all__ = ["DeviceAnswers", "OnOwnDevice", "device_of"]

_META = torch.device("meta")
_KINDS = ("cpu", "cuda", "meta", "mps", "xpu")


def device_of(tensors: Iterable[Tensor]) -> torch.device:
    """Where a model is: the device of its first tensor; the CPU if it has none."""
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


class DeviceAnswers:
    """What a forward on shapes hears about devices.

    Args:
        device: of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._answers: dict[str, Any] = {f"is_{kind}": kind == device.type for kind in _KINDS}
        self._answers["device"] = device

    def answers(self, func: Any) -> bool:
        """``func`` is the getter of ``x.device`` or one of ``x.is_cuda`` ..."""
        return getattr(func, "__name__", "") == "__get__" and func.__self__.__name__ in self._answers

    def answer(self, func: Any) -> Any:
        """The answer to such a question."""
        return self._answers[func.__self__.__name__]

    def on_meta(self, arguments: Any) -> Any:
        """Arguments of a torch function with meta in the place of the model's device."""
        return map_template(
            lambda leaf: _META if isinstance(leaf, torch.device) and leaf == self.device else leaf, arguments
        )


class OnOwnDevice(TorchFunctionMode):
    """Context in which questions for devices are answered with the model's."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._answers = DeviceAnswers(device)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._answers.answers(func):
            return self._answers.answer(func)
        return func(*self._answers.on_meta(args), **self._answers.on_meta(kwargs or {}))
