"""Rooflines of a tree: the least time of each call on a device, and the part of that speed it reached."""

from __future__ import annotations

from dataclasses import dataclass

from modelsummary.devices.device_spec import Bound, DeviceSpec, Precision
from modelsummary.devices.sustained import clock_of
from modelsummary.layer_info import CallKey, LayerInfo
from modelsummary.subject import subject_of
from modelsummary.tables import Printed, Report
from modelsummary.units import NOTHING, decimals, number_of, percent, scaled

__all__ = ["Roofline", "RooflineRow", "bounds_ms", "roofline"]


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
    """Rows in printed order, as a tuple that prints as a table with one line for equal blocks.

    Attributes:
        subject: model, sizes of its inputs, dtype and device.
    """

    subject: str = ""

    def _report(self) -> Report:
        unit, factor = ("ms", 1) if max((row.bound_ms for row in self), default=1) >= 1 else ("us", 1000)

        def time(milliseconds: float | None) -> str:
            return decimals(None if milliseconds is None else factor * milliseconds, 3)

        working = [row for row in self if row.flops or row.moved_bytes or not row.fqn]
        idle = len(self) - len(working)
        times = {
            f"Predicted ({unit})": [time(row.predicted_ms) for row in working],
            f"Latency ({unit})": [time(row.latency_ms) for row in working],
            "Of roof": [percent(row.part_of_roof) for row in working],
        }
        headers = ["Layer", "Class", "FLOPs", "Bytes moved", "FLOPs/B", f"Bound ({unit})", "Limited by"]
        rows = [
            [
                row.fqn or "(model)",
                row.class_name,
                scaled(row.flops),
                scaled(row.moved_bytes, "B"),
                decimals(row.arithmetic_intensity, 2),
                time(row.bound_ms),
                row.limited_by if row.bound_ms else NOTHING,
            ]
            for row in working
        ]
        above = [f"Roofline of {self.subject}: the least time of a forward"] if self.subject else []
        below = [f"Without {number_of(idle, 'call')} that move nothing"] if idle else []
        optional = ("Bytes moved", "FLOPs", "Class", "FLOPs/B")
        report = Report(rows, headers, "llrrrrl", above=above, below=below, optional=optional)
        for header, cells in times.items():
            if any(cell != NOTHING for cell in cells):
                report = report.with_column(header, cells, "r")
        return report.folded("Layer")


def roofline(root: LayerInfo, spec: DeviceSpec, dtype: Precision, depth: int | None) -> Roofline:
    """Return every called row down to ``depth`` with its bound on ``spec``."""
    rows = Roofline(_row(row, spec, dtype) for row in root.walk(depth) if row.executed)
    rows.subject = f"{subject_of(root, dtype)}, on {spec.name}"
    return rows


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
