"""The calls of each stage, and the values that cross into it and out of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any

from modelsummary.capture.templates import Attribute, leaves_of
from modelsummary.record.events import Event, Value, values_in
from modelsummary.split.legal_cuts import CallSequence

__all__ = ["StagePart", "parts_of", "written_before"]


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
    events_by_part = [list(_events(sequence, begin, end)) for begin, end in pairwise(bounds)]
    made_in = dict.fromkeys(values_in((root.args, root.kwargs)), -1)
    last_use = dict.fromkeys(made_in, -1)
    for index, events in enumerate(events_by_part):
        for event in events:
            last_use.update(dict.fromkeys(values_in((event.args, event.kwargs)), index))
            for value in values_in(event.result):
                made_in.setdefault(value, index)
    last_use.update(dict.fromkeys(values_in(root.result), len(events_by_part)))
    digests = _digests(sequence, events_by_part)
    in_order = sorted(made_in, key=lambda value: (digests.get(value, ""), value.index))

    def crossing(index: int) -> list[Value]:
        return [value for value in in_order if made_in[value] < index <= last_use.get(value, -1)]

    takes = [values_in((root.args, root.kwargs)), *map(crossing, range(1, len(events_by_part)))]
    return [
        StagePart(*fields) for fields in zip(events_by_part, takes, [*takes[1:], values_in(root.result)], strict=True)
    ]


def written_before(parts: Sequence[StagePart]) -> list[frozenset[int]]:
    """Return ids of the memory into which tensors with a gradient were written: before each part, and after the last.

    The first run notes whether a tensor takes a gradient when it is made: zeros do, once a result is copied into them.
    """
    written: set[int] = set()
    before = [frozenset(written)]
    for part in parts:
        for event in part.events:
            takes = values_in((event.args, event.kwargs))
            if event.grad and any(value.requires_grad or not written.isdisjoint(value.storages[:1]) for value in takes):
                written.update(*event.writes[:1])
        before.append(frozenset(written))
    return before


def _digests(sequence: CallSequence, parts: Sequence[Sequence[Event]]) -> dict[Value, str]:
    """Return a digest of the calls that make each value, by which every process sends them in one order.

    Numbers of values do not serve: a forward that runs over a set of names makes them in another order in each process.
    """
    root = sequence.record.root
    digests = {value: str(position) for position, value in enumerate(values_in((root.args, root.kwargs)))}
    for event in (event for events in parts for event in events):
        leaves = leaves_of((event.args, event.kwargs))
        takes = [digests.get(leaf) if isinstance(leaf, Value) else _constant(leaf) for leaf in leaves]
        text = repr((event.fqn, event.is_module or event.name, takes))
        digest = blake2b(text.encode(), digest_size=8).hexdigest()
        for position, value in enumerate(values_in(event.result)):
            digests.setdefault(value, f"{digest} {position}")
    return digests


def _constant(leaf: Any) -> Any:
    """Return a constant that prints alike in every process; a tensor of the model by its name."""
    return leaf.fqn if isinstance(leaf, Attribute) else leaf if type(leaf) in (bool, int, float, str) else None


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
