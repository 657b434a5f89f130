"""The memory of an observed step: bytes alive at each operator, what is kept, and the peak of each call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from modelsummary.capture.trace import Trace, bytes_alive
from modelsummary.layer_info import CallKey
from modelsummary.memory.estimate import CATEGORIES, MemoryEstimate, TimelinePoint
from modelsummary.operators.operator_calls import OperatorCall

__all__ = ["RowMemory", "Workspaces", "by_call", "estimate_of", "timeline_of"]

Workspaces = Callable[[OperatorCall], int] | None  # bytes that an operator takes for itself; None: not counted


@dataclass
class RowMemory:
    """Memory of one call of a module: bytes it first saved for the backward, and the most bytes alive in it."""

    activation_bytes: int = 0
    peak_bytes: int = 0


def timeline_of(trace: Trace, workspaces: Workspaces) -> list[TimelinePoint]:
    """Return the bytes alive while each operator of a trace runs."""
    n_operators = len(trace.operators)
    changes = [[0] * (n_operators + 1) for _ in CATEGORIES]
    for storage in trace.storages:
        series = changes[CATEGORIES.index(storage.kind)]
        series[max(storage.born, 0)] += storage.nbytes
        if storage.died is not None:
            series[max(storage.died, 0)] -= storage.nbytes
    held = [0] * len(CATEGORIES)
    points = []
    spaces = _workspace_of_each(trace, workspaces)
    for number, (name, (_, phase, row)) in enumerate(zip(trace.names, trace.operators, strict=True)):
        held = [nbytes + series[number] for nbytes, series in zip(held, changes, strict=True)]
        fqn = None if row is None else row[0]
        points.append(TimelinePoint(name, fqn, phase, (*held[:-1], spaces[number])))
    return points


def _workspace_of_each(trace: Trace, workspaces: Workspaces) -> list[int]:
    """Return the workspace of each operator in bytes; 0 if it is not known."""
    spaces = [0] * len(trace.operators)
    if workspaces is None:
        return spaces
    for number, nbytes in trace.clones.items():
        spaces[number] = nbytes
    known: dict[int, int] = {}
    for number, (run, _, _) in enumerate(trace.operators):
        if id(run.call) not in known:
            known[id(run.call)] = workspaces(run.call)
        spaces[number] = max(known[id(run.call)], spaces[number])
    return spaces


def estimate_of(trace: Trace, workspaces: Workspaces) -> MemoryEstimate:
    """Return the memory of a step."""
    timeline = timeline_of(trace, workspaces)

    def total(kind: str) -> int:
        return sum(storage.nbytes for storage in trace.storages if storage.kind == kind)

    return MemoryEstimate(
        mode="train" if trace.train else "inference",
        device=trace.device,
        optimizer=trace.optimizer,
        params=total("params"),
        buffers=total("buffers"),
        grads=sum(storage.nbytes for storage in trace.storages if storage.kind == "grads" and storage.died is None),
        optimizer_state=total("optimizer_state"),
        inputs=total("inputs"),
        activations=total("activations"),
        held_after_forward=trace.held_after_forward,
        peak=max(point.total for point in timeline),
        timeline=timeline,
        execution=trace.execution,
        notes=list(trace.notes),
    )


def by_call(trace: Trace, workspaces: Workspaces) -> dict[CallKey, RowMemory]:
    """Return the memory of each module call: bytes it saved first, and the most bytes alive in it."""
    saved: defaultdict[CallKey | None, int] = defaultdict(int)
    for storage in trace.saved:
        saved[storage.row] += storage.nbytes
    alive = bytes_alive(trace.storages, len(trace.operators))
    held = [sum(parts) for parts in zip(alive, _workspace_of_each(trace, workspaces), strict=True)]
    return {call.key: RowMemory(saved[call.key], max(held[call.begin : call.end], default=0)) for call in trace.calls}
