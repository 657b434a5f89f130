"""Measured time and predicted memory as trace events, for Perfetto and ``chrome://tracing``.

The format is described in "Trace Event Format",
docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Times are in microseconds.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from modelsummary.errors import InputError
from modelsummary.file_contents import saved
from modelsummary.layer_info import LayerInfo, first_shape, rows_around
from modelsummary.memory.estimate import CATEGORIES, MemoryEstimate
from modelsummary.views.labels import row_label

__all__ = ["counter_event", "name_event", "span_event", "trace_events", "write_events", "write_trace"]

_UNTIMED = 1000  # ns from one operator to the next where no time was measured


class Span(NamedTuple):
    """The time in which a row runs, in whole nanoseconds, so that parts add up exactly."""

    start: int
    duration: int


Spans = dict[LayerInfo, Span]


def write_trace(root: LayerInfo, path: str | PathLike[str], memory: MemoryEstimate | None) -> Path:
    """Write the trace events of a tree to a file and return its path.

    Raises:
        InputError: there is nothing to trace, ``memory`` belongs to another model, or the file cannot be written.
    """
    if memory is not None and not isinstance(memory, MemoryEstimate):
        raise InputError(f"memory must be a MemoryEstimate, as memory() returns it, got {memory!r:.80}")
    fqns = {None, *(row.fqn for row in root.walk())}
    unknown = [point.fqn for point in (memory.timeline if memory is not None else ()) if point.fqn not in fqns]
    if unknown:
        raise InputError(
            f"memory belongs to another model: this one has no module {unknown[0]!r}; pass memory=stats.memory()"
        )
    if memory is None and root.latency_ms is None:
        raise InputError("there is nothing to trace: call measure_latency() first, or pass memory=stats.memory()")
    return write_events(trace_events(root, memory), path)


def write_events(events: list[dict[str, Any]], path: str | PathLike[str]) -> Path:
    """Write trace events to a file and return its path.

    Raises:
        InputError: the file cannot be written.
    """
    return saved(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), path)


def name_event(kind: str, thread: int, name: str) -> dict[str, Any]:
    """Return the event that names the process (``kind="process_name"``) or a thread (``"thread_name"``)."""
    return {"ph": "M", "name": kind, "pid": 1, "tid": thread, "ts": 0, "args": {"name": name}}


def span_event(name: str, thread: int, begin: float, duration: float, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the event of what runs on a thread for a duration; both times in microseconds."""
    return {"ph": "X", "name": name, "pid": 1, "tid": thread, "ts": begin, "dur": duration, "args": facts}


def counter_event(name: str, time: float, counts: dict[str, int]) -> dict[str, Any]:
    """Return the event that sets counters to values; the time in microseconds."""
    return {"ph": "C", "name": name, "pid": 1, "tid": 0, "ts": time, "args": counts}


def trace_events(root: LayerInfo, memory: MemoryEstimate | None = None) -> list[dict[str, Any]]:
    """Return the events of a forward, of the backward after it if it was measured, and counters of memory.

    The median times are laid end to end in printed order, and in reverse order for the backward. A row's own time comes
    after its children (in the backward, before them). A memory counter is placed in the time of the module whose
    operators need the memory; operators that were not timed are one microsecond apart.
    """
    forward = _spans(root, "self_latency_ms", 0)
    ends = forward[root].duration if forward else 0
    backward = _spans(root, "backward_self_latency_ms", ends, reverse=True)
    events = [name_event("process_name", 0, root.class_name)]
    for thread, (title, phase, spans) in enumerate((("forward", "", forward), ("backward", "backward_", backward)), 1):
        if spans:
            events.append(name_event("thread_name", thread, title))
            events += [_complete(row, spans[row], thread, phase) for row in spans]
    if memory is not None:
        events += _counters(memory, root, {"forward": forward, "backward": backward})
    return events


def _spans(root: LayerInfo, attribute: str, start: int, *, reverse: bool = False) -> Spans:
    """Return start and duration of all rows that were timed; a row lasts as long as it and the rows below it."""
    rows = [row for row in root.walk() if getattr(row, attribute) is not None]
    durations = {row: round(1e6 * getattr(row, attribute)) for row in rows}
    if root not in durations:
        return {}
    # the next row above that was timed
    around = {row: next((above for above in rows_around(row) if above in durations), root) for row in rows[1:]}
    for row in reversed(rows[1:]):
        durations[around[row]] += durations[row]
    spans = {root: Span(start, durations[root])}
    free = dict.fromkeys(rows, 0)  # how much of a row its children have taken so far
    for row in rows[1:]:
        outer, taken = spans[around[row]], free[around[row]]
        offset = outer.duration - taken - durations[row] if reverse else taken
        spans[row] = Span(outer.start + offset, durations[row])
        free[around[row]] += durations[row]
    return spans


def _complete(row: LayerInfo, span: Span, thread: int, phase: str) -> dict[str, Any]:
    facts = {
        "fqn": row.fqn,
        "class": row.class_name,
        "call": row.call_index,
        "input_shape": first_shape(row.input_size),
        "output_shape": first_shape(row.output_size),
        "params": row.num_params,
        "macs": row.macs,
        "self_ms": getattr(row, f"{phase}self_latency_ms"),
    }
    event = span_event(row_label(row), thread, span.start / 1e3, span.duration / 1e3, facts)
    return {**event, "cat": row.class_name}


def _counters(memory: MemoryEstimate, root: LayerInfo, spans_of: dict[str, Spans]) -> Iterator[dict[str, Any]]:
    """Yield the bytes of each category at each operator; times strictly increase, as equal ones would hide points."""
    time = 0
    for phase, points in groupby(memory.timeline, key=lambda point: point.phase):
        spans = spans_of.get(phase, {})
        pending: defaultdict[str | None, list[Span]] = defaultdict(list)  # spans of leaf calls, the next one last
        for row in reversed(spans) if phase == "forward" else spans:
            if row.is_leaf:
                pending[row.fqn].append(spans[row])
        time = max(time, spans[root].start) if spans else time
        for fqn, module_points in groupby(points, key=lambda point: point.fqn):
            held = [point.held for point in module_points]
            step = 1 if spans else _UNTIMED
            if pending[fqn]:
                span = pending[fqn].pop()
                time = max(time, span.start)
                step = max(step, (span.start + span.duration - time) // len(held))
            for bytes_held in held:
                yield counter_event("memory (bytes)", time / 1e3, dict(zip(CATEGORIES, bytes_held, strict=True)))
                time += step
