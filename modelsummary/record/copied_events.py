"""Copy the merged calls inside one module call for an equal call that did not run: other names, other tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from modelsummary.capture.templates import Attribute, leaves_of, map_template
from modelsummary.record.events import Event, Value
from modelsummary.record.tensors import Token

__all__ = ["CopiedEvents", "NotEqual"]


class NotEqual(Exception):
    """Calls that were equal in one run differ in another; the runs must be repeated with every call."""


class CopiedEvents:
    """The copies of the calls inside ``like``, whose module ran, for the call ``event``, whose module did not.

    Both are merged. Tensors correspond as the arguments and results do. A tensor that a call inside makes is made anew,
    in memory of its own unless it is a view. Other tensors are the same for both.

    Args:
        storages_of: for each run, FQN of a tensor of the model -> id of its memory.
        add: adds a value to the record and returns it, from the value to copy and the tensor of the first run.
        new_storage: returns an id of memory that no tensor of any run has.

    Raises:
        NotEqual: the arguments or results do not correspond.
    """

    def __init__(
        self,
        like: Event,
        event: Event,
        storages_of: Sequence[Mapping[str, int]],
        add: Callable[[Value, Token], Value],
        new_storage: Callable[[], int],
    ) -> None:
        self._names = like.fqn, event.fqn
        self._storages_of, self._add, self._new_storage = storages_of, add, new_storage
        self._values: dict[Value, Value] = {}
        self._storages: dict[tuple[int, int], int] = {}  # run, memory of a value of ``like`` -> of its copy
        pairs = [(leaves_of((call.args, call.kwargs)), leaves_of(call.result)) for call in (like, event)]
        for pair, others in zip(*pairs, strict=True):
            if len(pair) != len(others):
                raise NotEqual
            for one, other in zip(pair, others, strict=True):
                if isinstance(one, Value) is not isinstance(other, Value):
                    raise NotEqual
                if isinstance(one, Value) and self._values.setdefault(one, other) is not other:
                    raise NotEqual
        for one, other in self._values.items():
            self._correspond(one.storages, other.storages)

    def children(self, like: Event, own: Event, event: Event) -> list[Event]:
        """Return copies of the calls inside ``like`` as the children of ``event``.

        Args:
            own: the call in the first run, in which it ran.
        """
        if not like.children:  # they differ between the runs: the merged call has none
            return []
        return [self._copy(*children, event) for children in zip(like.children, own.children, strict=True)]

    def _copy(self, like: Event, own: Event, parent: Event) -> Event:
        event = replace(like, fqn=own.fqn, parent=parent, children=[])
        event.args, event.kwargs = map_template(self._leaf, (like.args, like.kwargs))
        event.children = self.children(like, own, event)
        for leaf, token in zip(leaves_of(like.result), leaves_of(own.result), strict=True):
            if isinstance(leaf, Value) and leaf not in self._values:
                self._values[leaf] = self._made(leaf, token)
        event.result = map_template(self._leaf, like.result)
        event.writes = self.writes(like)
        return event

    def writes(self, like: Event) -> tuple[frozenset[int], ...]:
        """Return the memory that the copy of a call writes in each run, after the calls inside it were copied."""
        return tuple(
            frozenset(self._storage(run, storage) for storage in storages) for run, storages in enumerate(like.writes)
        )

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Value):
            return self._values.get(leaf, leaf)
        if not isinstance(leaf, Attribute):
            return leaf
        renamed = self._named(leaf.fqn)
        self._correspond(*([storages[fqn] for storages in self._storages_of] for fqn in (leaf.fqn, renamed)))
        return Attribute(renamed)

    def _correspond(self, one: Sequence[int], other: Sequence[int]) -> None:
        """Note that memory of ``like`` is memory of the copy, in each run."""
        for run, (storage, theirs) in enumerate(zip(one, other, strict=True)):
            if self._storages.setdefault((run, storage), theirs) != theirs:
                raise NotEqual

    def _named(self, fqn: str) -> str:
        one, other = self._names
        return other + fqn[len(one) :] if fqn.startswith(f"{one}.") else fqn

    def _made(self, value: Value, token: Any) -> Value:
        if not isinstance(token, Token):
            raise NotEqual
        if token.storage == value.storages[0]:  # both are views of a tensor from outside
            self._correspond(value.storages, value.storages)
        copied = self._add(value, token)
        copied.storages = tuple(self._storage(*numbered) for numbered in enumerate(value.storages))
        return copied

    def _storage(self, run: int, storage: int) -> int:
        if (run, storage) not in self._storages:
            self._storages[run, storage] = self._new_storage()
        return self._storages[run, storage]
