"""The calls of each stage, and the values that cross into it and out of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from modelsummary.record.events import Event, Value, values_in
from modelsummary.split.legal_cuts import CallSequence

__all__ = ["StagePart", "parts_of"]


@dataclass(eq=False)
class StagePart:
    """The calls and crossing values of one stage.

    Attributes:
        events: calls of the stage; a module that lies in it entirely is one call, if it is a unit.
        takes: values that cross into it; the model's inputs for the first part.
        gives: values that cross out of it; the values in the model's result for the last part.
    """

    events: list[Event]
    takes: list[Value]
    gives: list[Value]


def parts_of(sequence: CallSequence, cuts: Sequence[int]) -> list[StagePart]:
    """Return the part of each stage."""
    root = sequence.record.root
    bounds = [0, *cuts, len(sequence.calls)]
    every = [list(_events(sequence, begin, end)) for begin, end in pairwise(bounds)]
    made_in = dict.fromkeys(values_in((root.args, root.kwargs)), -1)
    last_use = dict.fromkeys(made_in, -1)
    for number, events in enumerate(every):
        for event in events:
            last_use.update(dict.fromkeys(values_in((event.args, event.kwargs)), number))
            for value in values_in(event.result):
                made_in.setdefault(value, number)
    last_use.update(dict.fromkeys(values_in(root.result), len(every)))
    in_order = sorted(made_in, key=lambda value: value.index)

    def crossing(number: int) -> list[Value]:
        return [value for value in in_order if made_in[value] < number <= last_use.get(value, -1)]

    takes = [values_in((root.args, root.kwargs)), *map(crossing, range(1, len(every)))]
    return [StagePart(*each) for each in zip(every, takes, [*takes[1:], values_in(root.result)], strict=True)]


def _events(sequence: CallSequence, begin: int, end: int) -> Iterator[Event]:
    """Yield the calls from ``begin`` to ``end``. A unit that lies inside entirely is yielded as one call."""

    def visit(event: Event) -> Iterator[Event]:
        if event not in sequence.span:
            return
        first, last = sequence.span[event]
        if last <= begin or first >= end:
            return
        is_inside = begin <= first and last <= end
        if is_inside and (event in sequence.units or not event.is_module) and event.parent is not None:
            yield event
            return
        if (first, last) == (first, first + 1) and sequence.calls[first] is event:
            yield event
            return
        for child in event.children:
            yield from visit(child)

    yield from visit(sequence.record.root)
