"""Rooflines of a tree: the least time of each call on a device, and the part of that speed it reached."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.parameter import is_lazy

from modelsummary.devices.device_spec import Bound, DeviceSpec, Precision
from modelsummary.devices.sustained import clock_of
from modelsummary.layer_info import CallKey, LayerInfo
from modelsummary.tables import Printed, Report
from modelsummary.units import NOTHING, decimals, grouped, percent

__all__ = ["Roofline", "RooflineRow", "bounds_ms", "dtype_of", "roofline"]


def bounds_ms(root: LayerInfo, spec: DeviceSpec, dtype: Precision) -> dict[CallKey, float]:
    """Return the least milliseconds of each row without the rows below, at full peak and bandwidth.

    All operators of a row share one bound. Launches are left out. GeForce cards run faster than their data sheets say.
    """
    return {row.key: 1e3 * _bound(row, spec, dtype).seconds for row in root.walk()}


def _bound(row: LayerInfo, spec: DeviceSpec, dtype: Precision) -> Bound:
    return spec.bound(row.self_flops / clock_of(spec), row.self_bytes_read + row.self_bytes_written, dtype)


@dataclass(frozen=True)
class RooflineRow:
    """A call of a module compared with the roofline of a device.

    Attributes:
        arithmetic_intensity: FLOPs per byte moved; None if no byte is moved.
        bound_ms: the least time on the device, in milliseconds.
        limited_by: ``"compute"`` or ``"memory"``, whichever makes up more of the bound.
        predicted_ms: the last prediction of ``estimate_latency``, for the device and dtype given there; or None.
        latency_ms: measured time, or None.
        part_of_roof: ``bound_ms / latency_ms``; None without a measurement. Above 1, the spec is too low for this
            device, or data stays in its caches.
    """

    fqn: str
    class_name: str
    flops: int
    moved_bytes: int
    arithmetic_intensity: float | None
    bound_ms: float
    limited_by: str
    predicted_ms: float | None
    latency_ms: float | None
    part_of_roof: float | None


class Roofline(Printed, tuple[RooflineRow, ...]):
    """Rows in printed order, as a tuple that prints as a table."""

    def _report(self) -> Report:
        unit, factor = ("ms", 1) if max((row.bound_ms for row in self), default=1) >= 1 else ("us", 1000)

        def time(milliseconds: float | None) -> str:
            return decimals(None if milliseconds is None else factor * milliseconds, 3)

        headers = ["Layer", "Class", "FLOPs", "Bytes moved", "FLOPs/B", f"Bound ({unit})", "Limited by"]
        headers += [f"Predicted ({unit})", f"Latency ({unit})"]
        rows = [
            [
                row.fqn or "(model)",
                row.class_name,
                grouped(row.flops),
                grouped(row.moved_bytes),
                decimals(row.arithmetic_intensity, 2),
                time(row.bound_ms),
                row.limited_by if row.bound_ms else NOTHING,
                time(row.predicted_ms),
                time(row.latency_ms),
                percent(row.part_of_roof),
            ]
            for row in self
        ]
        return Report(rows, [*headers, "Of roof"], "llrrrrlrrr")


def roofline(root: LayerInfo, spec: DeviceSpec, dtype: Precision, depth: int | None) -> Roofline:
    """Return every called row down to ``depth`` with its bound on ``spec``."""
    return Roofline(_row(row, spec, dtype) for row in root.walk(depth) if row.executed)


def _row(row: LayerInfo, spec: DeviceSpec, dtype: Precision) -> RooflineRow:
    moved = row.bytes_read + row.bytes_written
    bounds = [_bound(call, spec, dtype) for call in row.walk()]
    seconds = sum(bound.seconds for bound in bounds)
    computing = sum(bound.seconds for bound in bounds if bound.limited_by == "compute")
    return RooflineRow(
        fqn=row.fqn,
        class_name=row.class_name,
        flops=row.flops,
        moved_bytes=moved,
        arithmetic_intensity=row.arithmetic_intensity,
        bound_ms=1e3 * seconds,
        limited_by="compute" if 2 * computing >= seconds else "memory",
        predicted_ms=row.estimated_latency_ms,
        latency_ms=row.latency_ms,
        part_of_roof=1e3 * seconds / row.latency_ms if row.latency_ms else None,
    )


def dtype_of(root: LayerInfo) -> torch.dtype:
    """Return the most frequent floating point dtype of the parameters, by elements; float32 if there are none."""
    counts: dict[torch.dtype, int] = {}
    for parameter in root.module.parameters() if root.module is not None else ():
        if parameter.dtype.is_floating_point and not is_lazy(parameter):
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return max(counts, key=lambda dtype: counts[dtype], default=torch.float32)
