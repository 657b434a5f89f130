"""Amounts that add up over the rows of a tree: parameters, multiply-adds, bytes, time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from modelsummary.errors import InputError, close_to
from modelsummary.keywords import listed
from modelsummary.layer_info import LayerInfo
from modelsummary.tables import Printed, Report
from modelsummary.units import PREFIXES, auto_prefix, percent, symbol
from modelsummary.views.columns import COLUMNS, FILLED_BY

__all__ = ["ADDITIVE", "Amounts", "Ranking", "Unit", "column_of", "find_amounts", "total_of"]


@dataclass(frozen=True)
class Unit:
    """The unit of the numbers in one picture: ``1.2 M``, ``3.4 MB``, ``5.60 ms``.

    Attributes:
        kind: kind of the column: ``"count"``, ``"bytes"``, ``"ms"``, ``"percent"`` or ``"rate"``.
        prefix: prefix of the unit, chosen from the largest number: ``""``, ``"K"``, ``"M"`` ...
    """

    kind: str
    prefix: str

    @classmethod
    def of(cls, kind: str, largest: float) -> Unit:
        """Return the unit for numbers up to ``largest``.

        >>> Unit.of("bytes", 5_000_000).text(3_400_000)
        '3.40 MB'
        """
        return cls(kind, auto_prefix(largest) if kind in ("count", "bytes") else "")

    @property
    def factor(self) -> float:
        """The number by which a value is divided before it is written."""
        return 0.01 if self.kind == "percent" else PREFIXES[self.prefix]

    @property
    def symbol(self) -> str:
        """``M``, ``MB``, ``ms``, or an empty string."""
        written = {"bytes": symbol(self.prefix, "B"), "count": self.prefix, "ms": "ms", "percent": "%"}
        return written.get(self.kind, "")

    def text(self, value: float) -> str:
        """Return a number with its unit."""
        is_whole = self.kind in ("count", "bytes") and not self.prefix
        return f"{value / self.factor:,.{0 if is_whole else 2}f} {self.symbol}".strip()


@dataclass(frozen=True)
class Amounts:
    """One amount of all rows of a tree.

    Attributes:
        title: name of the amount, without its unit.
        unit: unit in which the amounts are written.
        self_amount: row -> its amount without the rows below it.
        total: row -> its amount with all rows below it, which is the sum of their own amounts.
    """

    title: str
    unit: Unit
    self_amount: dict[LayerInfo, float]
    total: dict[LayerInfo, float]

    @property
    def label(self) -> str:
        """The title with its unit."""
        return f"{self.title} ({self.unit.symbol})" if self.unit.symbol else self.title


class Ranking(Printed, list[LayerInfo]):
    """The rows with the largest own amounts, largest first; ``print`` shows the amounts and their shares of the model.

    Args:
        rows: the rows.
        amounts: the amounts of all rows of the model.
    """

    def __init__(self, rows: Iterable[LayerInfo], amounts: Amounts) -> None:
        super().__init__(rows)
        self._title, whole = amounts.title, sum(amounts.self_amount.values())
        values = [amounts.self_amount[row] for row in self]
        self._amounts = [(amounts.unit.text(value), percent(value / whole)) for value in values]

    def _report(self) -> Report:
        rows = [[row.fqn, row.class_name, *texts] for row, texts in zip(self, self._amounts, strict=False)]
        return Report(rows, ["Layer", "Class", self._title, "Share"], "llrr")


# names of columns, values of split(by=...) and short names -> title, kind, attribute of the own part
_NAMES = {
    "params num_params total_params self_params": ("Parameters", "count", "self_params"),
    "trainable_params": ("Trainable parameters", "count", "self_trainable_params"),
    "params_bytes param_bytes": ("Size of parameters", "bytes", "self_params_bytes"),
    "buffers num_buffers": ("Buffers", "count", "self_buffers"),
    "buffer_bytes": ("Size of buffers", "bytes", "self_buffer_bytes"),
    "macs mult_adds self_macs": ("Multiply-adds", "count", "self_macs"),
    "flops self_flops": ("FLOPs", "count", "self_flops"),
    "elementwise_ops self_elementwise_ops": ("Element-wise operations", "count", "self_elementwise_ops"),
    "bytes_read self_bytes_read": ("Bytes read", "bytes", "self_bytes_read"),
    "bytes_written self_bytes_written": ("Bytes written", "bytes", "self_bytes_written"),
    "activation activations activation_bytes self_activation_bytes": (
        ("Activations kept for backward", "bytes", "self_activation_bytes")
    ),
    "latency latency_ms self_latency_ms": ("Latency", "ms", "self_latency_ms"),
    "backward_latency backward_latency_ms backward_self_latency_ms": (
        ("Latency of the backward", "ms", "backward_self_latency_ms")
    ),
    "estimated_latency estimated_latency_ms": ("Estimated latency", "ms", "self_estimated_latency_ms"),
}
ADDITIVE = {name: facts for names, facts in _NAMES.items() for name in names.split()}


def column_of(by: str) -> str | None:
    """Return the column that shows an amount of a row alone, or else of the row with all below it; None if unknown.

    >>> column_of("latency"), column_of("params"), column_of("speed")
    ('self_latency_ms', 'num_params', None)
    """
    if by not in ADDITIVE:
        return None
    name = ADDITIVE[by][2]
    if name in ("self_params", "self_macs"):  # these columns show what adds up over the rows shown
        return "num_params" if name == "self_params" else "mult_adds"
    return name if name in COLUMNS else total_of(by)


def total_of(name: str) -> str | None:
    """Return the attribute with an amount of a row and all below it; None if the amount does not add up.

    >>> total_of("mult_adds"), total_of("self_params"), total_of("depth")
    ('macs', 'num_params', None)
    """
    _, _, attribute = ADDITIVE.get(name) or ADDITIVE.get(name.removeprefix("self_")) or (None, None, None)
    if attribute in ("self_params", "self_buffers"):
        return attribute.replace("self_", "num_")
    return None if attribute is None else attribute.replace("self_", "", 1)


def find_amounts(root: LayerInfo, by: str, name: str = "by") -> Amounts:
    """Return the amount called ``by`` of all rows of the tree; messages call the argument ``name``.

    Raises:
        InputError: the name is unknown, the amount was not measured, or it is zero for the whole model.

    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> root = Statistics(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), (1, 2)).root
    >>> find_amounts(root, "params").total[root]
    9
    """
    if not isinstance(by, str) or by not in ADDITIVE:
        raise InputError(
            f"{name} must be an amount that adds up over modules, got {by!r}; "
            f"expected {listed(ADDITIVE, by)}{close_to(by, ADDITIVE)}"
        )
    title, kind, attribute = ADDITIVE[by]
    rows = list(root.walk())
    values = {row: getattr(row, attribute) for row in rows}
    if all(value is None for value in values.values()):
        raise InputError(f"{name}={by!r} was not measured; call {FILLED_BY[attribute]} first")
    self_amount: dict[LayerInfo, float] = {row: value or 0 for row, value in values.items()}
    total = dict(self_amount)
    for row in reversed(rows):
        if row.parent_info is not None and row is not root:
            total[row.parent_info] += total[row]
    if not total[root]:
        hint = "" if root.executed else "; pass an input to Statistics to count what a forward does"
        raise InputError(f"{name}={by!r} is 0 for all modules of {root.class_name}{hint}")
    return Amounts(title, Unit.of(kind, total[root]), self_amount, total)
