"""Decide which module calls of a record can be called whole, and which can be replaced by their calls."""

from __future__ import annotations

from collections import defaultdict

from modelsummary.capture.templates import Unknown, leaves_of
from modelsummary.record.events import Event, Value, values_in

__all__ = ["Openings"]


class Openings:
    """The module calls that can be called whole, and the module calls that can be opened.

    Attributes:
        units: events that can be called whole: they use only tensors that they are given, and return all tensors that
            are used outside.
    """

    def __init__(self, root: Event) -> None:
        self.units: set[Event] = set()
        self._closed: dict[Event, str] = {}
        self._blocked_by: dict[Event, Event] = {}  # closed event -> the inner call that cannot be whole or opened
        self._root = root
        self._order = {event: index for index, event in enumerate(root.walk())}
        self._last: dict[Event, int] = {}
        self._made_by: dict[Value, int] = dict.fromkeys(values_in((root.args, root.kwargs)), -1)
        self._given = {event: values_in((event.args, event.kwargs)) for event in self._order}
        self._returned = {event: values_in(event.result) for event in self._order}
        self._uses: defaultdict[Value, list[int]] = defaultdict(list)
        events = list(self._order)
        for event in reversed(events):
            self._last[event] = max([self._order[event], *(self._last[child] for child in event.children)])
        self._register(events)
        for event in reversed(events):  # descendants first
            if event.is_module:
                self._judge(event)

    def _register(self, events: list[Event]) -> None:
        """Register by number which event makes a value first, and which events use it."""
        for event in events:
            for value in self._given[event]:
                self._uses[value].append(self._order[event])
        for value in self._returned[self._root]:
            self._uses[value].append(len(events))
        # A result comes after the calls of its module.
        for event in sorted(events, key=lambda call: (self._last[call], -self._order[call])):
            for value in self._returned[event]:
                self._made_by.setdefault(value, self._order[event])

    def _judge(self, event: Event) -> None:
        first, last = self._order[event], self._last[event]
        inside = range(first, last + 1)
        problem = _unknown_in(event)
        taken, returned = set(self._given[event]), set(self._returned[event])
        for inner in event.walk():
            for value in self._given[inner] if inner is not event else ():
                if value not in taken and self._made_by.get(value, -1) not in inside:
                    problem = problem or "uses a tensor that it is not given"
            for value in self._returned[inner]:
                is_made_here = value not in returned and self._made_by.get(value, -1) in inside
                if is_made_here and any(use not in inside for use in self._uses[value]):
                    problem = problem or "makes a tensor that is used outside, and does not return it"
        if not problem:
            self.units.add(event)
        obstacle = event.obstacle or self._obstacle_inside(event)
        blocker = next((child for child in event.children if child in self._closed and child not in self.units), None)
        if obstacle:
            self._closed[event] = f"{obstacle}, and {problem}" if problem and problem != obstacle else obstacle
        elif blocker is not None:
            self._closed[event], self._blocked_by[event] = f"calls {blocker.fqn!r}, which cannot be cut", blocker

    def _obstacle_inside(self, event: Event) -> str:
        if not event.children:
            return "calls nothing"
        if not any(child.is_module for child in event.children) and any(child.dtype_bound for child in event.children):
            return "computes with the dtype of a tensor"  # called whole, it reads the dtype anew in each run
        for child in event.children:
            problem = "" if child.is_module else _unknown_in(child)
            if problem:
                return problem
            if child.is_decision and any(isinstance(leaf, Unknown) for leaf in leaves_of(child.result)):
                return f"decides by values of tensors that vary with the batch size: it calls {child.name}()"
        if event is self._root:
            unknown = next((leaf for leaf in leaves_of(event.result) if isinstance(leaf, Unknown)), None)
            if unknown is not None:
                return f"returns {unknown.reason} (return tensors instead; in transformers, pass use_cache=False)"
        return ""

    def can_open(self, event: Event) -> bool:
        """Return True if a module can be replaced by its calls, one after the other."""
        return event.is_module and event not in self._closed

    def why_closed(self, event: Event) -> str:
        """Return which module cannot be opened, and why; empty if it can."""
        while event in self._blocked_by:
            event = self._blocked_by[event]
        reason = self._closed.get(event, "")
        return f"{_where(event)} {reason}" if reason else ""

    def why_whole(self, event: Event) -> str:
        """Return why a module that cannot be opened is called as a whole, in a clause about "it"."""
        return self.why_closed(event) if event in self._blocked_by else f"it {self._closed[event]}"


def _unknown_in(event: Event) -> str:
    leaves = leaves_of((event.args, event.kwargs, event.unknown))
    unknown = next((leaf for leaf in leaves if isinstance(leaf, Unknown)), None)
    return f"is given {unknown.reason}" if unknown is not None else ""


def _where(event: Event) -> str:
    return f"layer {event.fqn!r}" if event.fqn else "the model"
