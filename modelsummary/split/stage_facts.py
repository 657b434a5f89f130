"""Facts of stages as plain data: counts, bytes, costs; and their table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from modelsummary.capture.templates import BatchSize
from modelsummary.capture.trace import Trace
from modelsummary.errors import SplitError
from modelsummary.layer_info import LayerInfo
from modelsummary.operators.tensor_bytes import nbytes_of, numel_of
from modelsummary.record.events import Event, Value
from modelsummary.split.call_costs import seconds_of_calls, weight_shares
from modelsummary.split.choose import Choice
from modelsummary.split.schedule import StageLoad
from modelsummary.split.stage_parts import StagePart
from modelsummary.tables import Report
from modelsummary.units import NOTHING, auto_prefix, format_number, grouped, percent, symbol

__all__ = ["Crossing", "StageFacts", "facts_of_parts", "load_of", "loads_of", "stage_table"]

_EXACT = 100  # characters of a table with full numbers
_SCALED = ("params", "macs", "crossing_bytes", "activation_bytes")


@dataclass(frozen=True)
class StageFacts:
    """The facts of one stage, for the recorded batch.

    Attributes:
        first: the first call: FQN of a module, or ``add in layers.3`` for a function.
        last: the last call.
        calls: number of modules and functions that the stage calls.
        params: elements of its parameters; a parameter that several stages hold counts in each.
        param_bytes, buffer_bytes: bytes of its parameters and of its buffers.
        macs: multiply-adds of one forward.
        cost: the cost that was balanced, in its unit.
        share: ``cost`` divided by the cost of all stages, 0 to 1.
        crossing_bytes: bytes of the tensors that cross into the next stage.
        crossing_tensors: number of these tensors.
        activation_bytes: bytes of the tensors that its calls make.
        forward_seconds, backward_seconds: measured time of its calls; None if not measured.
        weight_seconds: the part of ``backward_seconds`` that computes gradients of weights alone, by the kernels of a
            step on shapes; None if not measured, or if the step does not run.

    >>> from modelsummary import Statistics
    >>> model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
    >>> first = Statistics(model, (2, 8)).split(2).facts[0]  # 2 x 8 x 16 MACs; 2 x 16 floats of 4 bytes cross
    >>> first.macs, first.share, first.crossing_bytes
    (256, 0.5, 128)
    """

    first: str
    last: str
    calls: int
    params: int
    param_bytes: int
    buffer_bytes: int
    macs: int
    cost: float
    share: float
    crossing_bytes: int
    crossing_tensors: int
    activation_bytes: int
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    weight_seconds: float | None = None


@dataclass(frozen=True)
class Crossing:
    """A tensor that crosses into a stage.

    Attributes:
        shape: its shape for the recorded batch.
        sizes: its shape with a ``BatchSize`` for each size that follows the batch, and None for one that varies in
            another way.
        dtype: its dtype.
        requires_grad: whether it takes a gradient.
    """

    shape: tuple[int, ...]
    sizes: tuple[int | BatchSize | None, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, value: Value, written: Collection[int] = ()) -> Crossing:
        """Return the crossing of a recorded value.

        Args:
            written: ids of memory into which a tensor with a gradient was written before.
        """
        requires_grad = value.requires_grad or any(storage in written for storage in value.storages[:1])
        return cls(value.shape, value.sizes, value.dtype, requires_grad)

    def at(self, batch_size: int | None) -> torch.Tensor:
        """Return a meta tensor like it for a batch size; None: the recorded one.

        Raise ``SplitError`` if its shape at another batch size is not known.
        """
        shape = self.shape
        if batch_size is not None:
            if None in self.sizes:
                raise SplitError(
                    f"the shape of a crossing tensor, {list(shape)}, is known for the recorded batch only; leave "
                    "microbatch_size out"
                )
            shape = tuple(size.at(batch_size) if isinstance(size, BatchSize) else size or 0 for size in self.sizes)
        return torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=self.requires_grad)


def loads_of(facts: Sequence[StageFacts], seconds: Callable[[StageFacts], float], backward: float) -> list[StageLoad]:
    """Return the loads of stages whose forward takes ``seconds(facts)``.

    The backward takes ``backward`` times as long, half of it for the inputs and half for the weights.
    """
    return [load_of(stage, (time := seconds(stage)), time * backward / 2, time * backward / 2) for stage in facts]


def load_of(facts: StageFacts, forward: float, backward_input: float, backward_weight: float) -> StageLoad:
    """Return the load of a stage with these times."""
    return StageLoad(forward, backward_input, backward_weight, facts.crossing_bytes, facts.activation_bytes)


def facts_of_parts(
    choice: Choice,
    parts: Sequence[StagePart],
    held: Sequence[Sequence[Tensor]],
    rows: Sequence[LayerInfo],
    step: Callable[[], Trace | None],
) -> list[StageFacts]:
    """Return the facts of each part.

    Args:
        held: the parameters and buffers of each part.
        step: returns the trace of a step, or None if it does not run; called if a backward was measured.
    """
    sequence, costs = choice.sequence, choice.costs
    forward, backward = seconds_of_calls(costs.by, sequence, rows)
    trace = step() if backward else None
    shares = weight_shares(trace, sequence) if trace is not None else []
    of_weights = [seconds * share for seconds, share in zip(backward, shares, strict=bool(shares))]
    total = sum(costs.costs)
    facts = []
    for index, (part, tensors, (begin, end)) in enumerate(zip(parts, held, choice.ranges, strict=True)):
        cost = sum(costs.costs[begin:end])
        unique = {id(tensor): tensor for tensor in tensors}.values()
        parameters = [tensor for tensor in unique if isinstance(tensor, nn.Parameter)]
        crossing = part.gives if index < len(parts) - 1 else []
        facts.append(
            StageFacts(
                first=_name(part.events[0]),
                last=_name(part.events[-1]),
                calls=len(part.events),
                params=sum(map(numel_of, parameters)),
                param_bytes=sum(map(nbytes_of, parameters)),
                buffer_bytes=sum(nbytes_of(tensor) for tensor in unique if not isinstance(tensor, nn.Parameter)),
                macs=sum(call.macs for call in sequence.calls[begin:end]),
                cost=cost if costs.unit == 1.0 else cost * costs.unit,
                share=cost / total,
                crossing_bytes=sum(value.nbytes for value in crossing),
                crossing_tensors=len(crossing),
                activation_bytes=sum(map(sequence.activation_bytes, range(begin, end))),
                forward_seconds=sum(forward[begin:end]) if forward else None,
                backward_seconds=sum(backward[begin:end]) if backward else None,
                weight_seconds=sum(of_weights[begin:end]) if of_weights else None,
            )
        )
    return facts


def _name(event: Event) -> str:
    """Return the FQN of a module, or the name of a function and the module that calls it."""
    inside = event.parent.fqn if event.parent is not None and not event.is_module else ""
    return f"{event.name} in {inside}" if inside else event.name


def stage_table(facts: Sequence[StageFacts], by: str, below: Sequence[str]) -> Report:
    """Return the facts of stages as a table; in suitable units if full numbers make it wide.

    Args:
        by: what was balanced.
        below: lines below the table.
    """
    report = _table(facts, by, below, {})
    if report.width <= _EXACT:
        return report
    prefixes = {name: auto_prefix(max(getattr(stage, name) for stage in facts)) for name in _SCALED}
    return replace(_table(facts, by, below, prefixes), optional=("Last", "Calls", "Share"))


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
