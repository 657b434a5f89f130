"""The producers of values: which call of a record made each tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from modelsummary.record.events import Event, Value, values_in

__all__ = ["Producers"]

Key = TypeVar("Key")


class Producers(Generic[Key]):
    """The producer of each value, by any key; calls are passed in the order in which they ran."""

    def __init__(self) -> None:
        self._producer: dict[Value, Key] = {}
        self._in_storage: defaultdict[int, list[Value]] = defaultdict(list)

    def of(self, template: Any) -> list[tuple[Key, Value]]:
        """Return the values in a template whose producer is known, each with its producer."""
        return [(self._producer[value], value) for value in values_in(template) if value in self._producer]

    def add(self, key: Key, values: Sequence[Value]) -> None:
        """Note that ``key`` made these values, or wrote into them."""
        for value in values:
            if value not in self._producer:
                self._in_storage[value.storages[0]].append(value)
            self._producer[value] = key

    def add_missing(self, key: Key, template: Any) -> None:
        """Note ``key`` as the producer of the values in a template without one: a call that is not shown made them."""
        for value in values_in(template):
            self._producer.setdefault(value, key)

    def call(self, key: Key, event: Event) -> list[tuple[Key, Value]]:
        """Note what a call makes that is shown whole, and return what it takes."""
        taken = self.of((event.args, event.kwargs))
        for inner in event.walk():  # a tensor that leaves the call other than by its result
            for value in values_in(inner.result) if inner is not event else ():
                if value not in self._producer:
                    self.add(key, [value])
        written = event.writes[0] if event.writes else frozenset()
        self.add(key, [value for storage in written for value in self._in_storage.get(storage, ())])
        self.add(key, values_in(event.result))
        return taken
