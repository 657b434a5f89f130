"""The columns of tables: name -> header, kind and the value of a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from modelsummary.errors import InputError, close_to
from modelsummary.keywords import listed
from modelsummary.layer_info import LayerInfo, rows_around

__all__ = [
    "COLUMNS",
    "DEFAULT_COLUMNS",
    "FILLED_BY",
    "STATISTICS",
    "WITHOUT_FORWARD",
    "Column",
    "check_columns",
    "find_columns",
]

Kind = Literal["text", "shape", "count", "bytes", "percent", "ms", "rate", "figure", "marks"]


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        header: title without its unit.
        kind: kind of the values, which decides format and alignment.
        value: function that returns the raw value of a row: a number, a shape, a text, or None if it does not apply.
        collapsed: the same for a row whose children are hidden; None if the value does not change.
        scale: divisor of printed values; the header names it.
    """

    header: str
    kind: Kind
    value: Callable[[LayerInfo], Any]
    collapsed: Callable[[LayerInfo], Any] | None = None
    scale: float = 1.0

    @property
    def is_number(self) -> bool:
        """Return True if the values are numbers or None."""
        return self.kind in ("count", "bytes", "percent", "ms", "rate", "figure")

    def of(self, info: LayerInfo, hides_children: bool = False) -> Any:
        """Return the raw value of a row."""
        return self.collapsed(info) if self.collapsed is not None and hides_children else self.value(info)

    def of_equal(self, rows: Sequence[LayerInfo], hides_children: bool = False) -> Any:
        """Return the raw value of equal rows that are shown once.

        It is the mean of times, the largest of bytes, the figure farthest from zero, and all marks.
        """
        values = [value for value in (self.of(row, hides_children) for row in rows) if value is not None]
        if self.kind in ("ms", "percent", "rate") and values:
            return fmean(values)
        if self.kind == "figure" and values:
            return max(values, key=abs)
        if self.kind == "marks" and values:
            return _joined(values)
        return max(values) if self.kind == "bytes" and values else self.of(rows[0], hides_children)


def _fact(header: str, kind: Kind, attribute: str) -> Column:
    return Column(header, kind, lambda info: getattr(info, attribute))


def _first_seen(attribute: str) -> Callable[[LayerInfo], int]:
    """Return a function that sums an own figure over a row and its descendants."""
    return lambda info: sum(getattr(row, attribute) for row in info.walk())


def _share(part: Callable[[LayerInfo], int]) -> Callable[[LayerInfo], float]:
    def share(info: LayerInfo) -> float:
        root = [info, *rows_around(info)][-1]
        return part(info) / root.num_params if root.num_params else 0.0

    return share


def _joined(marks: Iterable[str | None]) -> str | None:
    """Return all marks, each once; None if no row has any text."""
    texts = [text for text in marks if text is not None]
    return ", ".join(sorted({mark for text in texts for mark in text.split(", ") if mark})) if texts else None


def _statistic(name: str) -> Column:
    header = name.replace("abs_max", "abs max").replace("_", " ").capitalize()
    return Column(header, "figure", lambda info: None if info.values is None else info.values.get(name))


def _giga(header: str, attribute: str) -> Column:
    return Column(header, "rate", lambda info: getattr(info, attribute), scale=1e9)


STATISTICS = tuple(
    f"{tensor}_{figure}"
    for tensor in ("output", "gradient")
    for figure in ("mean", "std", "abs_max", "norm", "zeros", "nans", "infs")
)
"""The columns of values: of the first tensor in the result of a call, and of its gradient."""

# Parameters and mult-adds add up over the rows shown: a row shows its own, and includes its descendants if these are
# hidden. The other columns show the attributes of LayerInfo unchanged, which include descendants.
COLUMNS: dict[str, Column] = {
    "input_size": _fact("Input Shape", "shape", "input_size"),
    "output_size": _fact("Output Shape", "shape", "output_size"),
    "num_params": Column("Param #", "count", lambda info: info.self_params, _first_seen("self_params")),
    "params_percent": Column(
        "Param %", "percent", _share(lambda info: info.self_params), _share(_first_seen("self_params"))
    ),
    "mult_adds": Column("Mult-Adds", "count", lambda info: info.self_macs, lambda info: info.macs),
    "kernel_size": _fact("Kernel Shape", "shape", "kernel_size"),
    # torchvision's ResNet has an attribute `groups` although it is not a convolution
    "groups": Column("Groups", "text", lambda info: info.groups if info.kernel_size else None),
    "inner_layers": _fact("Parameters", "text", "inner_layers"),
    "trainable": _fact("Trainable", "text", "trainable"),
    "training": Column("Mode", "text", lambda info: "train" if info.training else "eval"),
    "fqn": _fact("FQN", "text", "fqn"),
    "name": _fact("Name", "text", "name"),
    "depth": _fact("Depth", "text", "depth"),
    "depth_index": _fact("Index", "text", "depth_index"),
    "class_name": _fact("Class", "text", "class_name"),
    "call_index": _fact("Call", "text", "call_index"),
    "executed": _fact("Executed", "text", "executed"),
    "note": _fact("Note", "text", "note"),
    "total_params": _fact("Total Params", "count", "num_params"),
    "self_params": _fact("Own Params", "count", "self_params"),
    "trainable_params": _fact("Trainable Params", "count", "trainable_params"),
    "params_bytes": _fact("Params Size", "bytes", "params_bytes"),
    "num_buffers": _fact("Buffer #", "count", "num_buffers"),
    "buffer_bytes": _fact("Buffers Size", "bytes", "buffer_bytes"),
    "input_bytes": _fact("Input Size", "bytes", "input_bytes"),
    "output_bytes": _fact("Output Size", "bytes", "output_bytes"),
    "size_bytes": _fact("Total Size", "bytes", "size_bytes"),
    "macs": _fact("Total MACs", "count", "macs"),
    "self_macs": _fact("Own MACs", "count", "self_macs"),
    "skipped_macs": _fact("Skipped MACs", "count", "skipped_macs"),
    "self_skipped_macs": _fact("Own Skipped MACs", "count", "self_skipped_macs"),
    "flops": _fact("Total FLOPs", "count", "flops"),
    "self_flops": _fact("Own FLOPs", "count", "self_flops"),
    "elementwise_ops": _fact("Element-wise Ops", "count", "elementwise_ops"),
    "self_elementwise_ops": _fact("Own Element-wise Ops", "count", "self_elementwise_ops"),
    "bytes_read": _fact("Bytes Read", "bytes", "bytes_read"),
    "self_bytes_read": _fact("Own Bytes Read", "bytes", "self_bytes_read"),
    "bytes_written": _fact("Bytes Written", "bytes", "bytes_written"),
    "self_bytes_written": _fact("Own Bytes Written", "bytes", "self_bytes_written"),
    "activation_bytes": _fact("Activations", "bytes", "activation_bytes"),
    "self_activation_bytes": _fact("Own Activations", "bytes", "self_activation_bytes"),
    "peak_bytes": _fact("Peak", "bytes", "peak_bytes"),
    "arithmetic_intensity": _fact("FLOPs/B", "rate", "arithmetic_intensity"),
    "latency_ms": _fact("Latency (ms)", "ms", "latency_ms"),
    "self_latency_ms": _fact("Own Latency (ms)", "ms", "self_latency_ms"),
    "latency_share": _fact("Latency %", "percent", "latency_share"),
    "latency_iqr_ms": _fact("Latency IQR (ms)", "ms", "latency_iqr_ms"),
    "backward_latency_ms": _fact("Bwd Latency (ms)", "ms", "backward_latency_ms"),
    "backward_self_latency_ms": _fact("Own Bwd Latency (ms)", "ms", "backward_self_latency_ms"),
    "backward_latency_share": _fact("Bwd Latency %", "percent", "backward_latency_share"),
    "backward_latency_iqr_ms": _fact("Bwd Latency IQR (ms)", "ms", "backward_latency_iqr_ms"),
    "estimated_latency_ms": _fact("Est. Latency (ms)", "ms", "estimated_latency_ms"),
    "self_estimated_latency_ms": _fact("Own Est. Latency (ms)", "ms", "self_estimated_latency_ms"),
    "estimated_backward_latency_ms": _fact("Est. Bwd Latency (ms)", "ms", "estimated_backward_latency_ms"),
    "self_estimated_backward_latency_ms": _fact(
        "Own Est. Bwd Latency (ms)", "ms", "self_estimated_backward_latency_ms"
    ),
    "achieved_flops_per_second": _giga("GFLOP/s", "achieved_flops_per_second"),
    "achieved_bytes_per_second": _giga("GB/s", "achieved_bytes_per_second"),
    "findings": Column(
        "Findings", "marks", lambda info: info.findings, lambda info: _joined(row.findings for row in info.walk())
    ),
    **{name: _statistic(name) for name in STATISTICS},
}

_LATENCY_COLUMNS = ("latency_ms", "latency_share")
_BACKWARD_COLUMNS = ("backward_latency_ms",)
DEFAULT_COLUMNS = ("input_size", "output_size", "num_params", "mult_adds")
WITHOUT_FORWARD = ("num_params",)
_TOTALS = {"num_params": "total_params", "mult_adds": "macs"}  # instead of a row's own figures, in a folded table


_BY_CALL = {
    "measure_latency()": "latency_ms self_latency_ms latency_share latency_iqr_ms achieved_flops_per_second"
    " achieved_bytes_per_second",
    "measure_latency(backward=True)": "backward_latency_ms backward_self_latency_ms backward_latency_share"
    " backward_latency_iqr_ms",
    "estimate_latency(device)": "estimated_latency_ms self_estimated_latency_ms",
    "memory()": "activation_bytes self_activation_bytes peak_bytes",
    "check()": "findings",
    "values()": " ".join(STATISTICS),
}
FILLED_BY = {name: call for call, names in _BY_CALL.items() for name in names.split()}  # columns that a call fills


def find_columns(
    names: Sequence[str] | None, root: LayerInfo, *, executed: bool, totals: bool = False
) -> list[tuple[str, Column]]:
    """Return the columns with these names; None: the default columns, and latencies if they were measured.

    Args:
        totals: by default, show what a row and its descendants have together.

    Raises:
        InputError: a name is unknown.
    """
    if names is None:
        names = list(DEFAULT_COLUMNS if executed else WITHOUT_FORWARD)
        names = [_TOTALS.get(name, name) if totals else name for name in names]
        names += _LATENCY_COLUMNS if root.latency_ms is not None else ()
        names += _BACKWARD_COLUMNS if root.backward_latency_ms is not None else ()
    return [(name, COLUMNS[name]) for name in check_columns(names)]


def check_columns(names: Sequence[str]) -> Sequence[str]:
    """Return ``names`` as a sequence; raise ``InputError`` if one is unknown.

    >>> check_columns("macs")
    ['macs']
    """
    if isinstance(names, str):
        names = [names]
    if not isinstance(names, Sequence):
        raise InputError(f"columns must be a list of names, got {names!r}; pass some of: {listed(COLUMNS)}")
    for name in names:
        if not isinstance(name, str) or name not in COLUMNS:
            raise InputError(
                f"unknown column {name!r}; expected some of: {listed(COLUMNS, name)}{close_to(name, COLUMNS)}"
            )
    return names
