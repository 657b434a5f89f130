"""``Fits``: which devices of the table a step fits on, and how long it takes there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from modelsummary.capture.live import LiveModel
from modelsummary.devices.attention_time import KERNELS
from modelsummary.devices.device_spec import DeviceSpec
from modelsummary.devices.device_table import TABLE
from modelsummary.errors import InputError
from modelsummary.extras import Records
from modelsummary.keywords import choice_of
from modelsummary.latency import predicted
from modelsummary.latency.options import TimeOptions, time_plan
from modelsummary.layer_info import LayerInfo
from modelsummary.memory.predict import predict
from modelsummary.memory.reserve import AllocatorSettings
from modelsummary.memory.step_options import OptimizerLike
from modelsummary.tables import Printed, Report
from modelsummary.units import NOTHING, duration, percent, scaled

__all__ = ["DeviceFit", "Fits", "fits_of"]

_CONTEXT = 2**29  # bytes of CUDA's context


@dataclass(frozen=True)
class DeviceFit:
    """A step on one device.

    Attributes:
        device: name of the device.
        memory_bytes: its memory, as torch sees it.
        needed_bytes: what the step needs.
        step_ms: predicted milliseconds of the step; None if it does not fit, or its time cannot be predicted there, as
            for a dtype that the device lacks.

    >>> DeviceFit("T4", 15 * 10**9, 20 * 10**9, None).fits
    False
    """

    device: str
    memory_bytes: int
    needed_bytes: int
    step_ms: float | None

    @property
    def fits(self) -> bool:
        """Whether the step fits into the memory of the device."""
        return self.needed_bytes <= self.memory_bytes


class Fits(Printed, Records, tuple[DeviceFit, ...]):
    """The devices that a step was tried on, the smallest memory first; a tuple that prints as a table.

    Attributes:
        step: the step that was tried.

    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> fits = Statistics(nn.Linear(8, 8), (4, 8)).fits_on(["T4", "H100"], optimizer="sgd")
    >>> [(fit.device, fit.fits) for fit in fits]
    [('T4', True), ('H100', True)]
    """

    step: str

    @classmethod
    def of(cls, fits: Iterable[DeviceFit], step: str) -> Fits:
        """Return devices in the order of their memory."""
        ordered = cls(sorted(fits, key=lambda fit: (fit.memory_bytes, fit.device)))
        ordered.step = step
        return ordered

    def to_records(self) -> list[dict[str, Any]]:
        """Return one dict of plain data per device."""
        return [{**asdict(fit), "fits": fit.fits} for fit in self]

    def _report(self) -> Report:
        rows = [
            [
                fit.device,
                scaled(fit.memory_bytes, "B"),
                percent(fit.needed_bytes / fit.memory_bytes),
                "yes" if fit.fits else "no",
                NOTHING if fit.step_ms is None else duration(fit.step_ms),
            ]
            for fit in self
        ]
        needed = scaled(self[0].needed_bytes, "B") if self else NOTHING
        above = [
            f"Devices for one {self.step}",
            f"It needs {needed}: the reserve of torch's allocator, and CUDA's context",
        ]
        return Report(rows, ["Device", "Memory", "Of it", "Fits", "Step (eager)"], "lrrlr", above=above)


def fits_of(
    live: LiveModel,
    root: LayerInfo,
    devices: Sequence[DeviceSpec | str] | None,
    backward: bool,
    optimizer: OptimizerLike | None,
    options: TimeOptions,
) -> Fits:
    """Return on which devices a step fits; see ``Statistics.fits_on``."""
    if isinstance(devices, (str, DeviceSpec)):
        devices = [devices]
    if devices is not None and not isinstance(devices, Iterable):
        raise InputError(
            f"devices must be a list of accelerators, such as ['A100', 'H100'], or None, got {devices!r:.80}"
        )
    names = [name for name, figures in TABLE.items() if figures.generation != "tpu"] if devices is None else devices
    specs = [spec if isinstance(spec, DeviceSpec) else DeviceSpec(spec) for spec in names]
    if not specs:
        raise InputError("devices is empty; pass names of accelerators, or leave it out for all GPUs of the table")
    memory_bytes = [_memory_of(spec) for spec in specs]
    if options.get("attention") is not None:
        options = {**options, "attention": choice_of(options["attention"], KERNELS, "attention")}
    plan = time_plan(backward, optimizer, options, root, "A100")
    estimate = predict(live, root, plan, AllocatorSettings(None, False))
    assert estimate.reserve is not None
    needed = estimate.reserve.reserved + _CONTEXT

    def step_ms(spec: DeviceSpec) -> float | None:
        try:
            return float(predicted(live, root, spec, "eager", backward, optimizer, options))
        except InputError:  # it lacks the dtype, or a kernel was not measured there
            return None

    return Fits.of(
        (
            DeviceFit(spec.name, nbytes, needed, step_ms(spec) if needed <= nbytes else None)
            for spec, nbytes in zip(specs, memory_bytes, strict=True)
        ),
        estimate.step,
    )


def _memory_of(spec: DeviceSpec) -> int:
    """Return the memory of a device in bytes. Raise ``InputError`` if it is not known."""
    if not spec.memory_bytes:
        raise InputError(f"the memory of {spec.name!r} is not known; pass memory_bytes= to its DeviceSpec")
    return spec.memory_bytes
