"""Modules whose input or result is made a ``DTensor`` once, for all column-parallel layers that take it.

Each column-parallel layer reduces the gradient of its input over the ranks. Where query, key and value take the same
tensor, and it is the input of a module around them, or the result of a module that nothing else takes, one reduction is
enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from modelsummary.capture.templates import leaves_of
from modelsummary.parallel.derive import Layer
from modelsummary.parallel.record_calls import Calls
from modelsummary.parallel.stream import Stream
from modelsummary.record.events import Event, Value, values_in

__all__ = ["PreparedInput", "PreparedOutput", "prepared_inputs", "prepared_outputs"]


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


@dataclass(frozen=True)
class PreparedOutput:
    """A module whose result is prepared.

    Attributes:
        fqn: of the module, which returns one tensor.
        values: the result of each call.
        columns: FQNs of the layers that take it.
    """

    fqn: str
    values: tuple[Value, ...]
    columns: tuple[str, ...]


def prepared_inputs(
    calls: Calls, layers: Mapping[str, Layer], stream: Stream | None = None, *, least: int = 2
) -> list[PreparedInput]:
    """Return the modules in which column-parallel layers alone, ``least`` of them or more, take an input.

    One layer is enough if the input is a chunk of the sequence: the module then sees the whole sequence. A tensor that
    a call takes as several arguments is not prepared: torch would prepare each argument, and reduce its gradient.
    """
    by_argument: dict[tuple[str, int | str], list[PreparedInput]] = {}
    for event in calls.entered:
        if event.parent is None or event.fqn in layers:
            continue
        for position, value in (*enumerate(event.args), *event.kwargs.items()):
            taken = [leaf for leaf in leaves_of((event.args, event.kwargs)) if leaf is value]
            if not isinstance(value, Value) or len(taken) > 1:
                continue
            columns = _columns_alone(calls, layers, event, value)
            is_chunk = stream is not None and stream.placement_at(value, calls.entered[event][0]) is not None
            if len(columns) >= (1 if is_chunk else least):
                prepared_input = PreparedInput(event.fqn, position, len(event.args), (value,), tuple(columns))
                by_argument.setdefault((event.fqn, position), []).append(prepared_input)
    merged = [_merged(calls, inputs) for (fqn, _), inputs in by_argument.items() if len(inputs) == calls.n_calls[fqn]]
    kept: list[PreparedInput] = []
    for merged_input in merged:  # outer modules come first; inner ones need not prepare the same input again
        if merged_input is not None and not any(set(merged_input.columns) & set(outer.columns) for outer in kept):
            kept.append(merged_input)
    return kept


def prepared_outputs(
    calls: Calls, layers: Mapping[str, Layer], prepared: Sequence[PreparedInput], blocks: Sequence[str]
) -> list[PreparedOutput]:
    """Return the modules whose result only column-parallel layers of the same block take, at least two of them.

    No stage of a pipeline begins within a block, so no ``DTensor`` crosses.

    Args:
        prepared: modules whose input is prepared, for layers that they contain.
        blocks: FQNs of the repeated blocks.
    """
    done = {fqn for prepared_input in prepared for fqn in prepared_input.columns}
    results = {event: event.result for event in (*calls.entered, *calls.events) if event.is_module and event.parent}
    by_module: dict[str, list[tuple[Value, tuple[str, ...]]]] = {}
    for event, value in results.items():
        if isinstance(value, Value) and value.requires_grad and event.fqn not in layers:
            takers = calls.takers.get(value, ())
            columns = tuple(taker.fqn for taker in takers if taker.is_module and _is_column(layers, taker.fqn))
            is_alone = len(columns) == len(takers) >= 2 and not done.intersection(columns)
            if is_alone and _in_one_block((event.fqn, *columns), blocks) and _is_made_by(calls, event, value):
                by_module.setdefault(event.fqn, []).append((value, columns))
    kept: dict[tuple[str, ...], PreparedOutput] = {}
    for fqn, outputs in by_module.items():
        if len(outputs) == calls.n_calls[fqn] and len({columns for _, columns in outputs}) == 1:
            prepared_output = PreparedOutput(fqn, tuple(value for value, _ in outputs), outputs[0][1])
            if _takes_nothing_else(calls, prepared_output):
                kept.setdefault(prepared_output.columns, prepared_output)
    return list(kept.values())


def _is_made_by(calls: Calls, event: Event, value: Value) -> bool:
    """Return True if a module, or what it calls, makes a value, which the model does not return."""
    maker = calls.maker.get(value)
    begin, end = calls.entered.get(event) or (calls.position[event], calls.position[event] + 1)
    is_returned = value in calls.kept or value in values_in(calls.record.root.result)
    return maker is not None and begin <= calls.position[maker] < end and not is_returned


def _in_one_block(fqns: Sequence[str], blocks: Sequence[str]) -> bool:
    return any(all(fqn.startswith(f"{block}.") for fqn in fqns) for block in blocks)


def _is_column(layers: Mapping[str, Layer], fqn: str) -> bool:
    return fqn in layers and layers[fqn].role in ("column", "head")


def _merged(calls: Calls, inputs: list[PreparedInput]) -> PreparedInput | None:
    """Return the calls of one module as one; None if they differ, or if its layers are called elsewhere, too."""
    facts = {
        (prepared_input.position, prepared_input.n_positional, prepared_input.columns) for prepared_input in inputs
    }
    merged = replace(inputs[0], values=tuple(prepared_input.values[0] for prepared_input in inputs))
    return merged if len(facts) == 1 and _takes_nothing_else(calls, merged) else None


def _takes_nothing_else(calls: Calls, prepared: PreparedInput | PreparedOutput) -> bool:
    """Return True if the layers take prepared tensors alone; of others, each layer would reduce the gradient itself."""
    times = Counter(prepared.columns)
    return all(calls.n_calls[fqn] == n_times * len(prepared.values) for fqn, n_times in times.items())


def _columns_alone(calls: Calls, layers: Mapping[str, Layer], module: Event, value: Value) -> list[str]:
    """Return the column-parallel layers in a call that take a value; none if anything else in the call takes it."""
    begin, end = calls.entered[module]
    columns: list[str] = []
    for event in calls.events[begin:end]:
        if value in values_in((event.args, event.kwargs)):
            if not event.is_module or not _is_column(layers, event.fqn):
                return []
            columns.append(event.fqn)
    if any(value in values_in(inner.result) for inner in (module, *module.children)):
        return []
    return columns
