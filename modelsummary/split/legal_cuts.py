"""Flatten a record into a sequence of calls, and find the places where it can be cut.

A module call is a *unit* if calling the module again has the same effect. It can be *opened* if running its inner calls
one after the other has the same effect. The sequence holds the smallest calls: every module that can be opened is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from modelsummary.capture.templates import BatchSize, leaves_of
from modelsummary.errors import SplitError
from modelsummary.record.events import Event, Record, Value, attributes_in, values_in
from modelsummary.record.openings import Openings

__all__ = ["CallSequence", "Cut", "analyse"]


@dataclass
class Cut:
    """A place between two calls.

    Attributes:
        position: index of the call after the cut.
        values: values made before the cut and used after it.
        obstacle: why the model cannot be cut here; empty if it can.
    """

    position: int
    values: list[Value]
    obstacle: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes that cross here, for the recorded batch."""
        return sum(value.nbytes for value in self.values)


@dataclass
class CallSequence:
    """The smallest calls of a record, in order, and the cuts between them.

    Attributes:
        calls: the smallest calls.
        cuts: every place between two calls.
        span: call -> half-open range of its smallest calls; a smallest call spans itself.
        units: module calls that can be called as they are.
        why_whole: smallest call with inner calls -> why it cannot be replaced by them.
        allocated: for each call, the tensors that it makes, without views of others.
    """

    record: Record
    calls: list[Event]
    cuts: list[Cut]
    span: dict[Event, tuple[int, int]]
    units: set[Event]
    why_whole: dict[Event, str]
    allocated: list[list[Value]] = field(default_factory=list)

    def activation_bytes(self, call: int) -> int:
        """Return the bytes of the tensors that a call makes, without views of others."""
        return sum(value.nbytes for value in self.allocated[call])


def analyse(record: Record) -> CallSequence:
    """Flatten a record into its smallest calls. Raise ``SplitError`` if the model itself cannot be opened."""
    openings = Openings(record.root)
    reason = openings.why_closed(record.root)
    if reason:
        raise SplitError(f"{reason}; the model can only be run as one stage", possible=1)
    calls = list(_smallest(record.root, openings))
    if not calls:
        raise SplitError(f"the model's forward makes no calls that can be cut: {record.root!r:.80}", possible=1)
    span = _spans(record.root, calls)
    why_whole = {
        call: openings.why_whole(call) for call in calls if call.is_module and (call.children or call.obstacle)
    }
    sequence = CallSequence(record, calls, [], span, openings.units, why_whole)
    sequence.cuts, sequence.allocated = _cuts(sequence)
    return sequence


def _smallest(event: Event, openings: Openings) -> Iterator[Event]:
    for child in event.children:
        if openings.can_open(child):
            yield from _smallest(child, openings)
        else:
            yield child


def _spans(root: Event, calls: list[Event]) -> dict[Event, tuple[int, int]]:
    span = {call: (index, index + 1) for index, call in enumerate(calls)}

    def visit(event: Event) -> None:
        for child in event.children if event not in span else ():
            visit(child)
        inner = [span[child] for child in event.children if child in span]
        if event not in span and inner:
            span[event] = (inner[0][0], inner[-1][1])

    visit(root)
    return span


# ------------------------------------------------------------------------------------------------- cuts


def _cuts(sequence: CallSequence) -> tuple[list[Cut], list[list[Value]]]:
    """Return every place between two calls, and the tensors that each call allocates."""
    calls, root = sequence.calls, sequence.record.root
    n_calls = len(calls)
    made_at = dict.fromkeys(values_in((root.args, root.kwargs)), -1)
    last_use: dict[Value, int] = {}
    seen_storages = {value.storages[0] for value in made_at}
    allocated: list[list[Value]] = []
    for index, call in enumerate(calls):
        allocated.append([])
        for value in values_in(call.result):
            if value not in made_at:
                made_at[value] = index
                if value.storages[0] not in seen_storages:
                    seen_storages.add(value.storages[0])
                    allocated[-1].append(value)
    for event, (first, _) in sequence.span.items():  # a module called as a unit needs all of its arguments
        if event is not root:
            for value in values_in((event.args, event.kwargs)):
                last_use[value] = max(first, last_use.get(value, -1))
    last_use.update(dict.fromkeys(values_in(root.result), n_calls))

    by_position: list[list[Value]] = [[] for _ in range(n_calls)]
    for value, begin in sorted(made_at.items(), key=lambda item: item[0].index):
        for position in range(max(begin, 0) + 1, min(last_use.get(value, -1), n_calls - 1) + 1):
            by_position[position].append(value)
    obstacles = _Obstacles(sequence)
    return [
        Cut(position, by_position[position], obstacles.at(position, by_position[position]))
        for position in range(1, n_calls)
    ], allocated


class _Obstacles:
    """The reasons why a sequence cannot be cut at a place."""

    def __init__(self, sequence: CallSequence) -> None:
        self._calls = sequence.calls
        self._last_write: dict[tuple[int, int], int] = {}
        self._first_use: dict[tuple[int, int], int] = {}
        self._last_batch = -1
        for index, call in enumerate(self._calls):
            for value in values_in((call.args, call.kwargs, call.result)):
                for key in enumerate(value.storages):
                    self._first_use.setdefault(key, index)
            for run, storages in enumerate(call.writes):
                for storage in storages:
                    self._last_write[run, storage] = index
            answer = call.result if call.is_decision else None
            if any(isinstance(leaf, BatchSize) for leaf in leaves_of((call.args, call.kwargs, answer))):
                self._last_batch = index
        self._together = [*_same_state(sequence), *_same_tensor(sequence)]

    def at(self, position: int, values: Iterable[Value]) -> str:
        """Return why ``values`` cannot cross at a position; empty if they can."""
        values = list(values)
        if not values:
            return "no tensor crosses"
        for value in values:
            keys = list(enumerate(value.storages))
            writes = [self._last_write.get(key, -1) for key in keys]
            # An input that is first used after the cut may be written there: a cache of keys and values.
            passes_by = not value.requires_grad and all(self._first_use.get(key, position) >= position for key in keys)
            if max(writes) >= position and not passes_by:
                return f"{self._calls[max(writes)].name!r} writes in place into a tensor that crosses"
            if value.is_dynamic:
                return "the size of a tensor that crosses depends on values"
        if position <= self._last_batch and not any(value.batch for value in values):
            return "no tensor that crosses has the batch size, which a later call needs"
        for first, last, reason in self._together:
            if first < position <= last:
                return reason
        return ""


def _same_state(sequence: CallSequence) -> Iterator[tuple[int, int, str]]:
    """Yield (first call, last call, reason) for modules that change their own attributes.

    Their calls must stay in one stage: two stages would hold two copies of the attributes.
    """
    positions: defaultdict[str, list[int]] = defaultdict(list)
    stateful: set[str] = set()
    for event, (first, _) in sequence.span.items():
        if event.is_module:
            positions[event.fqn].append(first)
            if event.assigned:
                stateful.add(event.fqn)
    for fqn in stateful:
        if len(positions[fqn]) > 1:
            yield min(positions[fqn]), max(positions[fqn]), f"{fqn!r} changes itself and is called on both sides"


def _same_tensor(sequence: CallSequence) -> Iterator[tuple[int, int, str]]:
    """Yield (first call, last call, reason) for model tensors written in place: one stage must hold all their users."""
    storages_of = sequence.record.storages_of
    owner = {(run, storage): fqn for fqn, storages in storages_of.items() for run, storage in enumerate(storages)}
    written = {
        owner[key]
        for call in sequence.calls
        for run, storages in enumerate(call.writes)
        for storage in storages
        if (key := (run, storage)) in owner
    }
    written.update(*(event.assigned & storages_of.keys() for call in sequence.calls for event in call.walk()))
    if not written:
        return
    names = sorted(storages_of)
    users: defaultdict[str, list[int]] = defaultdict(list)
    for index, call in enumerate(sequence.calls):
        used: set[str] = {attribute.fqn for attribute in attributes_in((call.args, call.kwargs))}
        if call.is_module:
            used.update(_below(call.fqn, names))
        for fqn in used & written:
            users[fqn].append(index)
    for fqn, indices in users.items():
        yield min(indices), max(indices), f"{fqn!r} is written in place and used on both sides"


def _below(fqn: str, names: list[str]) -> Iterator[str]:
    prefix = f"{fqn}."
    for position in range(bisect_left(names, prefix), len(names)):
        if not names[position].startswith(prefix):
            return
        yield names[position]
