"""``RowLatencies``: the latencies of the rows of a tree, from timed runs of its model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median, quantiles
from typing import NamedTuple

from torch import nn

from modelsummary.capture.backward import BackwardTimer
from modelsummary.capture.calls import keys_of
from modelsummary.capture.modules import named_modules, unwrap
from modelsummary.capture.timer import TimedCall
from modelsummary.latency.row_times import Columns, show, with_inner
from modelsummary.layer_info import CallKey, LayerInfo

__all__ = ["IN_THREADS", "RowLatencies", "TimedRun", "Timings", "latencies_of"]

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


class RowLatencies(NamedTuple):
    """The latencies of the rows of a tree.

    Attributes:
        columns: the figures of each row.
        notes: the reasons for missing or unusual figures, by row.
    """

    columns: Columns
    notes: Mapping[CallKey, str]

    def show(self, root: LayerInfo) -> None:
        """Write the figures and notes into the rows, and remove what an earlier measurement wrote."""
        show(root, self.columns)
        for row in root.walk():
            row.note = "" if row.note in _NOTES else row.note
            row.note = row.note or self.notes.get(row.key, "")


def latencies_of(root: LayerInfo, runs: Sequence[TimedRun]) -> RowLatencies:
    """Return medians over runs for the rows below ``root``.

    Medians of parts do not add up to the median of the whole: own times are scaled so that the sum over all rows is the
    median of the root. If the runs made different calls, means replace medians.
    """
    called = [row.key for row in root.walk() if row.executed]
    differ = any(run.forward.keys() != runs[0].forward.keys() for run in runs)
    backwards = [run for run in runs if run.backward is not None]
    columns: dict[str, dict[CallKey, float | None]] = {}
    for prefix, own_ms, totals in (
        ("", [run.forward for run in runs], [run.forward_ms for run in runs]),
        ("backward_", [run.backward or {} for run in backwards], [run.backward_ms for run in backwards]),
    ):
        columns |= {prefix + name: figures for name, figures in _columns(root, called, own_ms, totals, differ).items()}
    unknown = set().union(*(run.unknown for run in backwards))
    for name, figures in columns.items():
        if name.startswith("backward_"):
            figures.update(dict.fromkeys(unknown))
    reasons: tuple[tuple[str, Iterable[CallKey]], ...] = (
        (_NOT_TIMED, set(called).difference(*(run.forward for run in runs))),
        (_DIFFER, [("", 0)] if differ else []),
        (_UNREACHED, set().union(*(run.unreached for run in backwards))),
        (_REENTRANT, unknown),
    )
    notes: dict[CallKey, str] = {}
    for note, keys in reasons:
        for key in keys:
            notes.setdefault(key, note)
    return RowLatencies(columns, notes)


def _columns(
    root: LayerInfo,
    called: Sequence[CallKey],
    runs: Sequence[Mapping[CallKey, float]],
    totals: Sequence[float],
    use_means: bool,
) -> dict[str, dict[CallKey, float | None]]:
    """Return the columns of a phase from the own times of each run, and the time of the model in each."""
    middle: Callable[[Sequence[float]], float] = mean if use_means else median
    keys = [key for key in called if any(key in run for run in runs)]
    runs = [{key: run.get(key, 0.0) for key in keys} for run in runs]
    whole = middle(totals) if runs else 0.0
    self_ms = {key: middle([run[key] for run in runs]) for key in keys}
    added = sum(self_ms.values())
    self_ms = {key: milliseconds * (whole / added if added else 0.0) for key, milliseconds in self_ms.items()}
    total_ms = with_inner(root, self_ms)
    inner_runs = [with_inner(root, run) for run in runs]
    return {
        "latency_ms": {**total_ms},
        "self_latency_ms": {**dict.fromkeys(total_ms, 0.0), **self_ms},
        "latency_share": {key: milliseconds / whole if whole else 0.0 for key, milliseconds in total_ms.items()},
        "latency_iqr_ms": {key: _quartile_distance([run[key] for run in inner_runs]) for key in total_ms},
    }


def _quartile_distance(times: Sequence[float]) -> float:
    if len(times) < 2:
        return 0.0
    low, _, high = quantiles(times, n=4, method="inclusive")
    return high - low
