"""Pictures of steps: stacked bars of seconds by cause, and traces of their items."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelsummary.cluster.pipeline import ItemSpan
from modelsummary.extras import axes_for
from modelsummary.text_files import saved

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["stacked_bars", "write_trace"]


def stacked_bars(bars: Mapping[str, Mapping[str, float]], axes: Axes | None = None) -> Axes:
    """Draw one horizontal bar per entry, stacked by cause.

    Args:
        bars: label -> seconds by cause.
        axes: matplotlib axes to draw on; None: new ones.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    axes = axes_for(axes, figsize=(9, 1 + 0.4 * len(bars)))
    labels = list(bars)
    begin = [0.0] * len(labels)
    for cause in dict.fromkeys(name for seconds in bars.values() for name, value in seconds.items() if value):
        widths = [bars[label].get(cause, 0.0) for label in labels]
        axes.barh(labels, widths, left=begin, label=cause)
        begin = [start + width for start, width in zip(begin, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a step")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return axes


def write_trace(spans: Iterable[ItemSpan], path: str | PathLike[str]) -> Path:
    """Write the items of a step as trace events, one row for each resource, and return the path.

    Raises:
        InputError: the file cannot be written.
    """
    events: list[dict[str, Any]] = []
    threads: dict[str, int] = {}
    for span in sorted(spans, key=lambda span: span.row):
        if span.row not in threads:
            threads[span.row] = len(threads)
            thread = {"pid": 1, "tid": threads[span.row]}
            events.append({"ph": "M", "name": "thread_name", **thread, "args": {"name": span.row}})
        times = {"ts": 1e6 * span.begin, "dur": 1e6 * (span.end - span.begin)}
        events.append({"ph": "X", "name": span.name, "pid": 1, "tid": threads[span.row], **times, "args": span.facts})
    return saved(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), path)
