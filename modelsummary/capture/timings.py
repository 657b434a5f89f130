"""From timed runs of a model to latencies of the rows of its tree."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median, quantiles

from torch import nn

from modelsummary.capture.backward import BackwardTimer
from modelsummary.capture.facts import named_modules, unwrap
from modelsummary.capture.timer import TimedCall
from modelsummary.layer_info import LayerInfo

__all__ = ["Run", "Timings", "fill"]

Key = tuple[str, int]  # FQN and number of the call
_NOT_TIMED = "not timed: ignored, or its caller ran a fused or compiled function instead"


@dataclass
class Run:
    """One timed run: own times of rows in milliseconds.

    Attributes:
        forward_ms, backward_ms: of the whole, what the marks cost taken off.
        unknown: rows whose backward could not be seen.
    """

    forward: dict[Key, float]
    forward_ms: float
    backward: dict[Key, float] | None = None
    backward_ms: float = 0.0
    unknown: frozenset[Key] = frozenset()


class Timings:
    """Timed runs of a model as own times of the rows of its tree.

    Args:
        model: what was called; it may be compiled.
        root: of the tree; a call without a row in it belongs to the call around it.
        cost_ms: of timing one call: between its marks, and outside of them.
    """

    def __init__(self, model: nn.Module, root: LayerInfo, cost_ms: tuple[float, float]) -> None:
        self._names = {id(module): fqn for fqn, module in named_modules(unwrap(model))}
        self._rows = {(row.fqn, row.call_index) for row in root.walk() if row.executed}
        self._cost = cost_ms

    def run(self, root: TimedCall, backward: BackwardTimer | None = None) -> Run:
        """The own times of one run that has settled."""
        keys: dict[TimedCall, Key] = {}
        counts: Counter[str] = Counter()
        forward: defaultdict[Key, float] = defaultdict(float)
        within, outside = self._cost
        for call in root.walk():
            fqn = self._names.get(id(call.module), "" if call.parent is None else None)
            key = (fqn or "", counts[fqn or ""])
            if fqn is not None:
                counts[fqn] += 1
            if call.parent is not None and (fqn is None or key not in self._rows):
                key = keys[call.parent]
            keys[call] = key
            inner = sum(child.milliseconds for child in call.children)
            forward[key] += max(0.0, call.milliseconds - inner - within - outside * len(call.children))
        run = Run(dict(forward), sum(forward.values()))
        if backward is not None:
            own: defaultdict[Key, float] = defaultdict(float, dict.fromkeys(forward, 0.0))
            for call, milliseconds in backward.milliseconds().items():
                own[keys[call]] += milliseconds
            run.backward, run.backward_ms = dict(own), sum(own.values())
            run.unknown = frozenset(keys[call] for call in backward.unknown)
        return run


def fill(root: LayerInfo, runs: Sequence[Run]) -> None:
    """Write medians over runs into the tree.

    Medians of parts do not add up to the median of the whole: own times are scaled by what is missing, so that the sum
    over all rows is the median of the root.
    """
    rows = list(root.walk())
    timed = set().union(*(run.forward for run in runs))
    for row in rows:
        is_timed = not row.executed or (row.fqn, row.call_index) in timed
        row.note = row.note.removeprefix(_NOT_TIMED) if is_timed else row.note or _NOT_TIMED
    _fill(rows, "", [run.forward for run in runs], [run.forward_ms for run in runs])
    backwards = [run for run in runs if run.backward is not None]
    if backwards:
        unknown = frozenset().union(*(run.unknown for run in backwards))
        _fill(rows, "backward_", [run.backward or {} for run in backwards], [run.backward_ms for run in backwards])
        for row in rows:
            if (row.fqn, row.call_index) in unknown:
                row.backward_latency_ms = row.backward_self_latency_ms = None
                row.backward_latency_share = row.backward_latency_iqr_ms = None
                row.note = row.note or "its backward runs inside of re-entrant checkpointing, out of sight"


def _fill(rows: Sequence[LayerInfo], prefix: str, runs: Sequence[dict[Key, float]], totals: Sequence[float]) -> None:
    own: dict[LayerInfo, list[float]] = {}
    for row in rows:
        key = (row.fqn, row.call_index)
        if row.executed and any(key in run for run in runs):
            own[row] = [run.get(key, 0.0) for run in runs]
    whole = median(totals)
    medians = {row: median(times) for row, times in own.items()}
    if not any(medians.values()):  # each branch ran in less than half of the runs
        medians = {row: mean(times) for row, times in own.items()}
    added = sum(medians.values())
    scale = whole / added if added else 0.0
    sums = {row: medians[row] * scale for row in own}
    spreads = dict(own)
    for row in reversed(rows):
        parent = row.parent_info
        if row in sums and parent is not None:
            sums[parent] = sums.get(parent, 0.0) + sums[row]
            around = spreads.get(parent)
            spreads[parent] = [a + b for a, b in zip(around, spreads[row], strict=True)] if around else spreads[row]
    for row in rows:
        is_known = row in sums
        setattr(row, f"{prefix}latency_ms", sums.get(row))
        setattr(row, f"{prefix}self_latency_ms", medians[row] * scale if row in own else (0.0 if is_known else None))
        setattr(row, f"{prefix}latency_share", (sums[row] / whole if whole else 0.0) if is_known else None)
        setattr(row, f"{prefix}latency_iqr_ms", _quartile_distance(spreads[row]) if is_known else None)


def _quartile_distance(times: Sequence[float]) -> float:
    if len(times) < 2:
        return 0.0
    low, _, high = quantiles(times, n=4, method="inclusive")
    return high - low
