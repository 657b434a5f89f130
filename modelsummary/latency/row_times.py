"""Times of the rows of a tree: a result holds them by column and row, and ``show`` alone writes them into the tree."""

from __future__ import annotations

from collections.abc import Mapping

from modelsummary.layer_info import CallKey, LayerInfo

__all__ = ["Columns", "show", "with_inner"]

Columns = Mapping[str, Mapping[CallKey, float | None]]
"""Attribute of ``LayerInfo`` -> key of a row -> figure. A row without a figure has None."""


def with_inner(root: LayerInfo, self_times: Mapping[CallKey, float]) -> dict[CallKey, float]:
    """Return the time of each row with everything inside it; no time for a row in which nothing has one.

    Args:
        self_times: times of rows without the rows below.
    """
    times = dict(self_times)
    for row in reversed(list(root.walk())):
        if row.parent_info is not None and row.key in times:
            times[row.parent_info.key] = times.get(row.parent_info.key, 0.0) + times[row.key]
    return times


def show(root: LayerInfo, columns: Columns) -> None:
    """Write the columns of a result into the rows below ``root``, and replace the figures of an earlier result."""
    for row in root.walk():
        for name, figures in columns.items():
            setattr(row, name, figures.get(row.key))
