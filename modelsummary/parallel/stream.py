"""Streams: what is sharded along the sequence, and the modules at whose boundary that changes."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from modelsummary.parallel.placements import Shard
from modelsummary.record.events import Event, Value

__all__ = ["Redistribution", "Stream", "results_of"]


class Redistribution(NamedTuple):
    """A tensor that is gathered, cut, or made a ``DTensor`` where it enters or leaves a module.

    Attributes:
        fqn: of the module.
        is_input: where the tensor enters the module, else where it leaves.
        position: of the tensor among the positional arguments, or among the results; a name for a keyword argument.
        before, after: the placement in front of it and behind it; None: whole.
    """

    fqn: str
    is_input: bool
    position: int | str
    before: Shard | None
    after: Shard | None

    def where(self, begin: float, end: float) -> tuple[float, float]:
        """Return where its placement begins and ends to hold, for a call between two positions.

        What leaves a module is redistributed before it enters the next one.
        """
        return (begin, end) if self.is_input else (end - 0.5, math.inf)

    def is_at(self, other: Redistribution) -> bool:
        """Return True for the same tensor of the same module."""
        return self[:3] == other[:3]

    def tensor(self, event: Event) -> Any:
        """Return the tensor in a call of the module; None if the call does not have it."""
        if isinstance(self.position, str):
            return event.kwargs.get(self.position)
        tensors = event.args if self.is_input else results_of(event)
        return tensors[self.position] if len(tensors) > self.position else None


@dataclass
class Stream:
    """What is sharded along the sequence.

    Attributes:
        scattered: FQN of a row-parallel layer, attention or embedding -> dimension along which its result is scattered.
        redistributions: tensors that are gathered or cut where they enter or leave a module.
        norms: FQN of a norm -> dimension of its input that is sharded.
        gathered: FQN of a column-parallel layer that takes a chunk -> dimension along which it is gathered.
        attended: FQN of an ``nn.MultiheadAttention`` -> placements of its query, key and value; None: whole.
        placements: value -> its placement where it is made.
        results: position of an event -> placements of its results, after the redistributions of that module.
    """

    scattered: dict[str, int]
    redistributions: dict[Redistribution, None] = field(default_factory=dict)
    norms: dict[str, int] = field(default_factory=dict)
    gathered: dict[str, int] = field(default_factory=dict)
    attended: dict[str, tuple[Shard | None, ...]] = field(default_factory=dict)
    placements: dict[Value, Shard] = field(default_factory=dict)
    results: dict[int, list[Shard | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._scopes: dict[Value, list[tuple[float, float, Shard | None]]] = {}

    def without(self, wrong: Collection[Any]) -> Stream | None:
        """Return the stream without these redistributions; None if they are not all redistributions."""
        if not all(isinstance(redistribution, Redistribution) for redistribution in wrong):
            return None
        kept = {redistribution: None for redistribution in self.redistributions if redistribution not in wrong}
        return Stream(self.scattered, kept)

    def placement_at(self, value: Value, position: float, outside: float | None = None) -> Shard | None:
        """Return the placement of a value for the event at a position; None if it is whole.

        Args:
            outside: ignore modules that are entered at this position or later.
        """
        latest_placement, latest_begin = self.placements.get(value), -1.0
        for begin, end, placement in self._scopes.get(value, ()):
            if latest_begin <= begin <= position < end and (outside is None or begin < outside):
                latest_placement, latest_begin = placement, begin
        return latest_placement

    def change(self, value: Value, begin: float, end: float, placement: Shard | None) -> None:
        """Give a value another placement for the events between two positions."""
        self._scopes.setdefault(value, []).append((begin, end, placement))


def results_of(event: Event) -> list[Any]:
    """Return what a module returns, alone or in a tuple; nothing for a tuple of one, which torch's style unpacks."""
    result = event.result
    if isinstance(result, tuple):
        return list(result) if len(result) > 1 else []
    return [result]
