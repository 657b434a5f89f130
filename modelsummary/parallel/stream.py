"""Streams: what is sharded along the sequence, and the modules at whose boundary that changes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from modelsummary.parallel.layouts import Sharded
from modelsummary.record.events import Value

__all__ = ["Boundary", "Stream"]


class Boundary(NamedTuple):
    """A tensor that is gathered or cut where it enters or leaves a module.

    Attributes:
        fqn: of the module.
        position: of the tensor among the positional arguments, or among the results; a name for a keyword argument.
        layout: of the chunks.
        gathers: True: from chunks to the whole tensor; False: from the whole tensor to chunks.
    """

    fqn: str
    position: int | str
    layout: Sharded
    gathers: bool


@dataclass
class Stream:
    """What is sharded along the sequence.

    Attributes:
        scattered: FQN of a row-parallel layer, attention or embedding -> dimension along which its result is scattered.
        entries, exits: tensors that are gathered or cut where they enter or leave a module.
        norms: FQN of a norm -> dimension of its input that is sharded.
        gathered: FQN of a column-parallel layer that takes a chunk -> dimension along which it is gathered.
        attended: FQN of an ``nn.MultiheadAttention`` -> layouts of its query, key and value; None: whole.
        layouts: value -> its layout where it is made.
        results: position of an event -> layouts of its results, after the boundaries of that module.
    """

    scattered: dict[str, int]
    entries: dict[Boundary, None] = field(default_factory=dict)
    exits: dict[Boundary, None] = field(default_factory=dict)
    norms: dict[str, int] = field(default_factory=dict)
    gathered: dict[str, int] = field(default_factory=dict)
    attended: dict[str, tuple[Sharded | None, ...]] = field(default_factory=dict)
    layouts: dict[Value, Sharded] = field(default_factory=dict)
    results: dict[int, list[Sharded | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._scopes: dict[Value, list[tuple[int, int, Sharded | None]]] = {}

    def without(self, wrong: Collection[Any]) -> Stream | None:
        """Return the stream without these boundaries; None if they are not all boundaries."""
        if not all(isinstance(boundary, Boundary) for boundary in wrong):
            return None
        entries = {boundary: None for boundary in self.entries if boundary not in wrong}
        return Stream(self.scattered, entries, {boundary: None for boundary in self.exits if boundary not in wrong})

    def layout_at(self, value: Value, position: int, outside: int | None = None) -> Sharded | None:
        """Return the layout of a value for the event at a position; None if it is whole.

        Args:
            outside: ignore modules that are entered at this position or later.
        """
        latest_layout, latest_begin = self.layouts.get(value), -1
        for begin, end, layout in self._scopes.get(value, ()):
            if latest_begin <= begin <= position < end and (outside is None or begin < outside):
                latest_layout, latest_begin = layout, begin
        return latest_layout

    def change(self, value: Value, begin: int, end: int, layout: Sharded | None) -> None:
        """Give a value another layout for the events between two positions."""
        self._scopes.setdefault(value, []).append((begin, end, layout))
