"""Modules whose input or result is made a ``DTensor`` once, for all column-parallel layers that take it.

Each column-parallel layer reduces the gradient of its input over the ranks. Where query, key and value take the same
tensor, and it is the input of a module around them, or the result of a module that nothing else takes, one reduction is
enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from modelsummary.capture.templates import leaves_of
from modelsummary.parallel.derive import Layer
from modelsummary.parallel.record_calls import Calls
from modelsummary.parallel.stream import Redistribution, Stream
from modelsummary.record.events import Event, Value, values_in

__all__ = ["prepared_inputs", "prepared_outputs"]


@dataclass(frozen=True)
class Prepared:
    """A module whose input or result is prepared.

    Attributes:
        redistribution: what is prepared: an input, or the result of a module that returns one tensor.
        values: the tensor of each call.
        columns: FQNs of the layers that take it.
    """

    redistribution: Redistribution
    values: tuple[Value, ...]
    columns: tuple[str, ...]


def prepared_inputs(
    calls: Calls, layers: Mapping[str, Layer], stream: Stream | None = None, *, least: int = 2
) -> list[Prepared]:
    """Return the modules in which column-parallel layers alone, ``least`` of them or more, take an input.

    One layer is enough if the input is a chunk of the sequence: the module then sees the whole sequence. A tensor that
    a call takes as several arguments is not prepared: torch would prepare each argument, and reduce its gradient.
    """
    by_argument: dict[tuple[str, int | str, int], list[Prepared]] = {}
    for event in calls.entered:
        if event.parent is None or event.fqn in layers:
            continue
        for position, value in (*enumerate(event.args), *event.kwargs.items()):
            taken = [leaf for leaf in leaves_of((event.args, event.kwargs)) if leaf is value]
            if not isinstance(value, Value) or len(taken) > 1:
                continue
            columns = _columns_alone(calls, layers, event, value)
            placement = None if stream is None else stream.placement_at(value, calls.entered[event][0])
            if len(columns) >= (least if placement is None else 1):
                redistribution = Redistribution(event.fqn, True, position, placement, None)
                prepared = Prepared(redistribution, (value,), tuple(columns))
                by_argument.setdefault((event.fqn, position, len(event.args)), []).append(prepared)
    kept: list[Prepared] = []
    for prepared in _merged(calls, by_argument.values()):
        # Outer modules come first; inner ones need not prepare the same input again.
        if not any(set(prepared.columns) & set(outer.columns) for outer in kept):
            kept.append(prepared)
    return kept


def prepared_outputs(
    calls: Calls, layers: Mapping[str, Layer], prepared: Sequence[Prepared], blocks: Sequence[str]
) -> list[Prepared]:
    """Return the modules whose result only column-parallel layers of the same block take, at least two of them.

    No stage of a pipeline begins within a block, so no ``DTensor`` crosses.

    Args:
        prepared: modules whose input is prepared, for layers that they contain.
        blocks: FQNs of the repeated blocks.
    """
    done = {fqn for prepared_input in prepared for fqn in prepared_input.columns}
    results = {event: event.result for event in (*calls.entered, *calls.events) if event.is_module and event.parent}
    by_module: dict[str, list[Prepared]] = {}
    for event, value in results.items():
        if isinstance(value, Value) and value.requires_grad and event.fqn not in layers:
            takers = calls.takers.get(value, ())
            columns = tuple(taker.fqn for taker in takers if taker.is_module and _is_column(layers, taker.fqn))
            is_alone = len(columns) == len(takers) >= 2 and not done.intersection(columns)
            if is_alone and _in_one_block((event.fqn, *columns), blocks) and _is_made_by(calls, event, value):
                redistribution = Redistribution(event.fqn, False, 0, None, None)
                by_module.setdefault(event.fqn, []).append(Prepared(redistribution, (value,), columns))
    kept: dict[tuple[str, ...], Prepared] = {}
    for prepared_output in _merged(calls, by_module.values()):
        kept.setdefault(prepared_output.columns, prepared_output)
    return list(kept.values())


def _is_made_by(calls: Calls, event: Event, value: Value) -> bool:
    """Return True if a module, or what it calls, makes a value, which the model does not return."""
    maker = calls.maker.get(value)
    begin, end = calls.span(event)
    is_returned = value in calls.kept or value in values_in(calls.record.root.result)
    return maker is not None and begin <= calls.position[maker] < end and not is_returned


def _in_one_block(fqns: Sequence[str], blocks: Sequence[str]) -> bool:
    return any(all(fqn.startswith(f"{block}.") for fqn in fqns) for block in blocks)


def _is_column(layers: Mapping[str, Layer], fqn: str) -> bool:
    return fqn in layers and layers[fqn].role in ("column", "head")


def _merged(calls: Calls, groups: Iterable[Sequence[Prepared]]) -> Iterator[Prepared]:
    """Yield the calls of each module as one, unless they differ, or its layers take other tensors, too.

    Of tensors that are not prepared, each layer would reduce the gradient itself.
    """
    for group in groups:
        merged = replace(group[0], values=tuple(prepared.values[0] for prepared in group))
        takes_nothing_else = all(
            calls.n_calls[fqn] == n_times * len(group) for fqn, n_times in Counter(merged.columns).items()
        )
        are_all = len(group) == calls.n_calls[merged.redistribution.fqn]
        if are_all and takes_nothing_else and len({prepared.columns for prepared in group}) == 1:
            yield merged


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
