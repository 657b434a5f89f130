"""Integer costs of the calls of a sequence."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from modelsummary.capture.trace import Trace
from modelsummary.errors import InputError, close_to
from modelsummary.latency.estimate import LatencyEstimate
from modelsummary.layer_info import CallKey, LayerInfo
from modelsummary.operators.tensor_bytes import nbytes_of, numel_of
from modelsummary.operators.weight_gradients import of_weights_alone
from modelsummary.record.events import Event, attributes_in
from modelsummary.split.legal_cuts import CallSequence
from modelsummary.split.stage import find

__all__ = ["COSTS", "CallCosts", "call_costs", "check_by", "held_by_calls", "seconds_of_calls", "weight_shares"]

By = str | LatencyEstimate | Mapping[str, float] | Callable[[LayerInfo], float]
COSTS = ("macs", "flops", "params", "param_bytes", "activation_bytes", "latency")
_SCALE = 2**40  # fractional costs are scaled to integers with this sum


@dataclass(frozen=True)
class CallCosts:
    """The costs of the calls of a sequence.

    Attributes:
        name: the kind of cost, such as ``"macs"``; ``"cost"`` for the user's own.
        costs: one integer per call.
        unit: value of 1 in the user's unit; 1.0 unless the costs were scaled.
        by: what the user passed.
    """

    name: str
    costs: list[int]
    unit: float = 1.0
    by: By = "macs"


def check_by(by: By, rows: Sequence[LayerInfo]) -> None:
    """Raise ``InputError`` for an unknown kind of cost, or for costs of layers that were not called."""
    if isinstance(by, Mapping):
        _checked(by, rows)
    elif by == "latency" or isinstance(by, LatencyEstimate):
        _seconds(by, rows)
    elif not callable(by) and by not in COSTS:
        suggestion = close_to(by, COSTS) if isinstance(by, str) else ""
        kinds = ", ".join(COSTS)
        raise InputError(
            f"by must be one of {kinds}, a result of estimate_latency, a dict FQN -> cost, or a function, got "
            f"{by!r}{suggestion}"
        )


def call_costs(by: By, sequence: CallSequence, model: nn.Module, rows: Sequence[LayerInfo]) -> CallCosts:
    """Return the cost of each call.

    Args:
        by: as in ``Statistics.split``; already checked by ``check_by``.
        rows: rows of the tree, for costs given by row.

    Raises:
        InputError: a cost is not a number >= 0, or all costs are 0.
    """
    calls = sequence.calls
    if by == "latency" or isinstance(by, LatencyEstimate):
        costs = replace(_scaled(_of_rows(_seconds(by, rows), sequence)), name="latency")
    elif isinstance(by, str):
        costs = CallCosts(by, _named(by, sequence, model))
    elif isinstance(by, Mapping):
        costs = _scaled(_of_rows(_checked(by, rows), sequence))
    else:
        by_row = {row.key: _cost_of(by, row) for row in rows if row.executed and row.is_leaf}
        costs = _scaled(_of_rows(by_row, sequence))
    costs = replace(costs, by=by)
    if not any(costs.costs):
        others = "'activation_bytes'" if by != "activation_bytes" else "'macs'"
        raise InputError(
            f"by={by!r:.60} gives each of the {len(calls)} calls a cost of 0; choose another, such as {others}"
        )
    return costs


def _named(by: str, sequence: CallSequence, model: nn.Module) -> list[int]:
    if by in ("macs", "flops"):
        return [call.macs * (2 if by == "flops" else 1) for call in sequence.calls]
    if by in ("params", "param_bytes"):
        counted: set[int] = set()
        costs = []
        for tensors in held_by_calls(sequence, model):
            new = {
                id(tensor): tensor
                for tensor in tensors
                if isinstance(tensor, nn.Parameter) and id(tensor) not in counted
            }
            counted.update(new)
            costs.append(
                sum(numel_of(parameter) if by == "params" else nbytes_of(parameter) for parameter in new.values())
            )
        return costs
    return [sequence.activation_bytes(index) for index in range(len(sequence.calls))]


def held_by_calls(sequence: CallSequence, model: nn.Module) -> list[list[Tensor]]:
    """Return the parameters and buffers that each call uses."""
    tensors_of: dict[str, list[Tensor]] = {}
    held: list[list[Tensor]] = []
    for call in sequence.calls:
        tensors: list[Tensor] = []
        if call.is_module:
            if call.fqn not in tensors_of:
                module = model.get_submodule(call.fqn)
                tensors_of[call.fqn] = [*module.parameters(), *module.buffers()]
            tensors.extend(tensors_of[call.fqn])
        tensors += [find(model, attribute.fqn) for attribute in attributes_in((call.args, call.kwargs))]
        held.append(tensors)
    return held


# ------------------------------------------------------------------------------------------ costs of rows


def _checked(by: Mapping[str, float], rows: Sequence[LayerInfo]) -> dict[CallKey, float]:
    """Return costs by call from costs by FQN: the calls of a module share its cost evenly."""
    calls: dict[str, list[CallKey]] = {}
    for row in rows:
        if row.executed:
            calls.setdefault(row.fqn, []).append(row.key)
    unknown = [fqn for fqn in by if fqn not in calls]
    if unknown:
        raise InputError(f"by gives a cost to {unknown[0]!r}, but no layer of this name was called")
    return {key: _checked_cost(fqn, cost) / len(calls[fqn]) for fqn, cost in by.items() for key in calls[fqn]}


def _milliseconds(by: By, rows: Sequence[LayerInfo]) -> dict[CallKey, tuple[float | None, float | None]]:
    """Return the latency of each call, forward and backward: of an estimate that is ``by``, else of the rows.

    The rows have the newest result of each kind. What was measured is preferred to what was estimated.
    """
    if isinstance(by, LatencyEstimate):
        return {**by.calls}
    prefix = "" if any(row.latency_ms is not None for row in rows) else "estimated_"
    return {
        row.key: (getattr(row, f"{prefix}latency_ms"), getattr(row, f"{prefix}backward_latency_ms"))
        for row in rows
        if row.executed
    }


def _seconds(by: By, rows: Sequence[LayerInfo]) -> dict[CallKey, float]:
    """Return the latency of each call in seconds. Raise ``InputError`` if there is none, or it is of another model."""
    times = {key: forward / 1e3 for key, (forward, _) in _milliseconds(by, rows).items() if forward is not None}
    if isinstance(by, LatencyEstimate) and times.keys() != {row.key for row in rows if row.executed}:
        raise InputError(
            f"by={by!r}: expected an estimate of this model, whose calls it has; pass the result of its "
            "estimate_latency(...)"
        )
    if not times:
        raise InputError(
            "by='latency': nothing was measured or estimated; call measure_latency() or estimate_latency(spec) first, "
            "or pass by={FQN: seconds}"
        )
    return times


def seconds_of_calls(by: By, sequence: CallSequence, rows: Sequence[LayerInfo]) -> tuple[list[float], list[float]]:
    """Return the seconds of each call, forward and backward; empty lists where they are not known."""
    times = _milliseconds(by, rows)
    phases = []
    for phase in (0, 1):
        seconds = {key: time / 1e3 for key, value in times.items() if (time := value[phase]) is not None}
        phases.append(_of_rows(seconds, sequence) if any(seconds.values()) else [])
    return phases[0], phases[1]


def weight_shares(trace: Trace, sequence: CallSequence) -> list[float]:
    """Return the share of the backward of each call that computes gradients of weights alone.

    Kernels count by their multiply-adds, and in a call whose backward has none by the bytes that they move.
    """
    operators = trace.operators
    gradients = frozenset(storage.identity for storage in trace.storages if storage.kind == "grads")
    alone = of_weights_alone(operators, [operator.row for operator in operators], gradients)
    around = {call.key: call.parent for call in trace.calls}
    work: defaultdict[tuple[str, bool], Counter[CallKey]] = defaultdict(Counter)  # kind, of weights -> by call
    for index, operator in enumerate(operators):
        call, row = operator.run.call, operator.row
        if operator.phase != "backward" or not call.rule.launches_kernel:
            continue
        sizes = {"macs": call.cost.macs, "bytes": call.nbytes}
        while row is not None:  # the work of a module includes what it calls
            for kind, size in sizes.items():
                work[kind, index in alone][row] += size
            row = around.get(row)
    of_calls = {key: _of_rows(by_row, sequence) for key, by_row in work.items()}
    none = [0.0] * len(sequence.calls)
    macs, other_macs, moved, other_moved = (
        of_calls.get((kind, is_alone), none) for kind in ("macs", "bytes") for is_alone in (True, False)
    )
    return [
        one / (one + other) if one + other else least / ((least + rest) or 1.0)
        for one, other, least, rest in zip(macs, other_macs, moved, other_moved, strict=True)
    ]


def _cost_of(by: Callable[[LayerInfo], float], row: LayerInfo) -> float:
    try:
        cost = by(row)
    except Exception as error:
        raise InputError(f"by={by!r:.60} failed for {row.fqn!r} with {type(error).__name__}: {error}") from error
    return _checked_cost(row.fqn, cost)


def _checked_cost(fqn: str, cost: Any) -> float:
    if not isinstance(cost, (int, float)) or not 0 <= cost < float("inf"):
        raise InputError(f"by must give {fqn!r} a cost >= 0, got {cost!r}")
    return float(cost)


def _of_rows(costs: Mapping[CallKey, float], sequence: CallSequence) -> list[float]:
    """Return the cost of each call from costs by row.

    The cost of a module call includes its inner calls. The part that no inner row has is spread over the remaining
    calls by their MACs.
    """
    by_call: list[float] = [0.0] * len(sequence.calls)

    def spread(event: Event) -> float:
        """Set the costs of the calls within ``event``. Return their sum."""
        inner = [child for child in event.children if child in sequence.span] if event not in smallest else []
        total = sum(map(spread, inner))
        cost = costs.get(event.key) if event.is_module else None
        if cost is not None and event in sequence.span and cost > total:
            rest = [index for index in range(*sequence.span[event]) if not by_call[index]]
            rest = rest or list(range(*sequence.span[event]))
            weights = [sequence.calls[index].macs for index in rest]
            weights = weights if any(weights) else [1] * len(rest)
            for index, weight in zip(rest, weights, strict=True):
                by_call[index] += (cost - total) * weight / sum(weights)
            total = cost
        return total

    smallest = set(sequence.calls)
    spread(sequence.record.root)
    return by_call


def _scaled(costs: list[float]) -> CallCosts:
    total = sum(costs)
    if all(cost == int(cost) for cost in costs) or not total:
        return CallCosts("cost", [int(cost) for cost in costs])
    return CallCosts("cost", [round(cost * _SCALE / total) for cost in costs], total / _SCALE)
