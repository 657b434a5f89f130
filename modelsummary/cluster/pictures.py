"""Pictures of steps: stacked bars of seconds by cause, and traces of their items."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import groupby
from operator import itemgetter
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelsummary.cluster.pipeline import ItemSpan
from modelsummary.extras import axes_for
from modelsummary.memory.replay import MemoryBlock, changes_of
from modelsummary.views.chrome_trace import counter_event, name_event, span_event, write_events

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
    axes = axes_for(axes, figsize=(9, 1 + 0.4 * len(bars)), layout="constrained")
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


def write_trace(spans: Iterable[ItemSpan], blocks: Iterable[MemoryBlock], path: str | PathLike[str]) -> Path:
    """Write the items of a step as trace events, one row for each resource, with counters of the ranks' memory.

    Raises:
        InputError: the file cannot be written.
    """
    events: list[dict[str, Any]] = []
    threads: dict[str, int] = {}
    for span in sorted(spans, key=lambda span: span.row):
        if span.row not in threads:
            threads[span.row] = len(threads)
            events.append(name_event("thread_name", threads[span.row], span.row))
        duration = 1e6 * (span.end - span.begin)
        events.append(span_event(span.name, threads[span.row], 1e6 * span.begin, duration, span.facts))
    held: dict[int, Counter[str]] = {}
    for at, changes in groupby(changes_of(blocks), key=itemgetter(0)):
        changed = set()
        for _, is_new, block in changes:
            held.setdefault(block.device, Counter())[block.category] += block.nbytes if is_new else -block.nbytes
            changed.add(block.device)
        for rank in sorted(changed):
            events.append(counter_event(f"memory of rank {rank} (bytes)", 1e6 * at, dict(held[rank])))
    return write_events(events, path)
