"""Turn timed runs of a model into latencies of the rows of its tree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median, quantiles

from torch import nn

from modelsummary.capture.backward import BackwardTimer
from modelsummary.capture.calls import keys_of
from modelsummary.capture.modules import named_modules, unwrap
from modelsummary.capture.timer import TimedCall
from modelsummary.layer_info import CallKey, LayerInfo

__all__ = ["IN_THREADS", "TimedRun", "Timings", "fill"]

_NOT_TIMED = "not timed: ignored, or its caller ran a fused or compiled function instead"
_REENTRANT = "its backward runs inside re-entrant checkpointing, which hides it"
_UNREACHED = "the model's result does not depend on it: its backward is timed as part of other modules"
_DIFFER = "runs made different calls: latencies are means, not medians"
IN_THREADS = "modules called in other threads were not timed"
_NOTES = (_NOT_TIMED, _REENTRANT, _UNREACHED, _DIFFER, IN_THREADS)


@dataclass
class TimedRun:
    """Own times of rows in one timed run, in milliseconds.

    Attributes:
        forward, backward: own milliseconds by row; ``backward`` is None if it was not timed.
        forward_ms, backward_ms: milliseconds of the whole model, without the cost of marks.
        unknown: rows whose backward is hidden.
        unreached: rows with autograd nodes that the model's result does not depend on.
    """

    forward: dict[CallKey, float]
    forward_ms: float
    backward: dict[CallKey, float] | None = None
    backward_ms: float = 0.0
    unknown: frozenset[CallKey] = frozenset()
    unreached: frozenset[CallKey] = frozenset()


class Timings:
    """A converter from timed runs of a model to own times of the rows of its tree.

    Args:
        model: the model that was called; it may be compiled.
        root: root of the tree; the time of a call without a row counts for the call around it.
        cost_ms: milliseconds that timing a call costs between its marks, and outside of them.
    """

    def __init__(self, model: nn.Module, root: LayerInfo, cost_ms: tuple[float, float]) -> None:
        self._names = {id(module): fqn for fqn, module in named_modules(unwrap(model))}
        self._rows = {row.key for row in root.walk() if row.executed}
        self._cost = cost_ms

    def run(self, root: TimedCall, backward: BackwardTimer | None = None) -> TimedRun:
        """Return the own times of one run, once its times are settled."""
        keys = keys_of(root.walk(), self._names)
        forward: defaultdict[CallKey, float] = defaultdict(float)
        within, outside = self._cost
        for call in root.walk():
            if call.parent is not None and keys[call] not in self._rows:
                keys[call] = keys[call.parent]
            key = keys[call]
            inner = sum(child.milliseconds for child in call.children)
            forward[key] += max(0.0, call.milliseconds - inner - within - outside * len(call.children))
        run = TimedRun(dict(forward), sum(forward.values()))
        if backward is not None and backward.ran:
            own_ms: defaultdict[CallKey, float] = defaultdict(float, dict.fromkeys(forward, 0.0))
            for call, milliseconds in backward.milliseconds().items():
                own_ms[keys[call]] += milliseconds
            run.backward, run.backward_ms = dict(own_ms), sum(own_ms.values())
            run.unknown = frozenset(keys[call] for call in backward.unknown)
            run.unreached = frozenset(keys[call] for call in backward.unreached) - {("", 0)}
        return run


def fill(root: LayerInfo, runs: Sequence[TimedRun]) -> None:
    """Write medians over runs into the rows, and the reason for missing times into their notes.

    Medians of parts do not add up to the median of the whole: own times are scaled so that the sum over all rows is the
    median of the root. If the runs made different calls, means replace medians.
    """
    rows = list(root.walk())
    for row in rows:
        row.note = "" if row.note in _NOTES else row.note
        for name in ("latency_ms", "self_latency_ms", "latency_share", "latency_iqr_ms"):
            setattr(row, f"backward_{name}", None)
    differ = any(run.forward.keys() != runs[0].forward.keys() for run in runs)
    timed = set().union(*(run.forward for run in runs))
    _note(rows, {row.key for row in rows if row.executed} - timed, _NOT_TIMED)
    _note(rows, {("", 0)} if differ else set(), _DIFFER)
    _fill(rows, "", [run.forward for run in runs], [run.forward_ms for run in runs], use_means=differ)
    backwards = [run for run in runs if run.backward is not None]
    if backwards:
        own_ms = [run.backward or {} for run in backwards]
        _fill(rows, "backward_", own_ms, [run.backward_ms for run in backwards], use_means=differ)
        _note(rows, set().union(*(run.unreached for run in backwards)), _UNREACHED)
        unknown = set().union(*(run.unknown for run in backwards))
        _note(rows, unknown, _REENTRANT)
        for row in rows:
            if row.key in unknown:
                row.backward_latency_ms = row.backward_self_latency_ms = None
                row.backward_latency_share = row.backward_latency_iqr_ms = None


def _note(rows: Sequence[LayerInfo], keys: set[CallKey], note: str) -> None:
    for row in rows:
        if row.key in keys:
            row.note = row.note or note


def _fill(
    rows: Sequence[LayerInfo],
    prefix: str,
    runs: Sequence[dict[CallKey, float]],
    totals: Sequence[float],
    *,
    use_means: bool,
) -> None:
    middle: Callable[[Sequence[float]], float] = mean if use_means else median
    own_ms: dict[LayerInfo, list[float]] = {}
    for row in rows:
        key = row.key
        if row.executed and any(key in run for run in runs):
            own_ms[row] = [run.get(key, 0.0) for run in runs]
    whole = middle(totals)
    middles = {row: middle(times) for row, times in own_ms.items()}
    added = sum(middles.values())
    scale = whole / added if added else 0.0
    sums = {row: middles[row] * scale for row in own_ms}
    total_ms = dict(own_ms)
    for row in reversed(rows):
        parent = row.parent_info
        if row in sums and parent is not None:
            sums[parent] = sums.get(parent, 0.0) + sums[row]
            parent_ms = total_ms.get(parent)
            total_ms[parent] = (
                [a + b for a, b in zip(parent_ms, total_ms[row], strict=True)] if parent_ms else total_ms[row]
            )
    for row in rows:
        is_known = row in sums
        setattr(row, f"{prefix}latency_ms", sums.get(row))
        setattr(row, f"{prefix}self_latency_ms", middles[row] * scale if row in own_ms else (0.0 if is_known else None))
        setattr(row, f"{prefix}latency_share", (sums[row] / whole if whole else 0.0) if is_known else None)
        setattr(row, f"{prefix}latency_iqr_ms", _quartile_distance(total_ms[row]) if is_known else None)


def _quartile_distance(times: Sequence[float]) -> float:
    if len(times) < 2:
        return 0.0
    low, _, high = quantiles(times, n=4, method="inclusive")
    return high - low
