"""Modules whose input is made a ``DTensor`` once, for all column-parallel layers in them that take it.

Each column-parallel layer reduces the gradient of its input over the ranks. Where query, key and value take the same
tensor, and it is the input of a module around them, one reduction is enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelsummary.parallel.derive import Layer
from modelsummary.parallel.record_calls import Calls
from modelsummary.parallel.stream import Stream
from modelsummary.record.events import Event, Value, values_in

__all__ = ["PreparedInput", "prepared_inputs"]


@dataclass(frozen=True)
class PreparedInput:
    """A module whose input is prepared.

    Attributes:
        fqn: of the module.
        position: of the input among the positional arguments, or its name among the others.
        n_positional: positional arguments of each call.
        values: the input of each call.
        columns: FQNs of the layers that take it.
    """

    fqn: str
    position: int | str
    n_positional: int
    values: tuple[Value, ...]
    columns: tuple[str, ...]

    def options(self, before: str, after: str) -> dict[str, Any]:
        """Return the arguments of ``PrepareModuleInput`` for a layout before and after."""
        if isinstance(self.position, str):
            layouts: dict[str, Any] = {
                "input_kwarg_layouts": {self.position: before},
                "desired_input_kwarg_layouts": {self.position: after},
            }
        else:
            places = range(self.n_positional)
            layouts = {
                "input_layouts": tuple(before if place == self.position else None for place in places),
                "desired_input_layouts": tuple(after if place == self.position else None for place in places),
            }
        return {**layouts, "use_local_output": False}


def prepared_inputs(
    calls: Calls, layers: Mapping[str, Layer], stream: Stream | None = None, *, least: int = 2
) -> list[PreparedInput]:
    """Return the modules in which column-parallel layers alone, ``least`` of them or more, take an input.

    One layer is enough if the input is a chunk of the sequence: the module then sees the whole sequence.
    """
    found: dict[tuple[str, int | str], list[PreparedInput]] = {}
    for event in calls.entered:
        if event.parent is None or event.fqn in layers:
            continue
        for position, value in (*enumerate(event.args), *event.kwargs.items()):
            if not isinstance(value, Value):
                continue
            columns = _columns_alone(calls, layers, event, value)
            is_chunk = stream is not None and stream.layout_at(value, calls.entered[event][0]) is not None
            if len(columns) >= (1 if is_chunk else least):
                one = PreparedInput(event.fqn, position, len(event.args), (value,), tuple(columns))
                found.setdefault((event.fqn, position), []).append(one)
    merged = [_merged(each) for (fqn, _), each in found.items() if len(each) == calls.n_calls[fqn]]
    kept: list[PreparedInput] = []
    for each in merged:  # outer modules come first; inner ones need not prepare the same input again
        if each is not None and not any(set(each.columns) & set(outer.columns) for outer in kept):
            kept.append(each)
    return kept


def _merged(calls: list[PreparedInput]) -> PreparedInput | None:
    """Return the calls of one module as one; None if they differ."""
    first = calls[0]
    facts = {(each.position, each.n_positional, each.columns) for each in calls}
    if len(facts) > 1:
        return None
    values = tuple(each.values[0] for each in calls)
    return PreparedInput(first.fqn, first.position, first.n_positional, values, first.columns)


def _columns_alone(calls: Calls, layers: Mapping[str, Layer], module: Event, value: Value) -> list[str]:
    """Return the column-parallel layers in a call that take a value; none if anything else in the call takes it."""
    begin, end = calls.entered[module]
    found: list[str] = []
    for event in calls.events[begin:end]:
        if value in values_in((event.args, event.kwargs)):
            layer = layers.get(event.fqn) if event.is_module else None
            if layer is None or layer.role not in ("column", "head"):
                return []
            found.append(event.fqn)
    if any(value in values_in(inner.result) for inner in (module, *module.children)):
        return []
    return found
