"""The table of stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from modelsummary.split.stage_facts import StageFacts
from modelsummary.tables import PAGE, Report
from modelsummary.units import NOTHING, auto_prefix, format_number, grouped, percent, symbol

__all__ = ["stage_table"]

_SCALED = ("params", "macs", "crossing_bytes", "activation_bytes")


def stage_table(facts: Sequence[StageFacts], by: str, below: Sequence[str]) -> Report:
    """Return the facts of stages as a table; if it is too wide for a page, in suitable units, with fewer columns.

    Args:
        facts: facts of each stage.
        by: what was balanced.
        below: lines below the table.
    """
    report = _table(facts, by, below, {})
    if report.width <= PAGE:
        return report
    prefixes = {name: auto_prefix(max(getattr(stage, name) for stage in facts)) for name in _SCALED}
    return _table(facts, by, below, prefixes).leaving_out(PAGE, "Last", "Calls", "Share")


def _table(facts: Sequence[StageFacts], by: str, below: Sequence[str], prefixes: Mapping[str, str]) -> Report:
    def header(title: str, name: str, unit: str = "") -> str:
        written = symbol(prefixes.get(name, ""), unit)
        return f"{title} ({written})" if written else title

    def text(stage: StageFacts, name: str) -> str:
        return format_number(getattr(stage, name), prefixes.get(name, ""))

    headers = ["Stage", "First", "Last", "Calls", header("Params", "params"), header("MACs", "macs"), "Share"]
    headers += [header("Crossing", "crossing_bytes", "B"), header("Activations", "activation_bytes", "B")]
    has_costs = by not in ("macs", "flops", "params")
    if has_costs:
        headers.insert(6, f"Cost ({by})" if by != "cost" else "Cost")
    rows = []
    for index, stage in enumerate(facts):
        row: list[Any] = [index, stage.first, stage.last, stage.calls, text(stage, "params"), text(stage, "macs")]
        if has_costs:
            row.append(f"{stage.cost:,.6g}" if stage.cost != int(stage.cost) else grouped(int(stage.cost)))
        crossing = text(stage, "crossing_bytes") if index < len(facts) - 1 else NOTHING
        rows.append([*row, percent(stage.share), crossing, text(stage, "activation_bytes")])
    return Report(rows, headers, f"rll{'r' * (len(headers) - 3)}", sections=[below])
