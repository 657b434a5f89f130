"""A meter of MFU and tokens per second for a training loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modelsummary._torch import tree_leaves
from modelsummary.devices.device_spec import DeviceSpec, Precision
from modelsummary.errors import InputError, check_integers
from modelsummary.formulas.tokens import FlopsPerToken
from modelsummary.keywords import choice_of
from modelsummary.units import grouped, percent, scaled

__all__ = ["MFUMeter", "Reading", "tokens_in"]


@dataclass(frozen=True)
class Reading:
    """The speed of training over some steps.

    Attributes:
        step: number of the last step.
        seconds: wall-clock time of the steps.
        tokens_per_second: tokens (samples) of all devices.
        flops_per_second: model FLOPs of all devices, recomputation left out.
        mfu: ``flops_per_second`` divided by the peak of all devices, 0 to 1.
        unit: ``"token"`` or ``"sample"``.
    """

    step: int
    seconds: float
    tokens_per_second: float
    flops_per_second: float
    mfu: float
    unit: str = "token"

    def __str__(self) -> str:
        speed = f"{grouped(round(self.tokens_per_second))} {self.unit}s/s"
        return f"step {self.step}: {speed}, {scaled(self.flops_per_second, 'FLOP/s')}, MFU {percent(self.mfu)}"


class MFUMeter:
    """A meter of model FLOPs utilisation (MFU) and tokens per second.

    Call ``step`` after each step; it takes a microsecond and never waits for the device. An accelerator is a few steps
    behind the host, which does not matter over ten steps or more. The time before the first ``step`` does not count.

    Args:
        flops_per_token: result of ``Statistics.flops_per_token``, whose dense training FLOPs count; or a number.
        device: a ``DeviceSpec`` or the name of an accelerator; None: the CUDA device in use.
        dtype: dtype whose peak the speed is divided by; None: the only one that the device has.
        n_devices: devices that train together.
        every: steps per reading.
        show: function that shows a reading, such as ``print``; None: show nothing.

    Raises:
        InputError: an argument is unusable.

    >>> meter = MFUMeter(6e9, "A100", torch.bfloat16, every=2, show=None)
    >>> readings = [meter.step(tokens=4096) for _ in range(3)]
    >>> readings[:2], readings[2].step, 0 < readings[2].mfu
    ([None, None], 3, True)
    """

    def __init__(
        self,
        flops_per_token: FlopsPerToken | float,
        device: DeviceSpec | str | None = None,
        dtype: Precision | None = None,
        n_devices: int = 1,
        every: int = 10,
        show: Callable[[Reading], object] | None = print,
    ) -> None:
        self.unit = flops_per_token.unit if isinstance(flops_per_token, FlopsPerToken) else "token"
        flops = flops_per_token.training if isinstance(flops_per_token, FlopsPerToken) else flops_per_token
        if isinstance(flops, bool) or not isinstance(flops, (int, float)) or flops <= 0:
            raise InputError(
                f"flops_per_token must be a number > 0 or stats.flops_per_token(), got {flops_per_token!r}"
            )
        check_integers(n_devices=n_devices, every=every)
        spec = _spec(device)
        if dtype is None and len(spec.peak_flops) > 1:
            raise InputError(f"pass dtype=, one of {', '.join(map(str, spec.peak_flops))}: the peak depends on it")
        self.flops_per_token = float(flops)
        self.peak_flops = spec.peak(next(iter(spec.peak_flops)) if dtype is None else dtype) * n_devices
        self._every = every
        self._show = show
        self._steps = 0
        self._tokens = 0  # of the steps since ``_since``
        self._since = 0.0
        self._begin = 0.0
        self._all_tokens = 0

    def step(self, tokens: int) -> Reading | None:
        """Count a step; return the reading of the last ``every`` steps when it is due, else None.

        Args:
            tokens: tokens (samples) that all devices processed in the step.
        """
        self._steps += 1
        if self._steps == 1:
            self._since = self._begin = time.perf_counter()
            return None
        self._tokens += tokens
        if (self._steps - 1) % self._every:
            return None
        now = time.perf_counter()
        reading = self._reading(self._tokens, now - self._since)
        self._all_tokens, self._tokens, self._since = self._all_tokens + self._tokens, 0, now
        if self._show is not None:
            self._show(reading)
        return reading

    def overall(self) -> Reading:
        """Return the reading of all steps after the first. Raise ``InputError`` before the second step."""
        if self._steps < 2:
            raise InputError(f"a reading needs two steps, {self._steps} counted")
        return self._reading(self._all_tokens + self._tokens, time.perf_counter() - self._begin)

    def _reading(self, tokens: int, seconds: float) -> Reading:
        speed = tokens / max(seconds, 1e-9)
        flops = speed * self.flops_per_token
        return Reading(self._steps, seconds, speed, flops, flops / self.peak_flops, self.unit)


def _spec(device: DeviceSpec | str | None) -> DeviceSpec:
    if isinstance(device, DeviceSpec):
        return device
    if device is None and not torch.cuda.is_available():
        raise InputError("pass device=, such as 'A100' or DeviceSpec.measure(): no CUDA device was found")
    return DeviceSpec.of(torch.cuda.get_device_name() if device is None else device)


def tokens_in(batch: Any, unit: str = "token") -> int:
    """Return the tokens (samples) in a batch: elements of its token ids, or the first size of its first tensor.

    >>> tokens_in({"input_ids": torch.zeros(4, 128).long()}), tokens_in(torch.zeros(4, 3, 8, 8), "sample")
    (512, 4)

    Raises:
        InputError: ``unit`` is neither ``"token"`` nor ``"sample"``.
    """
    unit = choice_of(unit, ("token", "sample"), "unit")
    named = batch.get("input_ids") if isinstance(batch, Mapping) else None
    tensors = [leaf for leaf in ([named] if named is not None else tree_leaves(batch)) if isinstance(leaf, Tensor)]
    ids = [tensor for tensor in tensors if not tensor.is_floating_point() and tensor.dim() == 2]
    if unit == "token" and ids:
        return ids[0].numel()
    return next((len(tensor) for tensor in tensors if tensor.dim()), 0)
